from ._answers import (
    check_answer_length as check_answer_length,
    choose_answers as choose_answers,
    f1_score as f1_score,
    score_answers as score_answers,
)
from ._examples import Question as Question, question_from_record as question_from_record
from ._features import (
    EvaluationWindows as EvaluationWindows,
    TrainingWindows as TrainingWindows,
    check_windows as check_windows,
)
