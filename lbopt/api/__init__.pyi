from ._coordinates import CoordinateCheck as CoordinateCheck, coordinate_check as coordinate_check
from ._plan import run_plan as run_plan
from ._problem import Problem as Problem
from ._suggest import suggest as suggest
from ._sweep import StudyResult as StudyResult, run_sweep as run_sweep
from ._training import TrainingResult as TrainingResult, run_training as run_training
