"""A stand-in for a training program that counts steps, saves every fifth, and can resume.

    python stand_in.py WORKDIR STEPS [--sleep=S] [--hold-at=STEP] [--fail-at=STEP:CODE]
                       [--preempt-every=STEPS] [--data=FOLDER]

Its metrics depend on every earlier step, so a run that lost or repeated a step ends with other
numbers. On SIGTERM it saves and exits with 75. With --hold-at it passes that step once WORKDIR/go
exists. Each process saves its own state, and the first one writes metrics.jsonl.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time


def main():
    """Run the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--sleep", type=float, default=0.02)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--fail-at", default="")
    parser.add_argument("--preempt-every", type=int, default=0)
    parser.add_argument("--data", default="")
    arguments = parser.parse_args()

    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    if arguments.data:
        arguments.workdir.mkdir(parents=True, exist_ok=True)
        seen = f"{os.environ['TFDS_DATA_DIR']} {arguments.data}"
        (arguments.workdir / "data").write_text(seen)
    process = int(os.environ.get("JAX_PROCESS_ID", "0"))
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    saved = arguments.workdir / f"state-{process}.json"
    state = (
        json.loads(saved.read_text()) if saved.exists() else {"step": 0, "value": 1, "lines": []}
    )

    fail_step, _, fail_code = arguments.fail_at.partition(":")
    print(f"process {process} starts at step {state['step']}", flush=True)

    while state["step"] < arguments.steps:
        if fail_step and state["step"] == int(fail_step):
            print(f"process {process} fails at step {fail_step}", flush=True)
            sys.exit(int(fail_code))
        while state["step"] == arguments.hold_at and not (
            asked or (arguments.workdir / "go").exists()
        ):
            time.sleep(0.02)

        state["step"] += 1
        if arguments.preempt_every and state["step"] % arguments.preempt_every == 0:
            asked.append(True)
        state["value"] = (state["value"] * 1103515245 + state["step"]) % 2**31
        state["lines"].append(json.dumps({"step": state["step"], "train/loss": state["value"]}))

        if state["step"] % 5 == 0 or asked or state["step"] == arguments.steps:
            _write(saved, json.dumps(state))
            if process == 0:
                _write(
                    arguments.workdir / "metrics.jsonl",
                    "".join(f"{line}\n" for line in state["lines"]),
                )

        if asked:
            print(f"process {process} saved step {state['step']}", flush=True)
            sys.exit(75)
        time.sleep(arguments.sleep)

    print(f"process {process} is done", flush=True)


def _write(path, text):
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


if __name__ == "__main__":
    main()
