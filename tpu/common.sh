# Sourced by every script in this folder: options, one-line errors, dry runs.
# shellcheck shell=bash disable=SC2034  # the sourcing scripts read the variables
# Exit codes: 0 done; 2 the user's input is wrong; 3 the environment is wrong; 1 the program failed,
# or a bug.

TPU=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$TPU")
SCRIPT=$(basename "$0")
ENV_FILE=$TPU/env
DRY_RUN=''
exec 3>&1 # a dry run prints here, even from inside $(...)

# warn MESSAGE: print one line on stderr. Control characters, which files and the cloud may contain
# and a terminal would obey, become spaces.
warn() {
    printf 'tpu/%s: %s\n' "$SCRIPT" "${*//[[:cntrl:]]/ }" >&2
}

# die CODE MESSAGE: print one line on stderr and exit. (Inside $(...) only the subshell ends.)
die() {
    warn "${*:2}"
    exit "$1"
}

say() {
    [ -n "$DRY_RUN" ] || printf 'tpu/%s: %s\n' "$SCRIPT" "${*//[[:cntrl:]]/ }"
}

((BASH_VERSINFO[0] > 4 || BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] >= 4)) ||
    die 3 "bash $BASH_VERSION is too old; use bash >= 4.4, e.g. in Cloud Shell or on Linux"

# help: print the comment at the top of the script, and the options that all scripts have.
help() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
    printf '  %-14s %s\n' --env=FILE 'settings (default tpu/env)' \
        --dry-run 'print every command, ask and change nothing' --help 'this text'
}

# parse_options "NAME NAME= ..." "$@": read this script's flags into OPT[NAME], and the flags that
# all scripts have. NAME= takes a value.
declare -A OPT=()
parse_options() {
    local known=" $1 " argument name
    shift
    for name in $known; do OPT[${name%=}]=''; done
    for argument in "$@"; do
        case $argument in
        --help | -h) help && exit 0 ;;
        --dry-run) DRY_RUN=yes && continue ;;
        --env=*) ENV_FILE=${argument#--env=} && continue ;;
        esac
        name=${argument#--}
        if [[ $argument == --*=* && $known == *" ${name%%=*}= "* ]]; then
            OPT[${name%%=*}]=${name#*=}
        elif [[ $argument == --* && $known == *" $name "* ]]; then
            OPT[$name]=yes
        else
            die 2 "'$argument' is not an option; tpu/$SCRIPT --help has them"
        fi
    done
}

# need COMMAND FIX: end the script if a program is not installed. A dry run needs none.
need() {
    [ -n "$DRY_RUN" ] || command -v "$1" >/dev/null || die 3 "$1 is not on PATH; $2"
}

# show WORD...: print a command, quoted for a shell.
show() {
    local word line=''
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
        line+="$word "
    done
    printf '%s\n' "${line% }" >&3
}

# do_it WORD...: run a command, or print it in a dry run.
do_it() {
    if [ -n "$DRY_RUN" ]; then show "$@"; else "$@"; fi
}

# shellcheck source=tpu/settings.sh
source "$TPU/settings.sh"
# shellcheck source=tpu/cloud.sh
source "$TPU/cloud.sh"
