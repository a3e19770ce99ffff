from ._examples import (
    Question as Question,
    normalize_answer as normalize_answer,
    question_from_record as question_from_record,
)
from ._features import (
    EvaluationWindows as EvaluationWindows,
    TrainingWindows as TrainingWindows,
    check_answer_length as check_answer_length,
    check_windows as check_windows,
)
