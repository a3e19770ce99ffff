from ._guard import run_guarded as run_guarded
from ._local_devices import given_devices as given_devices
from ._member import (
    MEMBER_VARIABLE as MEMBER_VARIABLE,
    STARTING_PATIENCE as STARTING_PATIENCE,
    Job as Job,
    MemberJob as MemberJob,
    SoloJob as SoloJob,
    join_job as join_job,
)
from ._place import (
    JOB_FLAGS as JOB_FLAGS,
    find_place as find_place,
    given_job_flags as given_job_flags,
)
from ._preemption import PreemptionWatch as PreemptionWatch
from ._pulse import beat as beat, beating as beating
