from ._byte_pairs import (
    BytePairs as BytePairs,
    check_vocab_size as check_vocab_size,
    learn_byte_pairs as learn_byte_pairs,
    pieces_of as pieces_of,
)
from ._corpora import (
    Counts as Counts,
    build_store as build_store,
    folder_documents as folder_documents,
    learn_vocabulary as learn_vocabulary,
    text_files as text_files,
    wikipedia_documents as wikipedia_documents,
)
from ._masked import MaskedLMDataset as MaskedLMDataset
from ._near_duplicates import near_duplicates as near_duplicates
from ._ptb import load_ptb as load_ptb, missing_ptb_files as missing_ptb_files
from ._pydoc import (
    load_pydoc_masked_lm as load_pydoc_masked_lm,
    load_pydoc_topics as load_pydoc_topics,
    split_pydoc_topics as split_pydoc_topics,
)
from ._tokens import (
    SPLITS as SPLITS,
    StoreWriter as StoreWriter,
    TokenStore as TokenStore,
    open_store as open_store,
    read_about as read_about,
    split_store as split_store,
)
from ._vocabulary import (
    NO_VOCABULARY as NO_VOCABULARY,
    SETTINGS_FILE as SETTINGS_FILE,
    VOCABULARY_FILE as VOCABULARY_FILE,
    Normalization as Normalization,
    TextNormalization as TextNormalization,
    Vocabulary as Vocabulary,
    find_vocabulary as find_vocabulary,
    read_vocabulary as read_vocabulary,
    stated_normalization as stated_normalization,
)
from ._windows import (
    EvalTextStreams as EvalTextStreams,
    TextStreams as TextStreams,
    TextWindows as TextWindows,
    join_documents as join_documents,
    make_windows as make_windows,
)
from ._wordpiece import (
    Document as Document,
    WordPiece as WordPiece,
    load_wordpiece as load_wordpiece,
    split_prose as split_prose,
)
