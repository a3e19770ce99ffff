from ._datasets import (
    Prepared as Prepared,
    prepare_named as prepare_named,
    prepare_source as prepare_source,
)
from ._generated import GeneratedDataset as GeneratedDataset
from ._generated_images import GENERATED_IMAGES as GENERATED_IMAGES
from ._image_folder import prepare_image_folder as prepare_image_folder
from ._mnist1d import MNIST1D as MNIST1D
from ._pydoc_squad import PYDOC_SQUAD as PYDOC_SQUAD
from ._running_text import (
    CleanedCorpus as CleanedCorpus,
    folder_corpus as folder_corpus,
    folder_origin as folder_origin,
    make_running_store as make_running_store,
    shipped_corpus as shipped_corpus,
)
from ._shipped_text import PRESETS as PRESETS, preset_corpora as preset_corpora
from ._token_stores import Corpus as Corpus, make_token_store as make_token_store
