"""The configuration of one training run."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
import math
from typing import Any

from lbopt.config import checks
from lbopt.errors import require, require_choice
from lbopt.transforms.variants import VARIANTS

STATUSES = ("measured here", "planned by the TPU compiler", "not yet run")
BACKENDS = ("jit", "pjit", "pmap")
DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adam", "adamw", "lamb", "lans", "lars", "momentum")
CLIP_STAGES = ("replica", "mean", "accumulated", "none")
MODELS = ("bert", "cnn", "efficientnet", "lstm", "lstm_lm", "resnet")
SIZES = {
    "bert": ("tiny", "base", "large"),
    "efficientnet": ("b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7"),
    "lstm_lm": ("small", "medium", "large"),
    "resnet": ("18", "34", "50", "101", "152"),
}
"""Published sizes of the families that have them."""
STEMS = ("conv7", "space_to_depth", "conv3")
RUNNING_FROM = ("all", "first")
ORDERS = ("given", "torus")
REMATS = ("none", "attention", "dots", "inner", "layer")
TASKS = {"digits": "classification", "pydoc_lm": "language_model", "pydoc_mlm": "masked_lm"}
"""What each data set is for."""
DRAWN_ANEW = ("pydoc_mlm",)
"""Data whose examples are different in every epoch."""
FAMILIES = {
    "classification": ("cnn", "efficientnet", "lstm", "resnet"),
    "language_model": ("lstm_lm",),
    "masked_lm": ("bert",),
}
"""The models of each task."""
BATCH_NORMED = ("cnn", "efficientnet", "resnet")
LARGEST_IMAGE = 1024
LONGEST = 2**14
LARGEST_VOCABULARY = 2**17
SCALING_RULES = ("linear", "none", "sqrt")
WARMUP_RULES = ("epochs", "legw", "none")
LARGEST = 2**31
WIDEST = 2**14
"""A wider layer is a slip of the keyboard: its kernels alone would not fit this machine or the next."""
DECAYS = ("constant", "cosine", "exponential", "polynomial", "step")
DECAY_ORIGINS = ("start", "warmup_end")


@dataclasses.dataclass
class About:
    """What `lbopt recipes` says of a config.

    Attributes:
      paper: what it follows, with the arXiv id.
      published_result: the number to reach, with its source; "-" if there is none.
      status: "measured here", "planned by the TPU compiler" or "not yet run".
    """

    paper: str = "-"
    published_result: str = "-"
    status: str = "not yet run"


@dataclasses.dataclass
class DataConfig:
    """Where examples come from. Fields that a data set does not have are ignored by it.

    Attributes:
      name: "digits" (images of classes), "pydoc_mlm" (Python's help topics as masked pairs of segments, for bert) or
        "pydoc_lm" (the same as windows of text, for lstm_lm).
      image_size: side of the images, a multiple of the source's: each pixel is repeated. None for the source's (digits: 8).
      sequence_length: tokens of an example (pydoc_mlm, pydoc_lm).
      vocab_size: pieces of words, learned from the training part, special tokens included (pydoc_mlm, pydoc_lm).
      max_predictions: tokens of an example that are predicted, at most (pydoc_mlm).
    """

    name: str = "digits"
    image_size: int | None = None
    sequence_length: int = 32
    vocab_size: int = 1024
    max_predictions: int = 5


@dataclasses.dataclass
class ModelConfig:
    """The model. Fields that a family does not have are ignored by it; None is the published size's value.

    Attributes:
      name: "resnet", "efficientnet", "bert", "lstm_lm" (language model), "cnn" or "lstm" (classifier).
      widths: channels of each stage (cnn).
      hidden: width of the hidden layer (cnn) or of the LSTM (lstm).
      batch_norm_scope: "global", "local", "replicas:N", "examples:N" or "tiles:RxC" (cnn, resnet, efficientnet).
      batch_norm_momentum: of the running statistics (cnn, resnet, efficientnet).
      batch_norm_running_from: whose statistics are kept for evaluation: the mean over "all" groups or the "first" one's
        (resnet, efficientnet).
      batch_norm_unbiased_var: keep the variance of n - 1 degrees of freedom for evaluation (resnet, efficientnet).
      dtype: of the computation, "float32" or "bfloat16"; parameters are fp32.
      label_smoothing: weight of the uniform target, in [0, 1).
      size: the published network: resnet "18" to "152", efficientnet "b0" to "b7", bert "tiny", "base" or "large", lstm_lm
        "small", "medium" or "large".
      stem: of resnet: "conv7", "space_to_depth" (the same function, faster on TPU) or "conv3" (for small images).
      fold_columns: of resnet: the same function, computed on folded columns where channels are few; for TPU.
      fold_examples: of efficientnet: the same function, computed on so many folded examples where channels are few; for TPU.
      width_coefficient: channels, as a multiple of resnet's or of efficientnet-b0's; hidden width, of lstm_lm's.
      depth_coefficient: blocks, as a multiple of efficientnet-b0's.
      dropout_rate: before the head (efficientnet), of sublayers (bert), between layers (lstm_lm).
      attention_dropout_rate: of bert.
      stochastic_depth_rate: of efficientnet's last block.
      max_length: positions of bert.
      scan_layers: compile one layer of bert and loop over it.
      remat: what bert's backward pass computes again: "none", "attention", "dots", "inner" or "layer".
      remat_layers: only in so many layers of bert; None for all.
    """

    name: str = "cnn"
    widths: tuple[int, ...] = (16, 32)
    hidden: int = 64
    batch_norm_scope: str = "global"
    batch_norm_momentum: float | None = None
    batch_norm_running_from: str = "all"
    batch_norm_unbiased_var: bool = False
    dtype: str = "float32"
    label_smoothing: float = 0.0
    size: str = ""
    stem: str = "conv7"
    fold_columns: bool = False
    fold_examples: int = 1
    width_coefficient: float | None = None
    depth_coefficient: float | None = None
    dropout_rate: float | None = None
    attention_dropout_rate: float | None = None
    stochastic_depth_rate: float | None = None
    max_length: int = 512
    scan_layers: bool = False
    remat: str = "none"
    remat_layers: int | None = None


@dataclasses.dataclass
class OptimizerConfig:
    """The optimizer. Fields that an optimizer does not have are ignored by it.

    Attributes:
      name: "lamb", "lans", "lars", "adamw", "adam" or "momentum".
      variant: of lamb and lars: which public code (`lbopt.describe()` lists them). What is not a field here is as that
        code has it.
      weight_decay: never the variant's; decoupled for lamb, lans and adamw, added to the gradient for lars and momentum, not used by adam.
      momentum: of lars and momentum.
      nesterov: of lars and momentum.
      b1: of lamb, lans, adamw and adam.
      b2: likewise.
      eps: likewise.
      trust_coefficient: of lars; None for the variant's.
      trust_ratio_bounds: (low, high) for lamb, lans and lars; None for the variant's.
      max_grad_norm: clip the global gradient norm; None for the variant's (for the others, no clipping).
      clip_stage: where that happens: "replica" (each replica's gradient, before the mean), "mean" (after it, each microstep's),
        "accumulated" (the whole gradient of the step), or "none": not at all, whatever the variant says.
      ema_decay: evaluate with an average of the parameters, of this decay (0.9999 in EfficientNet); None for the parameters themselves.
      ema_ramp: let the decay of that average rise with the updates.
      skip_limit: skip updates whose gradient is not finite, and stop after more than so many in a row; None applies whatever comes.
      spike_factor: with `skip_limit`, skip gradients so many times larger than usual too; None lets them through.
      mu_dtype: of the first moment (lamb, lans) or the velocity (lars): "float32" or "bfloat16".
      nu_dtype: of the second moment (lamb, lans).
      track_noise_scale: log the gradient noise scale; needs microsteps or several replicas.
      monitor_layers: log every layer's weight norm, update norm and their quotient.
    """

    name: str = "lamb"
    variant: str = "paper"
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    trust_coefficient: float | None = None
    trust_ratio_bounds: tuple[float, float] | None = None
    max_grad_norm: float | None = None
    clip_stage: str = "accumulated"
    ema_decay: float | None = None
    ema_ramp: bool = True
    skip_limit: int | None = None
    spike_factor: float | None = None
    mu_dtype: str = "float32"
    nu_dtype: str = "float32"
    track_noise_scale: bool = False
    monitor_layers: bool = False


@dataclasses.dataclass
class ScheduleConfig:
    """The learning rate, as a rule over batch sizes.

    Attributes:
      base_learning_rate: the peak at `base_batch_size`.
      base_batch_size: the batch the base values belong to.
      scaling_rule: "sqrt", "linear" or "none".
      warmup_rule: "legw" (base_warmup_epochs * batch / base batch epochs, so a constant number of steps), "epochs"
        (base_warmup_epochs at every batch) or "none".
      base_warmup_epochs: warmup at the base batch.
      decay: "polynomial", "cosine" or "constant", from the end of warmup to the end of the run; "exponential" or "step",
        in stairs.
      power: of the polynomial.
      end_factor: what is left of the peak at the end (polynomial, cosine).
      first_step: the number of the first update, 0 (learning rate 0 there) or 1.
      warmup_power: exponent of the ramp.
      start_step: where the ramp begins, also below 0.
      decay_from: "warmup_end", or "start": the decay counts from step 0, so the rate jumps at the end of warmup.
      end_learning_rate: the rate at the end, instead of `end_factor`.
      decay_rate: factor of a stair (exponential, step).
      stair_epochs: exponential: one number, the epochs between two stairs; step: the epochs at which stairs are.
    """

    base_learning_rate: float = 0.01
    base_batch_size: int = 64
    scaling_rule: str = "sqrt"
    warmup_rule: str = "legw"
    base_warmup_epochs: float = 0.5
    decay: str = "polynomial"
    power: float = 1.0
    end_factor: float = 0.0
    first_step: int = 1
    warmup_power: float = 1.0
    start_step: int = 0
    decay_from: str = "warmup_end"
    end_learning_rate: float | None = None
    decay_rate: float = 0.97
    stair_epochs: tuple[float, ...] = (2.4,)


@dataclasses.dataclass
class ParallelConfig:
    """How the step is spread out.

    Attributes:
      backend: "jit" ("pjit" is the same) or "pmap".
      num_devices: None for all there are.
      num_microsteps: gradient accumulation.
      order: of the devices: "given" or "torus", which batch norm over "tiles:RxC" needs; see `lbopt.make_mesh`.
      shard_update: split the optimizer's state and work over the devices; see `lbopt.make_train_step`.
    """

    backend: str = "jit"
    num_devices: int | None = None
    num_microsteps: int = 1
    order: str = "given"
    shard_update: bool = False


@dataclasses.dataclass
class CheckpointConfig:
    """When state is saved and what is kept.

    Attributes:
      every_steps: save so often (and at the end, and on SIGTERM).
      keep: the latest so many are kept, and the best one.
      best_metric: the evaluation metric that says which is best; higher is better unless it ends in "loss".
    """

    every_steps: int = 100
    keep: int = 3
    best_metric: str = "eval/accuracy"


@dataclasses.dataclass
class TrainConfig:
    """One training run.

    Attributes:
      name: of the recipe.
      about: what `lbopt recipes` says.
      seed: of initialisation, shuffle and dropout.
      global_batch_size: examples per optimizer step over all devices and microsteps.
      num_epochs: length of the run; steps are rounded up.
      eval_global_batch_size: any size; evaluation is exact.
      log_every_steps: a line in metrics.jsonl so often.
      eval_every_steps: evaluate on the validation split so often, and at the end.
    """

    name: str = "unnamed"
    about: About = dataclasses.field(default_factory=About)
    seed: int = 0
    global_batch_size: int = 256
    num_epochs: float = 20.0
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval_global_batch_size: int = 256
    log_every_steps: int = 10
    eval_every_steps: int = 50

    def validate(self) -> None:
        """Check every field that can be checked without data or devices.

        Raises:
          UserError: naming the field, its value and the fix.
        """
        checks.check_types(self)
        for field in ("global_batch_size", "eval_global_batch_size", "log_every_steps", "eval_every_steps"):
            _at_least(f"config.{field}", getattr(self, field), 1)
        require_seed("config.seed", self.seed)
        require_name("config.name", self.name)
        require(
            0 < self.num_epochs < LARGEST,
            "config.num_epochs",
            self.num_epochs,
            "give a number > 0",
        )
        require_choice("config.about.status", self.about.status, STATUSES)
        validate_data(self.data, "config.data")
        validate_model(self.model, "config.model")
        _validate_fit(self.data, self.model)
        validate_optimizer(self.optimizer, "config.optimizer")
        validate_schedule(self.schedule, "config.schedule")
        _validate_parallel(self.parallel)
        _validate_checkpoint(self.checkpoint)


def validate_data(data: DataConfig, prefix: str) -> None:
    """Check the data's fields."""
    require_choice(f"{prefix}.name", data.name, TASKS)
    size = data.image_size
    require(
        size is None or (size % 8 == 0 and 0 < size <= LARGEST_IMAGE),
        f"{prefix}.image_size",
        size,
        f"give a multiple of 8 up to {LARGEST_IMAGE}, or None for 8",
    )
    length = data.sequence_length
    require(1 <= length <= LONGEST, f"{prefix}.sequence_length", length, f"give a number in [1, {LONGEST}]")
    require(
        1 <= data.vocab_size <= LARGEST_VOCABULARY,
        f"{prefix}.vocab_size",
        data.vocab_size,
        f"give a number in [1, {LARGEST_VOCABULARY}]",
    )
    if TASKS[data.name] == "masked_lm":
        require(
            1 <= data.max_predictions <= length,
            f"{prefix}.max_predictions",
            data.max_predictions,
            f"give a number in [1, {length}], the sequence_length",
        )


def _validate_fit(data: DataConfig, model: ModelConfig) -> None:
    """Check that the model is for such data."""
    fitting = FAMILIES[TASKS[data.name]]
    require(
        model.name in fitting,
        "config.model.name",
        model.name,
        f"config.data.name = {data.name!r} is for {' or '.join(fitting)}; change one of the two",
    )


def validate_model(model: ModelConfig, prefix: str) -> None:
    """Check the model's fields."""
    require_choice(f"{prefix}.name", model.name, MODELS)
    require_choice(f"{prefix}.dtype", model.dtype, DTYPES)
    require(
        len(model.widths) > 0 and min(model.widths) > 0 and max(model.widths) <= WIDEST,
        f"{prefix}.widths",
        model.widths,
        f"give at least one width, each in [1, {WIDEST}]",
    )
    require(1 <= model.hidden <= WIDEST, f"{prefix}.hidden", model.hidden, f"give a width in [1, {WIDEST}]")
    _in_range(f"{prefix}.label_smoothing", model.label_smoothing, 0, 1)
    for field in ("batch_norm_momentum", "dropout_rate", "attention_dropout_rate", "stochastic_depth_rate"):
        if getattr(model, field) is not None:
            _in_range(f"{prefix}.{field}", getattr(model, field), 0, 1)
    _validate_size(model, prefix)


def _validate_size(model: ModelConfig, prefix: str) -> None:
    if model.name in SIZES:
        require_choice(f"{prefix}.size", model.size, SIZES[model.name])
    else:
        require(not model.size, f"{prefix}.size", model.size, f"{model.name!r} has no published sizes; leave it empty")
    for field in ("width_coefficient", "depth_coefficient"):
        value = getattr(model, field)
        require(value is None or 0 < value <= 64, f"{prefix}.{field}", value, "give a number in (0, 64], or None")
    require_choice(f"{prefix}.stem", model.stem, STEMS)
    require_choice(f"{prefix}.batch_norm_running_from", model.batch_norm_running_from, RUNNING_FROM)
    require_choice(f"{prefix}.remat", model.remat, REMATS)
    for field in ("max_length", "fold_examples"):
        _at_least(f"{prefix}.{field}", getattr(model, field), 1)
    if model.remat_layers is not None:
        _at_least(f"{prefix}.remat_layers", model.remat_layers, 0)
        require(
            not model.scan_layers,
            f"{prefix}.remat_layers",
            model.remat_layers,
            "a scan has one layer for all; set scan_layers=False, or give None",
        )


def validate_optimizer(optimizer: OptimizerConfig, prefix: str) -> None:
    """Check the optimizer's fields."""
    require_choice(f"{prefix}.name", optimizer.name, OPTIMIZERS)
    for field in ("weight_decay", "eps"):
        _at_least(f"{prefix}.{field}", getattr(optimizer, field), 0)
    for field in ("momentum", "b1", "b2"):
        _in_range(f"{prefix}.{field}", getattr(optimizer, field), 0, 1)
    if optimizer.name in VARIANTS:
        require_choice(f"{prefix}.variant", optimizer.variant, tuple(VARIANTS[optimizer.name]))
    coefficient = optimizer.trust_coefficient
    require(
        coefficient is None or 0 < coefficient < math.inf,
        f"{prefix}.trust_coefficient",
        coefficient,
        "give a number > 0, or None for the variant's",
    )
    bounds = optimizer.trust_ratio_bounds
    require(
        bounds is None or (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] < math.inf),
        f"{prefix}.trust_ratio_bounds",
        bounds,
        "give (low, high) with 0 <= low <= high, or None",
    )
    if optimizer.max_grad_norm is not None:
        require(
            0 < optimizer.max_grad_norm < math.inf,
            f"{prefix}.max_grad_norm",
            optimizer.max_grad_norm,
            "give a number > 0, or None for the variant's; clip_stage='none' switches clipping off",
        )
    require_choice(f"{prefix}.clip_stage", optimizer.clip_stage, CLIP_STAGES)
    for field in ("mu_dtype", "nu_dtype"):
        require_choice(f"{prefix}.{field}", getattr(optimizer, field), DTYPES)
    _validate_guards(optimizer, prefix)


def _validate_guards(optimizer: OptimizerConfig, prefix: str) -> None:
    if optimizer.ema_decay is not None:
        _in_range(f"{prefix}.ema_decay", optimizer.ema_decay, 0, 1)
    if optimizer.skip_limit is not None:
        _at_least(f"{prefix}.skip_limit", optimizer.skip_limit, 0)
    if optimizer.spike_factor is not None:
        factor = optimizer.spike_factor
        require(1 < factor < math.inf, f"{prefix}.spike_factor", factor, "give a number > 1, or None")
        require(
            optimizer.skip_limit is not None,
            f"{prefix}.spike_factor",
            factor,
            "set skip_limit too: so many are skipped in a row",
        )
        require(
            optimizer.clip_stage not in ("replica", "mean"),
            f"{prefix}.spike_factor",
            factor,
            f"clip_stage={optimizer.clip_stage!r} cuts spikes off before they are looked for; use 'accumulated' or 'none'",
        )


def validate_schedule(schedule: ScheduleConfig, prefix: str) -> None:
    """Check the schedule's fields."""
    require_choice(f"{prefix}.scaling_rule", schedule.scaling_rule, SCALING_RULES)
    require_choice(f"{prefix}.warmup_rule", schedule.warmup_rule, WARMUP_RULES)
    require_choice(f"{prefix}.decay", schedule.decay, DECAYS)
    _at_least(f"{prefix}.base_batch_size", schedule.base_batch_size, 1)
    _at_least(f"{prefix}.base_learning_rate", schedule.base_learning_rate, 0)
    _at_least(f"{prefix}.base_warmup_epochs", schedule.base_warmup_epochs, 0)
    require(0 < schedule.power < math.inf, f"{prefix}.power", schedule.power, "give a number > 0")
    require(0 <= schedule.end_factor <= 1, f"{prefix}.end_factor", schedule.end_factor, "give a number in [0, 1]")
    require(schedule.first_step in (0, 1), f"{prefix}.first_step", schedule.first_step, "use 0 or 1")
    require(0 < schedule.warmup_power < math.inf, f"{prefix}.warmup_power", schedule.warmup_power, "give a number > 0")
    require(abs(schedule.start_step) < LARGEST, f"{prefix}.start_step", schedule.start_step, "give a step below 2^31")
    require_choice(f"{prefix}.decay_from", schedule.decay_from, DECAY_ORIGINS)
    _validate_end(schedule, prefix)


def _validate_end(schedule: ScheduleConfig, prefix: str) -> None:
    stairs, rate = schedule.stair_epochs, schedule.decay_rate
    require(0 < rate <= 1, f"{prefix}.decay_rate", rate, "give a number in (0, 1]")
    require(
        len(stairs) > 0 and list(stairs) == sorted(stairs) and stairs[0] > 0 and stairs[-1] < LARGEST,
        f"{prefix}.stair_epochs",
        stairs,
        "give ascending epochs > 0",
    )
    if schedule.decay == "exponential":
        require(len(stairs) == 1, f"{prefix}.stair_epochs", stairs, "give one number for an exponential decay")
    if schedule.end_learning_rate is not None:
        _at_least(f"{prefix}.end_learning_rate", schedule.end_learning_rate, 0)
        require(
            schedule.end_factor == 0 and schedule.decay in ("polynomial", "cosine"),
            f"{prefix}.end_learning_rate",
            schedule.end_learning_rate,
            "only for a polynomial or cosine decay, and not beside end_factor",
        )


def _validate_parallel(parallel: ParallelConfig) -> None:
    require_choice("config.parallel.backend", parallel.backend, BACKENDS)
    require_choice("config.parallel.order", parallel.order, ORDERS)
    _at_least("config.parallel.num_microsteps", parallel.num_microsteps, 1)
    require(
        not parallel.shard_update or parallel.backend != "pmap",
        "config.parallel.shard_update",
        parallel.shard_update,
        "under pmap every replica holds the whole state; use config.parallel.backend='jit'",
    )
    if parallel.num_devices is not None:
        _at_least("config.parallel.num_devices", parallel.num_devices, 1)


def _validate_checkpoint(checkpoint: CheckpointConfig) -> None:
    _at_least("config.checkpoint.every_steps", checkpoint.every_steps, 1)
    _at_least("config.checkpoint.keep", checkpoint.keep, 1)
    require_choice("config.checkpoint.best_metric", checkpoint.best_metric, ("eval/accuracy", "eval/loss"))


def require_name(field: str, name: str) -> None:
    """Check that a name can be shown."""
    require(name.strip(), field, name, "give a name")


def require_seed(field: str, seed: int) -> None:
    """Check that a seed is a number that a JAX key tells apart from all others."""
    require(0 <= seed < LARGEST, field, seed, "give a number in [0, 2147483648)")


def _at_least(field: str, value: Any, low: float) -> None:
    require(low <= value < LARGEST, field, value, f"give a number >= {low:g} (and below 2^31)")


def _in_range(field: str, value: float, low: float, high: float) -> None:
    require(low <= value < high, field, value, f"give a number in [{low:g}, {high:g})")
