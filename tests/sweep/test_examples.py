"""test_examples.jsonl keeps the score of every test example through interruptions."""

import json

import numpy as np
import pytest

from lbopt.errors import EnvironmentProblem
from lbopt.sweep import BucketShards, _bucket_shards
from lbopt.sweep._example_scores import EXAMPLES, pack, read_examples
from lbopt.sweep._results import REQUIRED, Results
from lbopt.sweep._trials import trial_identity


def row(seed, **fields):
    final = {"arm": "a", "phase": "final", "study": "s", "diverged": False, "seed": seed}
    return {**dict.fromkeys(REQUIRED, 1.0), "global_batch_size": 64, **final, **fields}


def right(bits):
    return {"accuracy": (np.asarray(bits, np.float32), np.ones(len(bits), np.float32))}


def line(seed, bits):
    return pack(row(seed), right(bits))


def test_bits_and_losses_come_back(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2, 361)
    losses = np.random.default_rng(1).random(5, np.float32)
    tokens = np.array([64, 64, 64, 64, 7], np.float32)
    text = row(2, metric="perplexity", test_perplexity=9.0, test_loss=2.2)
    packed = [line(1, bits), pack(text, {"perplexity": (losses * tokens, tokens)})]
    assert len(json.dumps(packed[0])) < 400
    Results(tmp_path).add([row(1), text], packed)

    found = read_examples(tmp_path)
    assert [each.metric for each in found.values()] == ["accuracy", "loss"]
    np.testing.assert_array_equal(found[trial_identity(row(1))].values, bits)
    np.testing.assert_allclose(found[trial_identity(text)].values, losses, rtol=1e-6)
    np.testing.assert_array_equal(found[trial_identity(text)].weights, tokens)


def test_examples_of_which_some_do_not_count(tmp_path):
    pairs = {"accuracy": (np.array([1, 0, 0], np.float32), np.array([1, 0, 1], np.float32))}
    Results(tmp_path).add([row(1)], [pack(row(1), pairs)])
    found = read_examples(tmp_path)[trial_identity(row(1))]
    assert np.average(found.values, weights=found.weights) == 0.5


def test_a_metric_of_the_users_own_may_have_any_weights(tmp_path):
    other = row(1, metric="f1", test_f1=0.6)
    pairs = {"f1": (np.array([0.1, 0.3, 0], np.float32), np.array([0.2, 0.5, 0], np.float32))}
    Results(tmp_path).add([], [pack(other, pairs)])
    (found,) = read_examples(tmp_path).values()
    assert found.metric == "f1"
    np.testing.assert_allclose(found.values, [0.5, 0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(found.weights, [0.2, 0.5, 0], rtol=1e-6)


def test_outputs_that_are_not_numbers_have_no_line():
    assert pack(row(1, test_accuracy=None), right([1, 0])) is None


def test_a_trial_that_was_killed_between_its_two_lines_counts_once(tmp_path):
    """Its examples exist but its record does not: it runs again, and a cut line is removed."""
    examples = tmp_path / EXAMPLES
    examples.write_text(json.dumps(line(1, [0, 1])) + "\n" + '{"arm": "a", "glo')
    Results(tmp_path).add([row(1)], [line(1, [1, 1])])
    assert len(examples.read_text().splitlines()) == 2
    (found,) = read_examples(tmp_path).values()
    assert found.values.tolist() == [1, 1]


def test_a_row_is_not_written_without_its_examples(tmp_path):
    results = Results(tmp_path)
    (tmp_path / EXAMPLES).mkdir()
    with pytest.raises(EnvironmentProblem):
        results.add([row(1)], [line(1, [1, 1])])
    assert (tmp_path / "results.jsonl").read_text() == ""
    assert not results.records


@pytest.mark.parametrize(
    "damage", [{"correct": "AAAA"}, {"correct": "?"}, {"num_examples": 0}, {"metric": 1}]
)
def test_damage_is_noticed(damage, tmp_path):
    (tmp_path / EXAMPLES).write_text(json.dumps({**line(1, [1, 0, 1]), **damage}) + "\n")
    with pytest.raises(EnvironmentProblem):
        read_examples(tmp_path)


def test_shards_in_a_bucket_are_merged(monkeypatch, tmp_path):
    study = tmp_path / "study"
    mirror = tmp_path / "mirror"
    shard = study / "shards" / "1-of-2"
    shard.mkdir(parents=True)
    mirror.mkdir()
    monkeypatch.setattr(_bucket_shards, "bucket_path", lambda named: study)
    (shard / EXAMPLES).write_text(json.dumps(line(1, [0, 1])) + "\n")
    Results(mirror).add([row(2)], [line(2, [1, 0])])

    others = BucketShards("gs://bucket/study", mirror)
    others.fetch()
    others.publish()
    others.fetch()  # the study's own file now holds both
    for folder in (mirror, study):
        assert {trial[-1] for trial in read_examples(folder)} == {1, 2}
    assert len((study / EXAMPLES).read_text().splitlines()) == 2
