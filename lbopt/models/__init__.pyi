from ._bert import (
    ACTIVATIONS as ACTIVATIONS,
    BERT_SIZES as BERT_SIZES,
    Bert as Bert,
    BertSize as BertSize,
    bert_layer_names as bert_layer_names,
    check_bert as check_bert,
    make_bert as make_bert,
    stack_layers as stack_layers,
    unstack_layers as unstack_layers,
)
from ._cnn import CNN as CNN
from ._decoder import (
    DECODER_SIZES as DECODER_SIZES,
    DecoderLM as DecoderLM,
    DecoderSize as DecoderSize,
    RopeScaling as RopeScaling,
    make_decoder_lm as make_decoder_lm,
    plain_factor as plain_factor,
)
from ._efficientnet import (
    EFFICIENTNET_SIZES as EFFICIENTNET_SIZES,
    EFFICIENTNET_STAGES as EFFICIENTNET_STAGES,
    EfficientNet as EfficientNet,
    EfficientNetSize as EfficientNetSize,
    Stage as Stage,
    make_efficientnet as make_efficientnet,
    symmetric_blocks as symmetric_blocks,
)
from ._equinox import from_equinox as from_equinox
from ._fold import check_fold_examples as check_fold_examples
from ._haiku import from_haiku as from_haiku
from ._layers import REMATS as REMATS
from ._lstm import (
    LSTM_SIZES as LSTM_SIZES,
    LSTMClassifier as LSTMClassifier,
    LSTMLanguageModel as LSTMLanguageModel,
    LSTMSize as LSTMSize,
    make_lstm_language_model as make_lstm_language_model,
)
from ._made import checked as checked, make_model as make_model
from ._mlp import MLP as MLP
from ._norm import (
    RUNNING_FROM as RUNNING_FROM,
    BatchNorm as BatchNorm,
    check_running_statistics as check_running_statistics,
)
from ._randomness import require_drop_rate as require_drop_rate
from ._resnet import (
    RESNET_SIZES as RESNET_SIZES,
    ResNet as ResNet,
    ResNetSize as ResNetSize,
    make_resnet as make_resnet,
)
from ._scope import StatsScope as StatsScope
from ._seam import Model as Model, from_linen as from_linen, from_nnx as from_nnx
from ._simple_cnn import SimpleCNN as SimpleCNN, make_simple_cnn as make_simple_cnn
from ._stem import STEMS as STEMS, check_stem as check_stem, space_to_depth as space_to_depth
