"""The hub alone, with peers that are silent, late, or not of the job."""

import concurrent.futures
import contextlib
import dataclasses
import json
import re
import resource
import socket
import threading
import time
from collections import deque

import pytest
from jobs import free_ports
from refusal import raised, refused, troubled

from lbopt.job import MemberJob, _guard, _hub, _secret, _wire, find_place
from lbopt.job._guard import _connect, _greeted, _Guard, _Signals
from lbopt.job._hub import Hub
from lbopt.job._place import Place
from lbopt.job._wire import QueuedWire, Wire, encode

SECRET = b"known to both sides"


def introduced(place, index):
    """Return a connection that has proven itself but not yet sent `here`, and its proof."""
    connection, asked = connect(place)
    nonce, hello = _secret.answer(SECRET, asked, index, 2, f"host-{index}, pid {index}")
    connection.sendall(json.dumps(hello).encode() + b"\n")
    connection.recv(4096)
    wire = Wire(connection)
    _secret.trust(wire, SECRET, asked, nonce, is_hub=False)
    return wire, hello


class Guard:
    """The guard of the process of an index, `far` seconds away, at its own address."""

    def __init__(self, place, index, count=2, secret=SECRET, far=0.0, at="127.0.0.1"):
        self.wire = Wire(
            socket.create_connection((place.host, place.port), timeout=10, source_address=(at, 0))
        )
        self.heard = []
        (asked,) = self.wire.receive()
        time.sleep(far)
        nonce, hello = _secret.answer(
            secret, asked["nonce"], index, count, f"host-{index}, pid {index}"
        )
        self.wire.send(**hello)
        (self.proof,) = self.wire.receive()
        if _secret.is_hub(secret, asked["nonce"], nonce, self.proof):
            _secret.trust(self.wire, secret, asked["nonce"], nonce, is_hub=False)
            self.wire.send(here=True)

    def wait_for(self, name, seconds=10):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = next((message for message in self.heard if name in message), None)
            if found is not None:
                return found
            messages = self.wire.receive()
            assert messages is not None, self.heard
            self.heard += messages
        raise AssertionError(self.heard)


@pytest.fixture
def place():
    return Place("127.0.0.1", free_ports(), 2, 0, start_timeout_s=20, hang_timeout_s=100)


def begin(place):
    hub = Hub(place, SECRET)
    guards = [Guard(place, index) for index in range(2)]
    for guard in guards:
        guard.wait_for("started")
    return hub, guards


def test_what_all_say_comes_back_in_their_order(place):
    _, guards = begin(place)
    guards[1].wire.send(say="key", round=0, value={"b": 1})
    guards[0].wire.send(say="key", round=0, value={"a": 1})
    for guard in guards:
        assert guard.wait_for("values") == {"round": 0, "values": [{"a": 1}, {"b": 1}]}


def test_different_things_at_once_are_an_error(place):
    _, guards = begin(place)
    for index, guard in enumerate(guards):
        guard.wire.send(say=f"key {index}", round=0, value=None)
    told = guards[1].wait_for("end")["end"]
    guards[1].wire.send(down=True)
    assert told["code"] == 2
    assert "(process 0 'key 0', process 1 'key 1')" in told["line"]


def test_all_stop_after_the_latest_step_that_one_is_in(place):
    _, guards = begin(place)
    guards[1].wire.send(stop=True)
    for guard, bound in zip(guards, (7, 9), strict=True):
        guard.wait_for("stop")
        guard.wire.send(bound=bound)
    for guard in guards:
        assert guard.wait_for("stop_at") == {"stop_at": 9}


def test_who_is_done_need_not_say_where_it_is(place):
    _, guards = begin(place)
    guards[0].wire.send(stop=True)
    guards[0].wait_for("stop")
    guards[0].wire.send(bound=5)
    guards[1].wire.send(done=True)
    assert guards[0].wait_for("stop_at") == {"stop_at": 5}


def test_who_says_nothing_is_taken_for_dead(place, monkeypatch):
    monkeypatch.setattr(_hub, "SILENT_S", 1.5)
    _, guards = begin(place)
    until = time.monotonic() + 10
    told = None
    guards[0].wire.settimeout(0.2)
    while told is None and time.monotonic() < until:
        guards[0].wire.send(beat=1, doing="in step")
        time.sleep(0.2)
        guards[0].heard += guards[0].wire.receive() or []
        told = next((message["end"] for message in guards[0].heard if "end" in message), None)
    assert (told["code"], told["kind"]) == (3, "died")
    assert told["line"].startswith("process 1 of 2 (host-1, pid 1) ")


def test_a_job_that_was_suspended_goes_on(place, monkeypatch):
    """A scheduler or virtual machine suspends all processes at once, so all were silent."""
    monkeypatch.setattr(_hub, "BEAT_S", 0.5)
    monkeypatch.setattr(_hub, "SILENT_S", 1.5)
    hub, guards = begin(place)
    turn = hub._turn
    monkeypatch.setattr(
        hub, "_turn", lambda timeout_s: setattr(hub, "_turn", turn) or time.sleep(2.5)
    )
    time.sleep(2.6)
    assert beats(guards, ({}, {}), 1.5) is None
    ours, theirs = socket.socketpair()
    guard = _Guard(place, Wire(ours), ["train"], True, _Signals(), False)
    for name in ("_heard", "_spoke", "_looked", "_beaten"):
        setattr(guard, name, time.monotonic() - 100)
    assert guard._look(time.monotonic()) is None
    (said,) = Wire(theirs).receive()
    assert said["beat"] == 0
    assert said["silent_s"] < 5


@pytest.mark.parametrize(("kind", "code"), [("died", 3), ("hung", 3), ("said", 1)])
def test_what_follows_from_a_peer_that_died_or_hung_is_not_the_cause(place, capsys, kind, code):
    """A collective fails in the other processes once a peer that hangs is ended."""
    ours, _theirs = socket.socketpair()
    guard = _Guard(place, Wire(ours), ["train"], True, _Signals(), False)
    guard._from_member({"failed": 1, "line": "a collective failed"})
    assert guard._from_hub({"end": {"code": 3, "line": "the cause", "kind": kind}}) == code
    assert capsys.readouterr().err == "lbopt train: the cause\n" * (code == 3)


def connect(place):
    stranger = socket.create_connection((place.host, place.port), timeout=10)
    asked = json.loads(stranger.recv(4096))
    return stranger, asked["nonce"]


def is_closed(stranger):
    """Wait until a connection ends, and return the data before the end."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := stranger.recv(4096):
            data += part
    return data


def greeting(asked, secret=SECRET, **changes):
    return _secret.answer(secret, asked, 0, 2, "host-0, pid 0")[1] | changes


STRANGERS = {
    "a browser": lambda asked: b"GET / HTTP/1.1\r\n\r\n",
    "nothing": lambda asked: b"",
    "bytes": lambda asked: b"\xff\x00\n",
    "nesting": lambda asked: b"[" * 1500 + b"\n",
    "no end": lambda asked: b"x" * 3000,
    "one of the time before secrets": lambda asked: {"index": 0, "count": 2, "where": "here"},
    "another secret": lambda asked: greeting(asked, b"known to nobody else"),
    "an answer to another number": lambda asked: greeting("0" * 64),
    "another process than the proof's": lambda asked: greeting(asked, index=1),
    "no proof": lambda asked: greeting(asked, proof=None),
    "a proof of strange letters": lambda asked: greeting(asked, proof="\ud800" * 64),
    "an index that is none": lambda asked: greeting(asked, index=True),
    "an index past the end": lambda asked: greeting(asked, index=2),
    "numbers for words": lambda asked: greeting(asked, where=3),
    "a long name": lambda asked: greeting(asked, where="h" * 300),
    "more than it was asked": lambda asked: (
        json.dumps(greeting(asked)).encode() + b'\n{"here": true}\n'
    ),
    "no code after a right greeting": lambda asked: [greeting(asked), {"here": True}],
}


def test_strangers_harm_nobody(place):
    hub = Hub(place, SECRET)
    for who, what in STRANGERS.items():
        stranger, asked = connect(place)
        begun = time.monotonic()
        said = what(asked)
        for part in said if isinstance(said, list) else [said]:
            stranger.sendall(part if isinstance(part, bytes) else json.dumps(part).encode() + b"\n")
        if not said:
            stranger.shutdown(socket.SHUT_WR)

        told = is_closed(stranger)
        assert (told == b'{"refused": "secret"}\n') == (b"refused" in told), who
        assert SECRET not in told, who
        assert time.monotonic() - begun < 3, who  # well before its timeout

    guards = [Guard(place, index) for index in range(2)]
    for guard in guards:
        guard.wait_for("started")
    for guard in guards:
        guard.wire.send(done=True)

    hub.join(10)
    assert not hub._thread.is_alive()
    assert re.match(rf"{len(STRANGERS)} connections .* from 127\.0\.0\.1", hub.strangers())
    assert hub.strangers() == ""


def test_a_greeting_is_good_for_one_connection(place):
    """A stranger that recorded a peer's data cannot replay them."""
    sent = []

    class Heard(socket.socket):
        def sendall(self, data):
            sent.append(data)
            return super().sendall(data)

    Hub(place, SECRET)
    guard = Guard(place, 0)
    guard.wire._socket = Heard(fileno=guard.wire._socket.detach())
    guard.wire.settimeout(10)
    guard.wire.send(beat=1, doing="in step")
    ours, hello = introduced(place, 1)
    for replayed in ([json.dumps(hello).encode() + b"\n"], sent):
        other, _ = connect(place)
        other.sendall(b"".join(replayed))
        told = is_closed(other)
        assert b"proof" not in told
    ours.send(here=True)
    guard.wait_for("started")


def test_a_line_that_comes_twice_is_no_line_of_ours(place):
    _, guards = begin(place)
    line = encode(stop=True)
    guards[1].wire._socket.sendall((guards[1].wire._keys[0].code(line) + line.data) * 2)
    told = guards[0].wait_for("end")["end"]
    assert told["line"] == f"process 1 of 2 (host-1, pid 1) is gone: {_wire.CHANGED}"


def test_what_is_told_comes_at_once(place):
    """Two writes per line would wait 40 ms for the other end's acknowledgement."""
    _, guards = begin(place)
    seconds = []
    for number in range(10):
        begun = time.monotonic()
        for guard in guards:
            guard.heard.clear()
            guard.wire.send(say="key", round=number, value=None)
        for guard in guards:
            guard.wait_for("values")
        seconds.append(time.monotonic() - begun)
    assert min(seconds) < 0.02


def test_a_long_line_costs_no_more_for_many():
    """Each receiver's code covers the hash of the line, which is computed once for all of them."""
    begun = time.monotonic()
    line = encode(value="x" * (1 << 24))
    once = time.monotonic() - begun
    ours, theirs = socket.socketpair()
    wire = QueuedWire(ours)
    _secret.trust(wire, SECRET, "0" * 64, "1" * 64, is_hub=True)
    begun = time.monotonic()
    for _ in range(200):
        wire.send_line(line)
    assert time.monotonic() - begun < 10 * once
    theirs.close()


@pytest.mark.slow
def test_a_thousand_connections_keep_nobody_out(place):
    """The hub's table overflows, and a process of the job still connects."""
    hub = Hub(place, SECRET)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    strangers = []
    try:
        for _ in range(1000):
            strangers.append(socket.create_connection((place.host, place.port), timeout=10))
        begun = time.monotonic()
        guards = [Guard(place, index) for index in range(2)]
        for guard in guards:
            guard.wait_for("started")
        assert time.monotonic() - begun < 5
        assert len(hub._strangers) <= 64
        assert hub._num_closed >= 1000 - 64
    finally:
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_flood_from_one_host_keeps_no_other_out(place):
    """The other host is slower than the flood needs to fill the hub's table."""
    Hub(place, SECRET)
    over = threading.Event()

    def flood():
        strangers = deque(maxlen=200)
        while not over.is_set():
            with contextlib.suppress(OSError):
                strangers.append(socket.create_connection((place.host, place.port), timeout=10))

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for index in range(2):
            Guard(place, index, far=0.5, at="127.0.0.2").wire.send(beat=1, doing="in step")
    finally:
        over.set()
        flooding.join()


def test_all_of_a_large_job_may_come_at_once(place):
    """They exceed the places for strangers, and the hub closes none that it has answered."""
    count = 200
    hub = Hub(dataclasses.replace(place, count=count), SECRET)
    connections = [connect(place) for _ in range(count)]
    for index, (connection, asked) in enumerate(connections):
        hello = _secret.answer(SECRET, asked, index, count, f"host-{index}")[1]
        connection.sendall(json.dumps(hello).encode() + b"\n")
    for connection, _ in connections:
        assert b"proof" in connection.recv(4096)
    assert hub.strangers() == ""


def test_who_takes_its_time_is_closed(place, monkeypatch):
    monkeypatch.setattr(_hub, "_GREETING_S", 0.5)
    Hub(place, SECRET)
    slow, _ = connect(place)
    begun = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() < begun + 8:
            slow.sendall(b"{")
            time.sleep(0.1)
    assert time.monotonic() - begun < 5


def test_one_that_does_not_read_holds_up_nobody(place, monkeypatch):
    monkeypatch.setattr(_hub, "_MOST_QUEUED_BYTES", 1 << 24)
    _, guards = begin(place)
    guards[1].wire.send(say="key", round=0, value="x" * (1 << 23))
    guards[0].wire.send(say="key", round=0, value=None)
    begun = time.monotonic()
    assert len(guards[0].wait_for("values")["values"][1]) == 1 << 23
    assert time.monotonic() - begun < 5
    for number in (1, 2, 3):
        guards[1].wire.send(say="key", round=number, value="x" * (1 << 23))
        guards[0].wire.send(say="key", round=number, value=None)
    told = guards[0].wait_for("end")["end"]
    assert told["line"] == f"process 1 of 2 (host-1, pid 1) is gone: {_hub.NOT_READING}"


def test_it_listens_where_it_is_told_to_and_nowhere_else(place):
    Hub(place, SECRET)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.port), timeout=5)
    named = dataclasses.replace(place, host="localhost", port=free_ports())
    hub = Hub(named, SECRET)
    assert hub.address == ("127.0.0.1", named.port) or hub.address == ("::1", named.port)
    assert not hub.everywhere
    told = dataclasses.replace(place, host="192.0.2.1", bind=("127.0.0.3", free_ports()))
    assert Hub(told, SECRET).address == told.bind
    elsewhere = f"192.0.2.1:{place.port}"
    with troubled("--coordinator_address", elsewhere, "resource") as caught:
        Hub(dataclasses.replace(place, host="192.0.2.1"), SECRET)
    assert "--coordinator_bind_address" in caught.value.reason
    with troubled("--coordinator_bind_address", "192.0.2.1:7", "resource"):
        Hub(dataclasses.replace(place, bind=("192.0.2.1", 7)), SECRET)
    with troubled("--coordinator_bind_address", f"127.0.0.3:{told.bind[1]}", "resource"):
        Hub(told, SECRET)


def test_a_name_that_is_a_loopback_address_here_alone(place, monkeypatch):
    """Debian's /etc/hosts is like this: the host does not know the address that others use."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", place.port))]
    monkeypatch.setattr(_hub.socket, "getaddrinfo", lambda *_, **__: found)
    hub = Hub(dataclasses.replace(place, host="host-0"), SECRET)
    assert hub.everywhere
    assert hub.address[0] == "0.0.0.0"


def test_who_was_started_twice_does_not_end_a_job_at_work(place):
    _, guards = begin(place)
    late = Guard(place, 1)
    assert late.wait_for("end")["end"]["line"].startswith("--process_id = 1: ")
    for index, guard in enumerate(guards):
        guard.wire.send(say="still there", round=0, value=index)
    assert guards[0].wait_for("values")["values"] == [0, 1]


def test_who_comes_while_a_job_ends_is_of_the_next(place):
    """A script's next command may start on one host before the others have ended."""
    hub, guards = begin(place)
    guards[1].wire.send(done=True)
    while not hub._processes[1].done:
        time.sleep(0.01)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        later = pool.submit(_connect, dataclasses.replace(place, index=1), SECRET, None, _Signals())
        time.sleep(0.5)
        assert not later.done()
        guards[0].wire.send(done=True)
        hub.join(10)
        Hub(place, SECRET)
        later.result(10)
        Guard(place, 0).wait_for("started")


def test_a_hub_that_reads_nothing_holds_up_no_guard(place, monkeypatch):
    monkeypatch.setattr(_guard, "_SENDING_S", 0.3)
    hub = Hub(place, SECRET)
    wire = _greeted(socket.create_connection((place.host, place.port)), place, SECRET, _Signals())
    ended = threading.Event()
    monkeypatch.setattr(hub, "_turn", lambda timeout_s: ended.wait())
    time.sleep(0.6)
    assert not wire.send(say="key", round=0, value="x" * (1 << 25))
    assert wire.receive() is None
    ended.set()


@pytest.mark.parametrize(
    ("kinds", "cause"),
    [
        (("aborted", "died"), 1),
        (("bug", "said"), 1),
        (("said", "said"), 0),
        (("died", "aborted"), 0),
    ],
)
def test_of_several_failures_the_cause_is_told(place, kinds, cause):
    """JAX's runtime may abort other processes before the dead one's guard has reported it."""
    _, guards = begin(place)
    for index, kind in enumerate(kinds):
        guards[index].wire.send(failed=3, line=f"line {index}", kind=kind)
        time.sleep(0.2)
    told = guards[1].wait_for("end")["end"]
    assert told["line"] == f"process {cause} of 2 (host-{cause}, pid {cause}): line {cause}"
    assert told["kind"] == kinds[cause]


def test_what_comes_with_the_answer_to_the_roll_call_is_heard(place):
    """The hub may read both at once if a process is stopped while it connects."""
    Hub(place, SECRET)
    wire, _ = introduced(place, 1)
    messages = (
        {"here": True},
        {"failed": 75, "line": "was stopped before the start", "kind": "said"},
    )
    lines = [encode(**message) for message in messages]
    wire._socket.sendall(b"".join(wire._keys[0].code(line) + line.data for line in lines))
    told = Guard(place, 0).wait_for("end")["end"]
    assert (told["code"], told["line"]) == (
        75,
        "process 1 of 2 (host-1, pid 1): was stopped before the start",
    )


def test_who_answers_a_roll_call_that_has_failed_is_told(place, monkeypatch):
    monkeypatch.setattr(_hub, "_LATE_S", 1.5)
    Hub(place, SECRET)
    Guard(place, 0, count=3).wait_for("end")
    told = Guard(place, 1).wait_for("end")["end"]
    assert re.match(r"--num_processes = 3: .*process 0 of 3", told["line"])


def beats(guards, states, seconds=8):
    """Send heartbeats of these states until the hub ends the job; return its message."""
    until = time.monotonic() + seconds
    for guard in guards:
        guard.wire.settimeout(0.1)
    while time.monotonic() < until:
        for guard, state in zip(guards, states, strict=True):
            guard.wire.send(**{"beat": 1, "doing": "at work", **state})
            guard.heard += guard.wire.receive() or []
            for message in guard.heard:
                if "end" in message:
                    return message["end"]
    return None


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (({}, {}), 0),
        (({"patience": 0, "doing": "waiting"}, {}), 1),
        (({"patience": 100}, {"silent_s": 1.5}), 1),
        (({}, {"silent_s": 0.9}), 1),  # not yet stuck for itself, but the one that hangs
        (({"patience": 100}, {}), None),
        (({"patience": 0}, {"patience": 100}), None),
    ],
)
def test_a_hang_is_when_nobody_goes_on_or_one_does_not_beat(place, states, named):
    guards = begin(dataclasses.replace(place, hang_timeout_s=1))[1]
    told = beats(guards, states, 2.5 if named is None else 8)
    assert (told is None) == (named is None)
    if named is not None:
        assert told["kind"] == "hung"
        assert told["line"].startswith("--hang_timeout_s = 1: ")
        process = rf"process {named} of 2 \(host-{named}, pid {named}\)"
        assert re.search(rf"{process}[^(]* at work", told["line"])
        # The line begins with a process only if that one is stuck.
        stuck = any(state.get("silent_s", 0) > 1 for state in states)
        assert told["line"].startswith(f"--hang_timeout_s = 1: process {named}") == stuck


def test_waiting_for_the_last_one_is_no_hang(place):
    place = dataclasses.replace(place, hang_timeout_s=2)
    Hub(place, SECRET)
    first = Guard(place, 0)
    assert beats([first], [{}], 3) is None
    last = Guard(place, 1)
    last.wait_for("started")
    assert beats([first, last], [{}, {}], 1) is None


def test_a_post_that_cannot_be_kept_is_an_error_where_the_first_one_waits(place):
    """The thread must not end silently and leave the job waiting forever."""
    ours, theirs = socket.socketpair()
    first = MemberJob(theirs, 0, 2, "", 20, None)

    def full(rows):
        raise OSError(28, "No space left on device")

    first.on_post(full)
    Wire(ours).send(posted=[1])
    with pytest.raises(OSError, match="No space left"):
        first.together("trials finished", False)
    ours.close()


def test_what_is_too_long_for_a_line_is_said_by_name(place, monkeypatch):
    """The process with the long value reports it, or the hub if all values together are long."""
    _, guards = begin(place)
    monkeypatch.setattr(_wire, "MOST_BYTES", 1064)
    for guard in guards:
        guard.wire.send(say="rows", round=0, value="x" * 600)
    told = guards[1].wait_for("end")["end"]
    assert told["code"] == 3
    assert re.match(r"rows: 1,2\d\d\b.* 1,000\b", told["line"])
    with troubled("rows", code="resource"):
        MemberJob(socket.socketpair()[0], 1, 2, "", 20, None).together("rows", "x" * 1200)


def test_a_message_without_end_is_refused():
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    theirs.sendall(json.dumps({"a": 1}).encode() + b"\n{")
    assert wire.receive() == [{"a": 1}]
    wire._rest = b"x" * (1 << 26)
    theirs.sendall(b"x")
    with raised(ValueError, numbers=[1 << 26]):
        wire.receive()


@pytest.mark.parametrize("flag", ["coordinator_address", "num_processes", "process_id"])
@pytest.mark.parametrize(
    "value", ["9" * 5000, "host:" + "9" * 5000, "a..b:1", f"{'a' * 70}:1", "\ud800:1"]
)
def test_a_place_that_python_does_not_read(flag, value):
    told = {"coordinator_address": "host:1", "num_processes": "2", "process_id": "0"}
    with refused(f"--{flag}", value, "value"):
        find_place(told | {flag: value}, {})


def test_a_place_is_found_by_jax(monkeypatch):
    """On Slurm, which sets the variables, JAX makes the address."""
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node[003-006]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "4",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    place = find_place({}, slurm)
    assert (place.host, place.count, place.index, place.local_device_ids) == ("node003", 4, 2, None)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert find_place({}, slurm) is None
    assert find_place({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


ON_SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
}
ALL_GPUS = {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        (ALL_GPUS, (3,)),
        ({}, (3,)),
        (ALL_GPUS | {"SLURM_STEP_TASKS_PER_NODE": "15,1", "SLURM_LOCALID": "0"}, None),
        (ALL_GPUS | {"SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (6, 7)),
        # The scheduler shows each task its own.
        (ALL_GPUS | {"SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"SLURM_GPUS_PER_TASK": "1"}, None),
        # --gpu-bind=none shows each task all of them.
        (ALL_GPUS | {"SLURM_GPUS_PER_TASK": "a100:1"}, (3,)),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "6,7"}, None),
        (ALL_GPUS | {"JAX_LOCAL_DEVICE_IDS": "4,5"}, (4, 5)),
    ],
)
def test_tasks_of_a_node_share_its_gpus(monkeypatch, variables, devices):
    environ = ON_SLURM | variables
    for name in (*ON_SLURM, *ALL_GPUS, "SLURM_GPUS_PER_TASK", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert find_place({}, environ).local_device_ids == devices


@pytest.mark.parametrize("tasks", [3, 16])
def test_gpus_that_cannot_be_shared_evenly(monkeypatch, tasks):
    environ = ON_SLURM | ALL_GPUS | {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": str(tasks)}
    for name in ("SLURM_GPUS_PER_TASK", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with refused("processes of a host", tasks) as error:
        find_place({}, environ)
    assert "8 GPUs" in str(error.value)
    own = environ | {"JAX_LOCAL_DEVICE_IDS": "4,5"}
    assert find_place({}, own).local_device_ids == (4, 5)


def test_devices_that_are_no_numbers():
    told = {"coordinator_address": "host:1", "num_processes": "2", "process_id": "0"}
    with troubled("JAX_LOCAL_DEVICE_IDS", "all", "value"):
        find_place(told, {"JAX_LOCAL_DEVICE_IDS": "all"})


def test_on_gke_too(monkeypatch):
    from jax_internals import cloud_tpu_cluster, cloud_tpu_init

    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(
        cloud_tpu_cluster.GceTpuCluster, "is_env_present", classmethod(lambda cls: False)
    )
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,host-1,host-2")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    for name in ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"):
        monkeypatch.setenv(name, "")
    place = find_place({}, {})
    assert (place.host, place.port, place.count, place.index) == ("localhost", 8482, 3, 1)
    monkeypatch.setenv("TPU_WORKER_ID", "none")
    with troubled("--coordinator_address", code="resource"):
        find_place({}, {})
