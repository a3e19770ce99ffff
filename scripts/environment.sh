# Sourced by the scripts beside it. Makes .venv, and reuses it until its requirements change.
# A script may set VENV and CONSTRAINTS to another folder and other versions.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
CONSTRAINTS="$ROOT/scripts/constraints.txt"

# Tests start hundreds of processes. Without bytecode each would compile JAX for two seconds.
unset PYTHONDONTWRITEBYTECODE

# use_environment EXTRAS: install lbopt with these extras, at the versions in $CONSTRAINTS.
use_environment() {
    local extras=$1 python=${PYTHON:-python3} wanted stamp made
    local check='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'
    if ! "$python" -c "$check" 2>/dev/null; then
        echo "$python is not a Python >= 3.11 with its venv module:" \
            "install one, or name it: PYTHON=python3.12 $0" >&2
        exit 3
    fi

    stamp="$VENV/.lbopt-$extras"
    wanted=$(cat "$ROOT/pyproject.toml" "$CONSTRAINTS" | cksum)
    wanted="$("$python" --version) $wanted"
    local stamps=("$stamp")
    case $extras in
    test | docs) stamps+=("$VENV/.lbopt-dev") ;; # dev includes their extras
    esac
    for made in "${stamps[@]}"; do
        if [ -f "$made" ] && [ "$(cat "$made")" = "$wanted" ]; then
            return
        fi
    done

    echo "Setting up $VENV with lbopt[$extras] ..." >&2
    if ! "$VENV/bin/python" --version 2>/dev/null | grep -qxF "$("$python" --version)"; then
        "$python" -m venv --clear "$VENV"
    fi
    # Python compiles a module when it is imported. Compiling all packages here takes half a minute.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$CONSTRAINTS" --editable "${ROOT}[$extras]"
    echo "$wanted" >"$stamp"
}
