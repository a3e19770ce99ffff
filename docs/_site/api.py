"""The Python API of the site: which names have an entry, on which page, and their pages.

`MODULES` is the one list of the documented names. A page of docs/reference/api/ writes
`{= api("lbopt.masks") =}`; Sphinx's autodoc then reads the docstrings, which `to_rst` turns from
the form that the source has into reStructuredText.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import textwrap
import typing

import flax.linen

import lbopt
import lbopt.errors
import lbopt.types


@dataclasses.dataclass(frozen=True)
class Module:
    """A page of the reference.

    Attributes:
      title: What the module is for, in a few words.
      intro: Sentences at the top of the page.
      groups: Heading -> names of its entries. A name without a dot is one of `lbopt` if it is
        there, else one of the page's module.
    """

    title: str
    intro: str
    groups: dict[str, str]


MODULES = {
    "lbopt": Module(
        "Runs and studies from Python",
        f"`import lbopt` gives {len(lbopt.__all__)} names. These train a model, run a study, plan "
        "a run for a TPU pod, measure first numbers and scale a recipe, as the commands do. The "
        "other names are listed below; their entries are on the pages of the modules that they "
        "belong to.",
        {
            "A problem": "Problem",
            "Runs": "run_training lbopt.api.TrainingResult run_plan",
            "Studies": "run_sweep lbopt.api.StudyResult suggest lbopt.cli.Advice",
            "Another width": "coordinate_check lbopt.api.CoordinateCheck",
            "Another batch size": "scale_recipe lbopt.recipes.ScaledRecipe "
            "lbopt.recipes.ScaledNumber",
        },
    ),
    "lbopt.transforms": Module(
        "Optimizers and their parts",
        "Optimizers, and Optax transformations of gradients to build others from. Every one of "
        "them is an `optax.GradientTransformation` and goes into `optax.chain`.",
        {
            "Layerwise optimizers": "lamb lars lans adamh describe",
            "Matrix optimizers": "muon normuon muonh muown scion soap soaph shampoo kron dion "
            "muloco nesterov_outer",
            "Parts of layerwise optimizers": "scale_by_lamb_moments scale_by_lars_momentum "
            "scale_by_lans scale_by_layerwise_trust_ratio scale_by_learning_rate scale_by_agvm",
            "Relative updates": "relative_update hyperball radial_brake update_floor cautious",
            "Parts of matrix optimizers": "scale_by_newton_schulz scale_by_matrix_shape "
            "scale_by_neuron_norm scale_by_muown scale_by_soap scale_by_shampoo scale_by_kron "
            "scale_by_dion",
            "State and parameters of few bits": "compress_state round_stochastically "
            "compensate_rounding",
            "Gradients": "normalize_gradients clip_by_global_norm global_norm skip_bad_updates",
            "Another width": "scale_by_transfer transfer_init transfer_table LeafTransfer",
            "Averages of the parameters": "track_ema ema_params evaluated_params "
            "has_evaluated_params",
            "Measurements": "monitor_layers optimizer_metrics is_per_layer summarize_masks "
            "track_noise_scale estimate_noise",
            "States": "find_states EmaState LayerNormsState LearningRateState SkipState",
        },
    ),
    "lbopt.linalg": Module(
        "Linear algebra over a mesh",
        "The orthogonal factor of a matrix by products alone, QR of tall matrices whose rows lie "
        "on several devices, sketches and low-rank approximations. Each entry says how stable it "
        "is, and how many words it sends in how many messages.",
        {
            "Orthogonal factor": "newton_schulz resolve_coefficients",
            "QR": "tsqr cholesky_qr2 orthonormal_basis grqr",
            "Low rank": "range_finder glu gaussian_sketch srht",
            "Roots, products, stacks": "inverse_root matmul of_each",
        },
    ),
    "lbopt.schedules": Module(
        "Learning rates, warmup and scaling rules",
        "Schedules are functions of the optimizer step. Scaling rules carry a learning rate and a "
        "warmup from one batch size to another. LEGW is the linear-epoch gradual warmup rule: the "
        "learning rate grows with the square root of the batch size, and the warmup, counted in "
        "epochs, grows with the batch size itself.",
        {
            "Scaling rules": "scale_learning_rate legw_schedule scaling_plan scale_batch "
            "ScaledBatch Units",
            "A batch that grows": "batch_phases BatchPhase phase_schedule ramp_changes "
            "doubling_changes seesaw_changes critical_changes",
            "The table of rules": "scale_number combine_rules rule_changes check_warmup_rule "
            "ScalingRule Change",
            "Schedules": "warmup_schedule step_schedule exponential_schedule stretch_schedule",
            "Published schedules": "mlperf_schedule albert_schedule mixed_batch_schedule",
            "Factors": "exponential_factor step_factor",
        },
    ),
    "lbopt.masks": Module(
        "Masks and stacks of layers",
        "A mask says which parameters a transformation touches. It is a function from parameters "
        "to a tree of bools, as Optax takes it, and masks combine by `&`, `|` and `~`.",
        {
            "Masks": "weights_only all_leaves select_roles exclude_roles select_paths "
            "exclude_paths",
            "Roles of parameters": "leaf_role LeafRole explain_roles tree_roles module_roles "
            "with_known_roles",
            "Combining and resolving": "LeafMask resolve_mask matrix_dimension_numbers",
            "Stacks of layers": "stacked_paths stacked_from_metadata lbopt.stacks.LayerAxes",
        },
    ),
    "lbopt.aggregators": Module(
        "Aggregation and compression of gradients",
        "An aggregator sees the gradient of each replica before their mean is taken. It can send "
        "fewer bits, keep what it did not send for the next step (error feedback), or measure how "
        "far the replicas disagree.",
        {
            "Aggregators": "aps powersgd ef ef21 econtrol agvm plain_mean",
            "Compressors": "topk randk sign cast identity float_quantize",
            "In an optimizer": "aggregate as_optax keep_finite rebuilt_state",
            "Disagreement of replicas": "phi phi_layers phi_modules",
            "For aggregators of your own": "Aggregator Aggregated AggregatorState Extra Group "
            "WireBytes Compressor",
        },
    ),
    "lbopt.losses": Module(
        "Losses",
        "Losses per example, computed in fp32.",
        {"Losses": "softmax_cross_entropy l2_penalty"},
    ),
    "lbopt.metrics": Module(
        "Metrics",
        "A metric of a batch is a pair (sum over examples, number of examples). Pairs add up "
        "exactly over batches and devices, whatever their sizes.",
        {"Metrics": "summed classification of_each_example means"},
    ),
    "lbopt.models": Module(
        "Networks, batch normalization and other frameworks",
        "The networks of the recipes as Flax modules, batch normalization over a stated group of "
        "examples, and wrappers for models of Flax (Linen and NNX), Equinox and Haiku.",
        {
            "Batch normalization": "BatchNorm StatsScope",
            "Image classifiers": "MLP CNN SimpleCNN make_simple_cnn ResNet make_resnet "
            "space_to_depth EfficientNet make_efficientnet",
            "Text": "Bert make_bert stack_layers unstack_layers DecoderLM make_decoder_lm "
            "RopeScaling LSTMClassifier LSTMLanguageModel make_lstm_language_model",
            "Models of other frameworks": "Model from_linen from_nnx from_equinox from_haiku "
            "make_model",
        },
    ),
    "lbopt.parallel": Module(
        "Data-parallel steps",
        "A training step over all devices: every device takes a slice of the global batch, and the "
        "gradients are reduced once per step.",
        {
            "Steps": "make_train_step make_eval_step Step TrainState split_seed",
            "Matrix optimizers on a mesh": "shard_matrices",
            "Local steps": "diloco leave_out rebuilt_workers first_worker LocalState",
            "Reduction of gradients": "AllReduce ReduceScatter Aggregate GradientClip",
            "Devices and batches": "make_mesh put_batch put_replicated batch_sharding "
            "replicated_sharding",
            "Steps of your own": "lbopt.replicas.tracing_for",
        },
    ),
    "lbopt.evaluation": Module(
        "Exact evaluation",
        "Every example counts exactly once, whatever the batch size: the last batch is padded, and "
        "a mask leaves the padding out.",
        {
            "Means over a data set": "evaluate",
            "Answers to questions": "exact_match f1_score",
        },
    ),
    "lbopt.data": Module(
        "Data sets and batches",
        "A data set numbers its examples, and a batch depends on its step alone. A run that "
        "resumes therefore sees the batches that an uninterrupted run would have seen.",
        {
            "Data sets": "Dataset Splits ArrayDataset load_digits",
            "Batches": "TrainBatches EvalBatches example_indices rows_of read_batches "
            "train_iterator eval_batches Reading",
        },
    ),
    "lbopt.interchange": Module(
        "Weights from and to other programs",
        "Networks in the format of Hugging Face's transformers, and arrays as safetensors.",
        {
            "Hugging Face": "load_huggingface save_huggingface",
            "Safetensors": "save_safetensors load_safetensors read_safetensors_metadata",
        },
    ),
    "lbopt.config": Module(
        "Dataclasses of a config file",
        "A config file defines `get_config(row)` and returns a `TrainConfig` or a `SweepConfig`. "
        "[Config fields](../config.md) lists every field of these classes.",
        {
            "A run": "TrainConfig About CheckpointConfig PhaseConfig BatchScheduleConfig",
            "Groups of a run": "DataConfig ModelConfig LossConfig OptimizerConfig ScheduleConfig "
            "AggregatorConfig ParallelConfig",
            "Own data and optimizers": "ArraysConfig ImageFolderConfig TfdsConfig OptaxConfig",
            "A study": "SweepConfig Arm SearchConfig MeasureConfig",
            "Configs as data": "lbopt.cli.load_config parse_row FromText config_fields FieldEntry "
            "config_to_json config_from_json",
            "From a config to objects": "make_optimizer make_schedule resolve_schedule "
            "ResolvedSchedule make_aggregator",
        },
    ),
    "lbopt.plan": Module(
        "Plans and communication bounds",
        "What a recipe costs on a TPU pod, by the TPU compiler, and lower bounds on the words that "
        "any algorithm must move. `lbopt plan` and `lbopt.run_plan` use the first; the second need "
        "no compiler.",
        {
            "Communication bounds": "dp_limit grid Grid tile Tile",
            "Plans": "Plan plan_lines plan_document duration_text",
        },
    ),
    "lbopt.errors": Module(
        "Errors and exit codes",
        "An error that is not a bug names a field, its value and what to do, in one line. "
        "[Exit codes](../exit-codes.md) says what a command ends with.",
        {
            "Errors": "LboptError UserError EnvironmentProblem MissingPackage Preempted",
            "Checks": "require_choice",
        },
    ),
    "lbopt.types": Module(
        "Types of arguments",
        "The aliases that signatures on the other pages use.",
        {
            "Trees and batches": "Params ModelState Batch Metrics",
            "Functions": "Loss LossFn MetricFn",
            "Choices of leaves": "Mask Stacked AxisName",
        },
    ),
}


def full_name(module, name):
    """Return the dotted name by which a user imports a name of a page."""
    if "." in name:
        return name
    return f"lbopt.{name}" if name in lbopt.__all__ else f"{module}.{name}"


@functools.cache
def documented():
    """Return {dotted name: module of its page}, in the order of the pages."""
    return {
        full_name(module, name): module
        for module, page in MODULES.items()
        for names in page.groups.values()
        for name in names.split()
    }


@functools.cache
def target(name):
    """Return the object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def is_data(name):
    """Return whether a name is a value or an alias, whose text stands below its assignment."""
    module = name.rpartition(".")[0]
    found = target(name)
    return module == "lbopt.types" or not (
        inspect.isclass(found) or inspect.isroutine(inspect.unwrap(found))
    )


@functools.cache
def docstring(name):
    """Return the text of a dotted name, as its source has it but without the indentation."""
    found = target(name)
    if not is_data(name):
        return inspect.getdoc(found) or ""
    home = name.rpartition(".")[0]
    home = home if home == "lbopt.types" else type(found).__module__
    return _texts_of_values(home).get(name.rpartition(".")[2], "")


@functools.cache
def _texts_of_values(module):
    """Return the strings that stand below the assignments of a module, by name."""
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    return {
        node.targets[0].id: inspect.cleandoc(below.value.value)
        for node, below in itertools.pairwise(body)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def first_line(name):
    """Return the first sentence of a docstring, as reStructuredText on one line."""
    paragraph = docstring(name).split("\n\n")[0].replace("\n", " ")
    return inline(re.split(r"(?<=[.:]) (?=[A-Z])", paragraph)[0])


def api(module):
    """Return the page of a module as MyST Markdown: its groups, and an entry for each name."""
    page = MODULES[module]
    lines = [f"# `{module}`: {page.title[0].lower()}{page.title[1:]}", "", page.intro, ""]
    for heading, names in page.groups.items():
        lines += [f"## {heading}", "", "```{eval-rst}"]
        for name in names.split():
            lines += [*_entry(full_name(module, name)), ""]
        lines += ["```", ""]
    return "\n".join(lines)


def api_table(module=""):
    """Return a table of the documented names, with a search field above it.

    Args:
      module: "lbopt" for the names of `lbopt` alone; "" for all.
    """
    names = sorted(documented(), key=lambda name: name.rpartition(".")[2].lower())
    if module:
        names = [name for name in names if name.rpartition(".")[0] == module]
    lines = ["```{eval-rst}", ".. list-table::", "   :class: filtered", "   :header-rows: 1"]
    lines += ["   :widths: auto", "", "   * - Name", "     - Import from", "     - What it is"]
    for name in names:
        home, _, last = name.rpartition(".")
        lines += [f"   * - :py:obj:`{last} <{name}>`", f"     - ``{home}``"]
        lines += [f"     - {first_line(name)}"]
    return "\n".join([*lines, "```", ""])


def _entry(name):
    """Return the directive that documents a name."""
    if is_data(name):
        text = textwrap.indent("\n".join(to_rst(docstring(name).split("\n"))), "   ")
        return [f".. py:data:: {name}", "", *text.split("\n")]
    if inspect.isclass(target(name)):
        return [f".. autoclass:: {name}{_stated(target(name))}", "   :members:"]
    return [f".. autofunction:: {name}"]


def _stated(found):
    """Return the arguments of a class that has no constructor of its own."""
    return "()" if issubclass(found, lbopt.errors.Preempted) else ""


def to_rst(lines):
    """Return a docstring's lines as reStructuredText that Napoleon reads.

    The source writes code and names between single backticks, and formulas as indented lines.
    """
    found = []
    block = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
            continue
        if block:
            found += [*_block(block, found), ""]
        block = []
    return found


def _block(block, before):
    """Return the lines between two blank lines, given those before them."""
    if any(line.lstrip().startswith(">>>") for line in block):
        first = next(at for at, line in enumerate(block) if line.lstrip().startswith(">>>"))
        text = [*_block(block[:first], before), ""] if first else []
        return [*text, *block[first:]]

    indent = min(len(line) - len(line.lstrip()) for line in block)
    above = next((line for line in reversed(before) if line.strip()), "")
    deeper = indent - (len(above) - len(above.lstrip()))
    told = above.endswith(":") and " " in above.strip()  # no heading, as Args: is one
    if before and (deeper >= 4 or (deeper > 0 and told)):
        return [f"{' ' * (indent - deeper)}.. code-block:: text", "", *block]
    if any(line.startswith(" " * indent + "- ") for line in block):
        return inline("\n".join(_apart(block, indent))).split("\n")
    return inline("\n".join(block)).split("\n")


def _apart(block, indent):
    """Yield the lines of a block, with a blank one before its first item."""
    items = [line.startswith(" " * indent + "- ") for line in block]
    first = items.index(True)
    yield from block[:first]
    if first:
        yield ""
    yield from block[first:]


def inline(text):
    """Return text with its names and code between backticks as reStructuredText."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text, flags=re.DOTALL)
    shown = [_escaped(part) for part in parts]
    for at in range(1, len(parts), 2):
        # A literal must stand apart from words beside it; an escaped space is not printed.
        left = "" if re.search(r"(^|[\s'\"(\[{<\-/:])$", parts[at - 1]) else "\\ "
        right = "" if re.match(r"$|[\s'\")\]}>\-/:.,;!?]", parts[at + 1]) else "\\ "
        shown[at] = left + _code(" ".join(parts[at].strip("`").split())) + right
    return "".join(shown)


def _escaped(text):
    r"""Return text whose `*`, `|`, `@` and trailing `_` mean themselves.

    The name of an argument, as `*patterns`, is left to Napoleon.
    """
    text = text.replace("\\", "\\\\").replace("@", "\\@")  # owner/name@commit is no address
    text = re.sub(r"(?m)(?<!^)(?<!^ )(?<!^  )([*|])", r"\\\1", text)
    return re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)


def _code(code):
    """Return code as a link to its entry if it is a name with one, else as a literal."""
    bare = code.removesuffix("()")
    for name in (bare, f"lbopt.{bare}"):
        if name in documented():
            return f":py:obj:`{code} <{name}>`"
    if re.fullmatch(r"[A-Za-z_]\w{4,}", bare):
        homes = [name for name in documented() if name.rpartition(".")[2] == bare]
        if len(homes) == 1:
            return f":py:obj:`{code} <{homes[0]}>`"
    return f"``{code}``"


def signature(found):
    """Return (arguments, result) of a function or class, with the types that its source writes.

    Sphinx would write out what an alias stands for, and the marks of defaults in lbopt.
    """
    try:
        told = inspect.signature(found)
    except ValueError:  # an exception without a constructor of its own
        return "()", ""
    made = {field.name: field for field in _dataclass_fields(found)}
    kept = []
    for one in told.parameters.values():
        if not (made and one.name in _OF_FLAX and issubclass(found, flax.linen.Module)):
            default = _default(one.default, made.get(one.name))
            kind = _Text(_typed(one.annotation)) or one.empty
            kept.append(one.replace(annotation=kind, default=default))

    result = "" if inspect.isclass(found) else _typed(told.return_annotation)
    return str(told.replace(parameters=kept, return_annotation=told.empty)), result


_OF_FLAX = ("parent", "name")


class _Text(str):
    """Text that is its own `repr`, as `str` of a signature shows it."""

    __repr__ = str.__str__


def _dataclass_fields(found):
    return dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()


def _default(value, field):
    """Return a default as a reader would write it."""
    if value is inspect.Parameter.empty:
        return value
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return _Text(f"{field.default_factory.__name__}()")
    value = value.value if isinstance(value, lbopt.types.Default) else value
    if inspect.isroutine(value) or inspect.isclass(value):
        return _Text(value.__name__.replace("<lambda>", "..."))
    return _Text(re.sub(r"<(?:function )?(\w+)[^>]*>", r"\1", repr(value)))


def _typed(annotation):
    """Return an annotation as short as the source has it; names with an entry become links."""
    if annotation is inspect.Parameter.empty:
        return ""
    if not isinstance(annotation, str):
        annotation = getattr(annotation, "__forward_arg__", None) or _spelled(annotation)
    # Names between quotes are values of a Literal.
    parts = re.split(r"""("[^"]*"|'[^']*')""", annotation.replace("NoneType", "None"))
    return "".join(
        part if at % 2 else re.sub(r"[\w.]+", _linked, part) for at, part in enumerate(parts)
    )


def _spelled(annotation):
    is_plain = isinstance(annotation, type) and not typing.get_args(annotation)
    return annotation.__name__ if is_plain else str(annotation)


def _linked(match):
    last = match[0].rpartition(".")[2]
    homes = [name for name in documented() if name.rpartition(".")[2] == last]
    return homes[0] if len(homes) == 1 and last[:1].isupper() else last


def setup(app):
    """Register with Sphinx what docstrings need before and after Napoleon."""
    app.connect("autodoc-process-docstring", _process, priority=400)
    app.connect("autodoc-process-signature", _sign)
    app.connect("autodoc-skip-member", _skip)


def _sign(app, what, name, obj, options, arguments, result):
    """Return the signature that is shown."""
    if getattr(obj, "_is_protocol", False):
        return "", ""
    if what in ("function", "class", "method", "exception"):
        obj = obj.__func__ if inspect.ismethod(obj) else obj
        arguments, result = signature(obj)
        if what == "method":
            arguments = re.sub(r"^\((?:self|cls)(?:, )?", "(", arguments)
    return arguments, result


def _process(app, what, name, obj, options, lines):
    """Rewrite the lines of a docstring in place."""
    lines[:] = to_rst(list(lines))


def _skip(app, what, name, obj, skip, options):
    """Leave out the fields of a class, which its docstring lists, and what its bases add."""
    is_method = inspect.isfunction(obj) and "." in obj.__qualname__
    if is_method or isinstance(obj, property | classmethod | staticmethod):
        return name.startswith("_") or not inspect.getdoc(obj)
    return True
