from ._files import WEIGHTS_FILE as WEIGHTS_FILE, path_exists as path_exists
from ._folders import new_folder as new_folder, require_new_folder as require_new_folder
from ._huggingface import load_huggingface as load_huggingface, save_huggingface as save_huggingface
from ._image_processor import PROCESSOR_FILE as PROCESSOR_FILE, image_processor as image_processor
from ._native import (
    load_safetensors as load_safetensors,
    read_safetensors_metadata as read_safetensors_metadata,
    save_safetensors as save_safetensors,
)
