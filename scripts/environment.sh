# Sourced by the scripts beside it: makes .venv once, reuses it while nothing it was made from has changed.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"

# Hundreds of processes import the same: without bytecode each of them would compile JAX anew, for two seconds.
unset PYTHONDONTWRITEBYTECODE

# use_environment EXTRAS: .venv has lbopt with these extras, at the versions in constraints.txt.
use_environment() {
    local extras=$1 python=${PYTHON:-python3} wanted stamp made
    if ! "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "$python is not a Python >= 3.11 with its venv module: install one, or name it: PYTHON=python3.12 $0" >&2
        exit 3
    fi
    stamp="$VENV/.lbopt-$extras"
    wanted="$("$python" --version) $(cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" | cksum)"
    for made in "$stamp" "$VENV/.lbopt-dev"; do # dev has the extras of test too
        if [ -f "$made" ] && [ "$(cat "$made")" = "$wanted" ] && { [ "$made" = "$stamp" ] || [ "$extras" = test ]; }; then
            return
        fi
    done
    echo "Setting up $VENV with lbopt[$extras] ..." >&2
    if ! "$VENV/bin/python" --version 2>/dev/null | grep -qxF "$("$python" --version)"; then
        "$python" -m venv --clear "$VENV"
    fi
    # Bytecode is made of what is imported, when it is: of all that is installed it takes half a minute, most of it never used.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$ROOT/scripts/constraints.txt" --editable "${ROOT}[$extras]"
    echo "$wanted" >"$stamp"
}
