"""SIGTERM: the run finishes its step, saves its state, exits with 75, and can be resumed."""

import json
import os
import signal
import threading
import time

import pytest

from lbopt.job import PreemptionWatch


def terminate_at(last, number=signal.SIGTERM):
    def before(step, state, batch):
        if step == last:
            os.kill(os.getpid(), number)

    return before


@pytest.mark.everyday("1", "12")
@pytest.mark.parametrize("step", [1, 7, 9, 12, 19])
def test_a_terminated_run_goes_on_where_it_stopped(
    step, train, reference, bits, saved_state, logged, tmp_path, capsys
):
    """1 and 7 have no checkpoint, 9 has one, 12 one with an evaluation; 19 is the last but one."""
    assert train(tmp_path, before=terminate_at(step)) == 75
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == (
        f"lbopt train: stopped at step {step} of 20 with the state saved; run the same command "
        "again to resume"
    )
    assert sum(line.startswith("lbopt train:") for line in said) == 1
    state = bits(saved_state(tmp_path))
    assert int.from_bytes(state["step"][2], "little") == step
    assert logged(tmp_path) == logged(reference())[:step]
    assert train(tmp_path) == 0
    assert f"resuming at step {step} of 20" in capsys.readouterr().err
    assert bits(saved_state(tmp_path)) == bits(saved_state(reference()))
    assert logged(tmp_path) == logged(reference())


def test_the_end_of_a_terminal_is_a_request_to_stop_unless_nohup_ignores_it(train, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
    try:
        assert train(tmp_path / "run", before=terminate_at(7, signal.SIGHUP)) == 75
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert train(tmp_path / "run", before=terminate_at(9, signal.SIGHUP)) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_terminated_at_a_step_with_a_checkpoint_saves_what_an_uninterrupted_one_saves(
    train, reference, bits, saved_state, tmp_path
):
    assert train(tmp_path, before=terminate_at(9)) == 75
    assert bits(saved_state(tmp_path)) == bits(saved_state(reference(), step=9))


def test_a_run_terminated_in_its_last_step_is_finished(
    train, reference, bits, saved_state, tmp_path, capsys
):
    assert train(tmp_path, before=terminate_at(20)) == 0
    assert "stopped" not in capsys.readouterr().err
    assert bits(saved_state(tmp_path)) == bits(saved_state(reference()))


def test_a_run_may_be_terminated_again_and_again(
    train, reference, bits, saved_state, logged, tmp_path
):
    for step in (2, 3, 11):
        assert train(tmp_path, before=terminate_at(step)) == 75
    assert train(tmp_path) == 0
    assert bits(saved_state(tmp_path)) == bits(saved_state(reference()))
    assert logged(tmp_path) == logged(reference())


@pytest.mark.process
def test_the_command_as_a_process_exits_with_75(command, start_process, tmp_path):
    """The run is long, so that the signal arrives in the middle of it."""
    workdir = tmp_path / "run"
    process = start_process(
        "-m", "lbopt", *command(workdir, "--config.num_epochs=2000", "--config.checkpoint.keep=1")
    )
    deadline = time.monotonic() + 120
    metrics = workdir / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("lbopt train: stopped at step ")
    step = int(last.split()[5])
    assert 1 <= step < 32000
    assert (workdir / "checkpoints" / str(step)).is_dir()
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == step


def test_a_run_terminated_before_its_first_step_says_so(
    train, plan_of, tmp_path, capsys, monkeypatch
):
    """The signal may arrive while the step is lowered."""
    plan = plan_of()
    monkeypatch.setattr(type(plan), "lower", lambda run: os.kill(os.getpid(), signal.SIGTERM))
    assert train(tmp_path) == 75
    assert "stopped before step 1 of 20" in capsys.readouterr().err
    monkeypatch.undo()
    assert train(tmp_path) == 0


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (2, "without a checkpoint yet; run the same command again to start again"),
        (12, "with the state of step 9 of 20 saved; run the same command again to resume"),
    ],
)
def test_ctrl_c_says_how_to_resume(step, said, train, tmp_path, capsys):
    def interrupt(number, state, batch):
        if number == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # `cli.run` makes 130 of it
        train(tmp_path, before=interrupt)
    assert capsys.readouterr().err.splitlines()[-1] == f"lbopt train: interrupted {said}"


def test_the_handler_of_before_is_put_back():
    before = signal.getsignal(signal.SIGTERM)

    def watch_and_fail():
        with PreemptionWatch() as watch:
            assert signal.getsignal(signal.SIGTERM) != before
            os.kill(os.getpid(), signal.SIGTERM)
            assert watch.requested
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watch_and_fail()
    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_nothing_is_watched():
    found = []

    def enter():
        with PreemptionWatch() as watch:
            found.append((watch.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGTERM))]
