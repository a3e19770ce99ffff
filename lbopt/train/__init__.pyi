from ._checkpoint import (
    Checkpoints as Checkpoints,
    check_name as check_name,
    is_begun as is_begun,
    restore_chosen as restore_chosen,
)
from ._loop import check_vocabulary as check_vocabulary, train as train
from ._progress import Progress as Progress, said_by_first as said_by_first, say as say
from ._run import Cadence as Cadence, Run as Run, Target as Target
from ._variables import read_variables as read_variables
