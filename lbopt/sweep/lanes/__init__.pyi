from ._feed import resident_arrays as resident_arrays
from ._on_mesh import (
    MeshProgram as MeshProgram,
    MeshSession as MeshSession,
    check_cells as check_cells,
    make_mesh_probe as make_mesh_probe,
)
from ._program import (
    TRIALS_AXIS as TRIALS_AXIS,
    GrowingProgram as GrowingProgram,
    Program as Program,
    TrialBatching as TrialBatching,
    most_lanes as most_lanes,
)
from ._scores import Pairs as Pairs
from ._session import Equipment as Equipment, Once as Once, Session as Session
from ._trial_arguments import program_key as program_key
