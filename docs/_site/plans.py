"""Tables of the plans in `configs/plans/`."""

import functools
import json
import math
import pathlib
import runpy
import statistics

from _site import recipes
from _site.markdown import table

ROOT = pathlib.Path(__file__).parents[2]
FACTS = (
    "accelerators",
    "collectives",
    "compile_minutes",
    "family_plans",
    "forward_macs",
    "milliseconds",
    "over_published",
    "plan",
    "plan_costs",
    "plan_fields",
    "plan_table",
    "published_step_seconds",
    "seconds_text",
    "study_plan",
    "study_plan_table",
)
HEADER = (
    "recipe",
    "pod, devices",
    "GiB needed",
    "compute + communication, ms a step",
    "utilisation",
    "steps",
    "projected",
    "published",
)


def accelerators():
    """Return the table of the slices of Google Cloud, from `tpu/accelerators.tsv`."""
    text = (ROOT / "tpu" / "accelerators.tsv").read_text()
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    found = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    rows = [
        (f"`{one['accelerator']}`", f"`{one['plan']}`", one["chips"], one["devices"], one["hosts"])
        for one in found
    ]
    header = ("`ACCELERATOR`", "`--topology`", "chips", "devices", "hosts")
    return table(header, rows)


@functools.cache
def plan(name):
    """Return the plan of a recipe in `configs/plans/`: "bert_large_lamb-mixed"."""
    return json.loads((ROOT / "configs" / "plans" / f"{name}.json").read_text())


def _plans():
    return [plan(file.stem) for file in (ROOT / "configs" / "plans").glob("*.json")]


def plan_table(config=""):
    """Return the table of the plans of one config file, or of all that name a published pod."""
    small = runpy.run_path(str(ROOT / "scripts" / "make_plans.py"))["SMALL"]
    order = {one["config"]: number for number, one in enumerate(recipes.all_recipes())}
    chosen = [
        one
        for one in _plans()
        if one["recipe"].startswith(f"configs/{config}") and (config or one["recipe"] not in small)
    ]
    chosen.sort(key=lambda one: order[one["recipe"]])
    return table(HEADER, map(_row, chosen))


def family_plans(*configs):
    """Return the table of the plans of several config files."""
    tables = [plan_table(f"{config}.py").splitlines() for config in configs]
    return "\n".join([*tables[0][:2], *(line for lines in tables for line in lines[2:])])


def _row(found):
    from lbopt.plan import duration_text

    if not found["fits"]:
        held = f"does not fit: {_held(found)}"
        return (*_named(found), held, "-", "-", f"{found['steps']:,}", "-", "-")

    parts = [
        f"{milliseconds(phase['compute_seconds_per_step'])}\N{NO-BREAK SPACE}+\N{NO-BREAK SPACE}"
        f"{milliseconds(phase['collective_seconds_per_step'])}"
        for phase in found["phases"]
    ]
    published = found["published_seconds"]
    source = (found["published_source"] or "").split(":")[-1]
    recalled = " [recalled]" if "recalled" in source else ""
    return (
        *_named(found),
        _held(found),
        "; ".join(parts),
        f"{100 * found['model_flops_utilization']:.1f}\N{NO-BREAK SPACE}%",
        f"{found['steps']:,}",
        duration_text(found["projected_seconds"]),
        "-" if published is None else duration_text(published) + recalled,
    )


def _named(found):
    recipe = found["recipe"].removeprefix("configs/").replace(".py", "")
    return f"`{recipe}`", f"{found['topology']}, {found['num_devices']:,}"


def _held(found):
    return "\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}".join(
        f"{found[name] / 2**30:.1f}" for name in ("hbm_bytes_per_device", "hbm_limit_bytes")
    )


def plan_costs(*names):
    """Return the table of chips, planned time and chip hours of some plans."""
    rows = []
    for name in names:
        found = plan(name)
        seconds = found["projected_seconds"]
        shape = found["topology"].partition(":")[2]
        chips = math.prod(map(int, shape.split("x")))
        rows.append(
            (
                f"`{found['recipe'].removeprefix('configs/').replace('.py', '')}`",
                f"`{found['topology']}`",
                f"{chips:,}",
                seconds_text(seconds),
                f"{chips * seconds / 3600:,.0f}",
            )
        )
    return table(("recipe", "slice", "chips", "planned time", "chip hours"), rows)


def compile_minutes():
    """Return the median and the longest time to compile a plan, in minutes."""
    seconds = [one["compile_seconds"] for one in _plans()]
    return round(statistics.median(seconds) / 60), round(max(seconds) / 60)


def forward_macs(name):
    """Return the multiply-adds of one example's forward pass, from the FLOPs of a plan's step."""
    first = plan(name)["phases"][0]
    flops = first["model_flops_per_step_per_device"] * plan(name)["num_devices"]
    return flops / first["global_batch_size"] / 6  # three passes, two operations each


def milliseconds(seconds, digits=1):
    """Return seconds as milliseconds, without the unit."""
    return f"{1e3 * seconds:.{digits}f}"


def seconds_text(seconds):
    """Return a time with its unit, chosen by its length."""
    from lbopt.plan import duration_text

    return duration_text(seconds)


def over_published(name, digits=1):
    """Return the published time of a plan over its projected time."""
    found = plan(name)
    return f"{found['published_seconds'] / found['projected_seconds']:.{digits}f}"


def published_step_seconds(name):
    """Return the published time of a plan's recipe over its steps."""
    return plan(name)["published_seconds"] / plan(name)["steps"]


def plan_fields(name):
    """Return the table of the main fields of a plan, with what they mean."""
    found = plan(name)
    first = found["phases"][0]
    rows = [
        ("`topology`", *_pod(found)),
        ("`hbm_bytes_per_device`", *_memory(found)),
        (
            "`compute_seconds_per_step`",
            f"{milliseconds(first['compute_seconds_per_step'])} ms in phase 1",
            "the sum of the compiler's cycle estimates over the clock",
        ),
        (
            "`roofline_seconds_per_step`",
            _roofline(first),
            "the compiler's more optimistic estimate; null where it gives none",
        ),
        (
            "`collective_seconds_per_step`",
            f"{milliseconds(first['collective_seconds_per_step'])} ms in phase 1",
            "time of the collectives by the model of the interconnect, without overlap",
        ),
        (
            "`model_flops_utilization`",
            f"{100 * found['model_flops_utilization']:.1f} %",
            "FLOPs of the published network (three forward passes) over peak and the whole step",
        ),
        ("`steps`", f"{found['steps']:,}", "optimizer updates of the whole recipe"),
        (
            "`projected_seconds`",
            seconds_text(found["projected_seconds"]),
            "all steps, and evaluation where the size of its data is known",
        ),
        (
            "`published_seconds`",
            f"{seconds_text(found['published_seconds'])} ({found['published_source']})",
            "what the source reports; null if it reports no time",
        ),
    ]
    return table(("field", "value", "meaning"), rows)


def _pod(found):
    value = f"{found['topology']}, {found['num_devices']:,} cores, {found['num_hosts']} hosts"
    return value, "chips along each axis of the pod; its devices and hosts"


def _memory(found):
    needs = f"{found['hbm_bytes_per_device'] / 2**30:.2f} GiB"
    value = f"{needs} of {found['hbm_limit_bytes'] / 2**30:.2f}"
    return (
        value,
        "memory that one device needs and has; `fits` is false if it needs more",
    )


def _roofline(phase):
    seconds = phase.get("roofline_seconds_per_step")
    return "-" if seconds is None else f"{milliseconds(seconds)} ms in phase 1"


def collectives(name, phase=1):
    """Return the exchanges in a step of a plan in Markdown, added up by purpose."""
    added = {}
    for one in plan(name)["collectives"]:
        if one.get("phase", 1) == phase:
            kind = (one["source"], one["op"], one["dtype"], f"{one['group_size']:,}")
            added[kind] = added.get(kind, 0) + one["bytes"]
    rows = [[*kind, f"{size / 1e6:,.3f}"] for kind, size in added.items()]
    return table(("purpose", "exchange", "dtype", "devices in a group", "MB a device"), rows)


@functools.cache
def study_plan(name):
    """Return the plan of a study: "imagenet_limit"."""
    return json.loads((ROOT / "configs" / "sweeps" / f"{name}-plan.json").read_text())


def study_plan_table(name):
    """Return the table of the cells of a planned study."""
    rows = []
    for cell in study_plan(name)["cells"]:
        run = cell["run"]
        rows.append(
            (
                cell["arm"],
                f"{cell['global_batch_size']:,}",
                cell["num_microsteps"],
                f"{run['steps']:,}",
                milliseconds(run["compute_seconds_per_step"] + run["collective_seconds_per_step"]),
                f"{100 * run['model_flops_utilization']:.1f} %",
                cell["search_trials"] + cell["final_runs"],
                seconds_text(cell["projected_seconds"]),
            )
        )
    header = ("arm", "batch", "microsteps", "steps", "ms a step", "of peak", "runs", "projected")
    return table(header, rows)
