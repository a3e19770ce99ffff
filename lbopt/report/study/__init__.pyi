from ._decision import decision_lines as decision_lines
from ._power import (
    detectable_difference as detectable_difference,
    score_deviation as score_deviation,
    seeds_needed as seeds_needed,
)
from ._read import read_study as read_study
from ._study import Study as Study
from ._write import StudyReport as StudyReport, write_study_report as write_study_report
