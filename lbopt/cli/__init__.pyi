from ._compilation_cache import MIN_COMPILE_S as MIN_COMPILE_S
from ._config_files import config_files as config_files
from ._flags import (
    call_get_config as call_get_config,
    config_rows as config_rows,
    load_config as load_config,
)
from ._main import main as main, run as run
from ._plan import SAFE_DEVICES as SAFE_DEVICES
from ._suggest import Advice as Advice, suggest_for as suggest_for
from ._sweep import sweep_in as sweep_in
from ._train import Trained as Trained, train_in as train_in
