"""The set of trials, their shared settings, and the choice of a candidate."""

import copy
import math

import pytest
from refusal import refused
from tiny_study import make_config

from lbopt.config import LossConfig, ModelConfig, OptimizerConfig, SearchConfig
from lbopt.sweep import _drive, deal_cells, make_cells, make_problems
from lbopt.sweep.lanes import program_key
from lbopt.sweep.search import Factors, Proposal

RULE = Factors(1.0, 1.0, 1.0)


def row(
    factor, accuracy, loss=1.0, phase="search", diverged=False, fidelity=1.0, warmup=1.0, **more
):
    scores = {
        "validation_accuracy": accuracy,
        "validation_loss": loss,
        "diverged": diverged,
        "steps": 100,
    }
    factors = {"learning_rate_factor": factor, "warmup_factor": warmup, "weight_decay_factor": 1.0}
    return {"phase": phase, "fidelity": fidelity, **factors, **scores, **more}


def whole(factors=RULE):
    return Proposal(factors, 1.0)


def going_through(cell, config, value):
    """Return a cell's requests, round by round, when `value` scores a trial."""
    going = _drive.drive(cell, config)
    asked = []
    wanted = next(going)
    while True:
        asked.append(wanted)
        rows = [
            row(
                one.factors.learning_rate,
                value(one),
                phase=one.phase,
                fidelity=one.fidelity,
                warmup=one.factors.warmup,
            )
            for one in wanted
        ]
        try:
            wanted = going.send(rows)
        except StopIteration:
            return asked


def test_a_cell_runs_every_rate_with_every_search_seed_and_then_the_best_with_every_final_seed(
    cells,
):
    search = SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0), seeds=(0, 3), widen_candidates=0)
    config = make_config(search=search)
    search, final = going_through(
        cells[0], config, lambda one: 0.9 if one.factors.learning_rate == 2.0 else 0.8
    )
    assert [(one.factors.learning_rate, one.seed) for one in search] == [
        (factor, seed) for factor in (0.5, 1.0, 2.0) for seed in (0, 3)
    ]
    assert {one.phase for one in search} == {"search"}
    assert [(one.phase, one.factors.learning_rate, one.seed) for one in final] == [
        ("final", 2.0, 7),
        ("final", 2.0, 8),
    ]


def test_a_halving_search_runs_short_trials_first_and_final_ones_whole(cells):
    search = SearchConfig("successive_halving", num_candidates=9, min_fidelity=1 / 9)
    config = make_config(search=search)
    *rungs, final = going_through(
        cells[0], config, lambda one: -abs(math.log(one.factors.learning_rate))
    )
    assert [len(rung) for rung in rungs] == [9, 3, 1]
    assert [rung[0].num_steps for rung in rungs] == [3, 8, 24]
    assert {one.num_steps for one in final} == {24}
    assert {one.factors for one in final} == {rungs[-1][0].factors}


@pytest.mark.parametrize("fidelity", [1 / 27, 1 / 3, 0.5, 1.0])
def test_a_warmup_too_long_for_a_run_ends_one_step_before_it_at_every_length(fidelity):
    for cell in make_cells(make_config(), make_problems(make_config())):
        trial = cell.trial("search", Proposal(Factors(1.0, 1000.0, 1.0), fidelity), 0)
        longest = 0 if cell.arm.name == "momentum" else trial.num_steps - 1
        assert cell.warmup_steps(trial) == pytest.approx(longest)


def test_a_noise_scale_that_nothing_is_compared_for_is_refused():
    config = make_config(microstep_size=128)
    config.arms[1].optimizer.track_noise_scale = True
    with refused("config.arms[1].optimizer.track_noise_scale", True, "conflict"):
        make_cells(config, make_problems(config))


def test_data_that_are_scored_otherwise_are_refused():
    config = make_config()
    problems = [one._replace(metric_names=("exact_match", "f1")) for one in make_problems(config)]
    with refused("config.train.data.name", "digits", "conflict"):
        make_cells(config, problems)


def test_what_takes_longest_is_dealt_first_so_that_shards_share_the_work():
    config = make_config(global_batch_sizes=(16, 128, 1024))
    cells = make_cells(config, make_problems(config))
    order = [cell.global_batch_size for cell in deal_cells(cells, config)]
    assert order == [16, 16, 128, 128, 1024, 1024]
    config.arms[1].search = SearchConfig(learning_rate_factors=tuple(range(1, 200)))
    assert [cell.arm.name for cell in deal_cells(cells, config)[:3]] == ["lamb"] * 3


def test_rates_follow_the_scaling_rules(cells):
    rates = {
        (cell.arm.name, cell.global_batch_size): cell.trial("search", whole(), 0).learning_rate
        for cell in cells
    }
    assert rates == pytest.approx(
        {
            ("momentum", 128): 0.05 * 2,
            ("momentum", 1024): 0.05 * 16,
            ("lamb", 128): 0.02 * 2**0.5,
            ("lamb", 1024): 0.02 * 4,
        }
    )


def test_legw_warms_up_for_the_same_steps_at_every_batch(cells):
    assert {cell.resolved.warmup_steps for cell in cells if cell.arm.name == "lamb"} == {2}
    assert {cell.resolved.num_steps for cell in cells} == {24, 3}


def test_a_warmup_longer_than_the_run_ends_one_step_before_it(cells):
    (cell,) = (cell for cell in cells if (cell.arm.name, cell.global_batch_size) == ("lamb", 1024))
    assert [
        cell.trial("search", whole(Factors(1.0, factor, 1.0)), 0).warmup_steps
        for factor in (0.0, 0.5, 9.0)
    ] == [
        0,
        1,
        2,
    ]


def test_steps_instead_of_epochs():
    config = make_config()
    config.train.num_steps = 11
    cells = make_cells(config, make_problems(config))
    assert {cell.resolved.num_steps for cell in cells} == {11}


def test_arms_that_learn_the_same_share_a_problem_and_others_do_not():
    config = make_config()
    other = copy.deepcopy(config.arms[1])
    other.name = "lstm"
    other.model = ModelConfig("lstm", hidden=8)
    smoothed = copy.deepcopy(config.arms[1])
    smoothed.name = "smoothed"
    smoothed.loss = LossConfig(label_smoothing=0.1)
    config.arms = (*config.arms, other, smoothed)
    config.validate()
    first, second, third, fourth = make_problems(config)
    assert first is second
    assert len({id(first), id(third), id(fourth)}) == 3


def test_trials_share_a_program_whatever_their_numbers_and_rules(cells):
    """Trials share no program if batch, optimizer or length differ."""
    (lamb, full) = (cell for cell in cells if cell.arm.name == "lamb")
    (momentum, _) = (cell for cell in cells if cell.arm.name == "momentum")
    other_rule = copy.deepcopy(lamb)
    other_rule.train.schedule.scaling_rule = "linear"
    other_rule.train.schedule.base_learning_rate = 3.0
    other_rule.train.schedule.base_warmup_epochs = 1.0
    other_rule.train.optimizer.weight_decay = 0.5
    one = lamb.trial("search", whole(), 0)
    key = program_key(lamb, one)
    assert key == program_key(lamb, lamb.trial("final", Proposal(Factors(2.0, 0.5, 3.0), 0.5), 9))
    assert key == program_key(other_rule, one)
    other_decay = copy.deepcopy(lamb)
    other_decay.train.schedule.decay = "cosine"
    without = lamb.trial("search", whole(Factors(1.0, 1.0, 0.0)), 0)
    different = [program_key(cell, one) for cell in (full, momentum, other_decay)] + [
        program_key(lamb, without)
    ]
    assert len({key, *different}) == 5


def test_options_of_our_optimizers_are_arguments_of_a_program(cells):
    def key(name, **options):
        cell = copy.deepcopy(cells[0])
        cell.train.optimizer = OptimizerConfig(name, options=options)
        return program_key(cell, cell.trial("search", whole(), 0))

    assert key("muonh", momentum=0.9, steps=4) == key("muonh", momentum=0.8, steps=4)
    assert key("muonh", momentum=0.9, steps=4) != key("muonh", momentum=0.9, steps=5)
    assert key("optax.lion", b1=0.9) != key("optax.lion", b1=0.8)


def test_a_batch_above_the_training_set_is_refused():
    config = make_config(global_batch_sizes=(128, 1025))
    with refused("config.global_batch_sizes", (128, 1025), "mismatch"):
        make_cells(config, make_problems(config))


@pytest.mark.parametrize(
    "search",
    [
        SearchConfig(warmup_factors=(1.0, 2.0)),
        SearchConfig(warmup_factors=(2.0,)),
        SearchConfig("halton", warmup_range=(2.0, 2.0)),
    ],
    ids=["two factors", "one factor", "a range of one factor"],
)
def test_a_factor_of_the_warmup_of_an_arm_that_has_none_is_refused(search):
    config = make_config(search=search)
    with refused("config.arms[0].schedule.warmup_rule", "none", "conflict"):
        make_cells(config, make_problems(config))


@pytest.mark.parametrize(
    "search",
    [
        SearchConfig(weight_decay_factors=(2.0,)),
        SearchConfig("halton", weight_decay_range=(0.5, 0.5)),
    ],
    ids=["one factor", "a range of one factor"],
)
def test_a_factor_of_the_weight_decay_of_an_arm_that_has_none_is_refused(search):
    config = make_config(search=search)
    for arm in config.arms:
        arm.optimizer.weight_decay = 0.0
    with refused("config.arms[0].optimizer.weight_decay", 0.0, "conflict"):
        make_cells(config, make_problems(config))


def test_a_target_that_is_no_metric_of_the_data_is_refused():
    config = make_config()
    config.train.target_metric = "eval/perplexity"
    with refused("config.train.target_metric", "eval/perplexity", "choice"):
        make_cells(config, make_problems(config))


def test_more_probed_examples_than_there_are_are_refused():
    config = make_config()
    config.measure.num_probes = 1
    config.measure.probe_part_size = 65
    with refused("config.measure.probe_part_size", 65, "mismatch"):
        make_cells(config, make_problems(config))


@pytest.mark.parametrize(
    "modules",
    [
        (("head", "^Dense"),),
        (("head", "^nothing"), ("body", "")),
        (("head", "("), ("body", "")),
    ],
    ids=["a parameter without a module", "a module without a parameter", "no regular expression"],
)
def test_modules_that_do_not_fit_the_model_are_refused_before_the_search(modules):
    config = make_config()
    config.measure.num_probes = 1
    config.measure.probe_part_size = 8
    config.measure.phi_modules = modules
    with refused("config.measure.phi_modules", modules, "mismatch"):
        make_cells(config, make_problems(config))


def test_the_best_mean_validation_accuracy_is_chosen():
    rows = [row(1.0, 0.9), row(1.0, 0.7), row(2.0, 0.85), row(2.0, 0.83)]
    assert _drive.choose(rows).learning_rate == 2.0


def test_test_accuracy_and_final_trials_and_short_ones_do_not_choose():
    rows = [row(1.0, 0.9, test_accuracy=0.1), row(2.0, 0.8, test_accuracy=1.0)]
    others = [row(4.0, 1.0, phase="final"), row(8.0, 1.0, fidelity=0.5)]
    assert _drive.choose([*rows, *others]).learning_rate == 1.0


def test_ties_go_to_the_lower_loss_then_to_the_smaller_rate():
    assert _drive.choose([row(1.0, 0.9, loss=0.5), row(2.0, 0.9, loss=0.4)]).learning_rate == 2.0
    assert _drive.choose([row(2.0, 0.9, loss=0.5), row(1.0, 0.9, loss=0.5)]).learning_rate == 1.0


def test_a_diverged_trial_counts_as_nothing():
    rows = [row(1.0, 0.5), row(2.0, 0.99, loss=None, diverged=True), row(2.0, 0.9)]
    assert _drive.choose(rows).learning_rate == 1.0


def test_with_a_target_the_fewest_steps_are_chosen_and_who_never_gets_there_comes_last():
    reached = [row(1.0, 0.9, steps_to_target=50), row(1.0, 0.9, steps_to_target=30)]
    faster = [row(2.0, 0.8, steps_to_target=40), row(2.0, 0.8, steps_to_target=20)]
    never = [row(4.0, 0.99, steps_to_target=10), row(4.0, 0.99, steps_to_target=None)]
    assert _drive.choose([*reached, *faster, *never]).learning_rate == 2.0
    assert _drive.score(faster) == (pytest.approx(0.3), 1.0, True)
    assert _drive.score([row(1.0, 0.4, steps_to_target=None)]).value == pytest.approx(1.6)
    assert _drive.score([row(1.0, 0.4, steps_to_target=10, diverged=True)]).value == 2.0


@pytest.mark.parametrize(("loss", "learned"), [(2.0, True), (2.29, False), (9.0, False)])
def test_a_candidate_has_learned_if_all_its_runs_are_below_the_trivial_loss(loss, learned):
    rows = [row(1.0, 0.9, train_loss=1.0), row(1.0, 0.9, train_loss=loss)]
    assert _drive.score(rows, 2.3).learned is learned
    assert _drive.score(rows).learned
