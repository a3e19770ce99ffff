from ._answers import (
    evaluate_answers as evaluate_answers,
    predict_fn as predict_fn,
    question_inputs as question_inputs,
)
from ._evaluation import Evaluation as Evaluation, Evaluator as Evaluator
from ._means import batch_arguments as batch_arguments, evaluate as evaluate, means_of as means_of
from ._squad_metrics import (
    choose_answers as choose_answers,
    exact_match as exact_match,
    f1_score as f1_score,
    score_answers as score_answers,
)
from ._streams import evaluate_streams as evaluate_streams, stream_arguments as stream_arguments
