from ._aggregator import (
    AggregatorConfig as AggregatorConfig,
    group_of as group_of,
    make_aggregator as make_aggregator,
    scaled_modules as scaled_modules,
)
from ._batch_schedule import (
    NOISE_SCALE as NOISE_SCALE,
    BatchScheduleConfig as BatchScheduleConfig,
    at_batch_size as at_batch_size,
    doubled_sizes as doubled_sizes,
    examples_in as examples_in,
    naming_growth as naming_growth,
    resolve_batch_schedule as resolve_batch_schedule,
)
from ._checks import (
    LARGEST_INTEGER as LARGEST_INTEGER,
    MOST_STEPS as MOST_STEPS,
    check_fields as check_fields,
    completed_json as completed_json,
    config_from_json as config_from_json,
    config_to_json as config_to_json,
    json_differences as json_differences,
    json_without as json_without,
    naming as naming,
)
from ._data import (
    FILES as FILES,
    PHOTOGRAPHS as PHOTOGRAPHS,
    TASKS as TASKS,
    TEXT as TEXT,
    ArraysConfig as ArraysConfig,
    DataConfig as DataConfig,
    ImageFolderConfig as ImageFolderConfig,
    TfdsConfig as TfdsConfig,
    check_no_image as check_no_image,
    is_own as is_own,
    task_of as task_of,
)
from ._diloco import DilocoConfig as DilocoConfig, with_local_steps as with_local_steps
from ._fields import check_flag as check_flag, default_of as default_of, unused as unused
from ._foreign import MATRIX_OPTIMIZERS as MATRIX_OPTIMIZERS, free_arguments as free_arguments
from ._from_text import OF_TEXT as OF_TEXT, FromText as FromText
from ._layout import data_and_model as data_and_model, without_layout as without_layout
from ._loss import LossConfig as LossConfig
from ._measure import MeasureConfig as MeasureConfig
from ._model import (
    AUTOMATIC_STEM as AUTOMATIC_STEM,
    BATCH_NORMED as BATCH_NORMED,
    PATCHED as PATCHED,
    TRANSFORMERS as TRANSFORMERS,
    ModelConfig as ModelConfig,
)
from ._optimizer import (
    OptaxConfig as OptaxConfig,
    OptimizerConfig as OptimizerConfig,
    check_fits as check_fits,
    make_optimizer as make_optimizer,
    resolve_clip as resolve_clip,
)
from ._optimizer_numbers import (
    optimizer_numbers as optimizer_numbers,
    with_optimizer_numbers as with_optimizer_numbers,
)
from ._parallel import ParallelConfig as ParallelConfig
from ._phase import PhaseConfig as PhaseConfig
from ._recipe_row import parse_row as parse_row
from ._reference import FieldEntry as FieldEntry, config_fields as config_fields
from ._scaling import (
    BatchRatios as BatchRatios,
    Setting as Setting,
    batch_ratios as batch_ratios,
    check_moments as check_moments,
    check_rule as check_rule,
    moment_decays as moment_decays,
    optimizer_settings as optimizer_settings,
    scale_optimizer as scale_optimizer,
)
from ._schedule import (
    ResolvedSchedule as ResolvedSchedule,
    ScheduleConfig as ScheduleConfig,
    make_schedule as make_schedule,
    resolve_schedule as resolve_schedule,
)
from ._search import SearchConfig as SearchConfig, check_search as check_search
from ._step_options import naming_step as naming_step, step_options as step_options
from ._sweep import Arm as Arm, SweepConfig as SweepConfig
from ._train import (
    TRACKERS as TRACKERS,
    About as About,
    CheckpointConfig as CheckpointConfig,
    TrainConfig as TrainConfig,
    naming_phase2 as naming_phase2,
)
