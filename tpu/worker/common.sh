# Sourced by the scripts in this folder, which run on a TPU machine.
# shellcheck shell=bash disable=SC2034  # the sourcing scripts read these

WORKER=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SOURCE=${WORKER%/tpu/worker}
LBOPT_ROOT=$(dirname "$SOURCE") # /var/lib/lbopt, where startup.sh has put it
VENV=$LBOPT_ROOT/venv
RUN=$LBOPT_ROOT/run
ID=$(cat "$LBOPT_ROOT/id")         # SLICE-WORKER, written by startup.sh
HOME_URL=$(cat "$LBOPT_ROOT/home") # gs://BUCKET/lbopt/NAME
export PATH=$VENV/bin:$PATH:/snap/bin

# answer WORD...: print a line for the machine that asks over ssh.
answer() {
    echo "lbopt $ID $*"
}

die() {
    echo "tpu/worker/$(basename "$0"): ${*:2}" >&2
    exit "$1"
}

# booted: whether the startup script of this boot has ended. Until then the files here are from the
# previous boot.
booted() {
    local boot=${BOOT_ID:-$(cat /proc/sys/kernel/random/boot_id)}
    [ "$(cat "$LBOPT_ROOT/booted" 2>/dev/null)" = "$boot" ]
}

# kept: whether a keep, or a program that outlived its keep, is running. Both hold this lock.
kept() {
    ! flock --shared --nonblock "$RUN/lock" true
}

# shellcheck source=tpu/settings.sh
source "$WORKER/../settings.sh"

# read_wanted: read the settings of the run. Numbers are checked again, because bash would evaluate
# other text in arithmetic.
read_wanted() {
    local name
    read_settings "$RUN/wanted" "${WANTED[@]}"
    for name in "${WANTED[@]}"; do
        [[ $name != MAX_* && $name != *_S || ${!name} =~ ^[0-9]+$ ]] ||
            die 2 "$RUN/wanted: $name='${!name}' is no number; tpu/run writes it anew"
    done
}
