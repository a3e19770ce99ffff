from ._checkpoint import Checkpoints as Checkpoints, restore_chosen as restore_chosen
from ._loop import check_vocabulary as check_vocabulary, train as train
from ._on_disk import check_name as check_name, is_begun as is_begun
from ._profile import ProfiledSteps as ProfiledSteps
from ._progress import Progress as Progress, said_by_first as said_by_first, say as say
from ._ranking import lower_is_better as lower_is_better
from ._run import (
    Cadence as Cadence,
    NoiseGrowth as NoiseGrowth,
    Reweighing as Reweighing,
    Run as Run,
    Target as Target,
    count_multiples as count_multiples,
    is_due as is_due,
    linked as linked,
)
from ._variables import read_variables as read_variables
