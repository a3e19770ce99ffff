# What the scripts ask of gcloud. Every call ends by itself, and what it says goes into one line.
# shellcheck shell=bash disable=SC2034  # the answers are variables that the sourcing script reads

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT

need_cloud() {
    need gcloud "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
    need timeout "install GNU coreutils"
}

cloud() {
    if [ -n "$DRY_RUN" ]; then
        show gcloud "$@"
    else
        timeout --foreground --kill-after=10 "${LIMIT:-$SSH_S}" gcloud "$@" --quiet </dev/null
    fi
}

tpus() {
    cloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"
}

# try WORD...: run with OUT = its stdout, ERR = its stderr, REASON = the line of ERR that matters.
try() {
    local code=0
    OUT=$("$@" 2>"$SCRATCH/err") || code=$?
    ERR=$(cat "$SCRATCH/err")
    REASON=$(grep -m1 ERROR <<<"$ERR" || tail -n1 <<<"$ERR")
    REASON=${REASON:0:300}
    [ "$code" -ne 124 ] || REASON="gcloud did not answer within ${LIMIT:-$SSH_S} s"
    return "$code"
}

# logged_out: what gcloud said last means that nobody is logged in, which no waiting mends.
logged_out() {
    [[ $ERR == *'active account'* || $ERR == *'gcloud auth login'* ]]
}

# patiently WORD...: do it; and with --patient up to ten times, POLL_S apart, where gcloud fails for a reason that may pass.
patiently() {
    local number
    for ((number = 1; number <= 10; number++)); do
        "$@" && return
        [ -n "${OPT[patient]:-}" ] && ! logged_out && [[ $ERR != *PERMISSION_DENIED* && $ERR != *INVALID_ARGUMENT* ]] || return 1
        say "gcloud: $REASON"
        [ "$number" -eq 10 ] || sleep "$POLL_S"
    done
    return 1
}

# storage WORD...: on the bucket; a refusal names it.
storage() {
    try cloud storage "$@" || die 3 "BUCKET=$BUCKET: ${REASON:-gcloud storage $1 failed}; create the bucket, or grant this account roles/storage.objectAdmin on it"
}

# put TEXT OBJECT: write a small object below HOME_URL.
put() {
    printf '%s\n' "$1" >"$SCRATCH/object"
    [ -z "$DRY_RUN" ] || printf '# object: %s\n' "${1//$'\n'/; }" >&3
    storage cp "$SCRATCH/object" "$HOME_URL/$2"
}

# new_secret: letters that nobody can guess.
new_secret() {
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

# need_secret: the bucket has what the processes of NAME know each other by. It is made once: machines that are replaced take it too.
need_secret() {
    local code=0
    ask_object secret || code=$?
    [ "$code" -ne 2 ] || die 3 "BUCKET=$BUCKET: $HOME_URL/secret cannot be read: ${REASON:-no answer}; run this again, or grant this account roles/storage.objectAdmin on the bucket"
    OUT=''
    [ "$code" -eq 0 ] || put "$(new_secret)" secret
}

no_such_object() {
    [[ $ERR == *'matched no objects'* || $ERR == *'not found: 404'* ]]
}

# ask_object OBJECT: 0 and OUT = what is in it (below HOME_URL), 1 it is not there, 2 nobody knows, with REASON.
ask_object() {
    try cloud storage cat "$HOME_URL/$1" && return
    no_such_object || return 2
    return 1
}

# is_wanted: whether the bucket has a wish for a run, and OUT = it. An answer there must be: who does not know must not take it for "no".
is_wanted() {
    local code=0
    ask_object wanted || code=$?
    [ "$code" -ne 2 ] || die 3 "PROJECT=$PROJECT BUCKET=$BUCKET: whether a run is wanted cannot be read: ${REASON:-no answer}; run this again, or grant this account roles/storage.objectAdmin on the bucket"
    return "$code"
}

# wish_in TEXT: the WISH of what write_settings has written.
wish_in() {
    sed -n "s/^WISH='\(.*\)'$/\1/p" <<<"$1"
}

# forget_states: of what the workers have said of themselves in the bucket nothing is left. Those that run say it again.
forget_states() {
    try cloud storage rm "$HOME_URL/workers/*/state" || no_such_object
}

# ask_state: STATE = what the queued resource is, ABSENT, or UNKNOWN with REASON.
ask_state() {
    if try tpus queued-resources describe "$NAME" --format='value(state.state)'; then
        STATE=${OUT##*$'\n'}
    elif [[ $ERR == *NOT_FOUND* ]]; then
        STATE=ABSENT
    else
        STATE=UNKNOWN
    fi
}

answered() {
    ask_state
    [ "$STATE" != UNKNOWN ]
}

# need_answer: ask_state, and an answer there must be.
need_answer() {
    patiently answered || die 3 "PROJECT=$PROJECT ZONE=$ZONE: $REASON; check both, and gcloud auth login"
}

# remove_request: the queued resource with all its nodes; 1 and REASON if it stays.
remove_request() {
    LIMIT=1800 try tpus queued-resources delete "$NAME" --force || [[ $ERR == *NOT_FOUND* ]]
}

# need_active: the machines are there.
need_active() {
    need_answer
    [ -z "$DRY_RUN" ] || return 0
    case $STATE in
    ACTIVE) ;;
    ABSENT) die 3 "NAME=$NAME: there is no such queued resource; tpu/create makes it" ;;
    *) die 3 "NAME=$NAME: the queued resource is $STATE, not ACTIVE; wait for tpu/create, or let tpu/babysit make it anew" ;;
    esac
}

nodes() {
    local slice
    [ "$NUM_SLICES" -gt 1 ] || { echo "$NAME" && return; }
    for ((slice = 0; slice < NUM_SLICES; slice++)); do echo "$NAME-$slice"; done
}

# worker_ids: SLICE-WORKER of every machine there should be.
worker_ids() {
    local slice worker
    for ((slice = 0; slice < NUM_SLICES; slice++)); do
        for ((worker = 0; worker < HOSTS; worker++)); do echo "$slice-$worker"; done
    done
}

on_node() { # NODE WORKER COMMAND
    tpus tpu-vm ssh "$1" --worker="$2" --command="$3"
}

# on_workers COMMAND: on all machines of all slices at once; ANSWERS = the lines they begin with "lbopt".
on_workers() {
    local node pids=() pid code=0
    rm -f "$SCRATCH"/node.*
    for node in $(nodes); do
        if [ -n "$DRY_RUN" ]; then
            on_node "$node" all "$1"
        else
            on_node "$node" all "$1" >"$SCRATCH/node.$node" 2>"$SCRATCH/node.$node.err" &
            pids+=($!)
        fi
    done
    for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
    # gcloud may put words of its own before a line, so look for ours within.
    ANSWERS=$(cat "$SCRATCH"/node.* 2>/dev/null | grep -oE 'lbopt [0-9]+-[0-9]+ .*' || true)
    REASON=$(cat "$SCRATCH"/node.*.err 2>/dev/null | grep -E 'ERROR|ssh:|denied|refused|timed out' | head -n1 || true)
    return "$code"
}

# silent: the workers that ANSWERS lacks, each on a line.
silent() {
    local id
    for id in $(worker_ids); do
        grep -q "^lbopt $id " <<<"$ANSWERS" || echo "$id"
    done
}

# name_of ID: how a worker is named to a human.
name_of() {
    if [ "$NUM_SLICES" -gt 1 ]; then
        echo "worker ${1#*-} of $HOSTS in slice ${1%-*} of $NUM_SLICES (counted from 0)"
    else
        echo "worker ${1#*-} of $HOSTS (counted from 0)"
    fi
}

# ask_workers: STATES[ID] = what each worker's keep does; a worker that does not answer keeps the bucket's word, marked "silent".
ask_workers() {
    local id line
    declare -gA STATES=()
    on_workers "$(worker_command report)" || true
    for id in $(worker_ids); do
        line=$(grep -m1 "^lbopt $id state " <<<"$ANSWERS" || true)
        STATES[$id]=${line#"lbopt $id state "}
        [ -z "$line" ] && [ -z "$DRY_RUN" ] || continue
        ask_object "workers/$id/state" || OUT=''
        STATES[$id]="silent; in the bucket: ${OUT:-nothing}"
    done
}

# worker_command SCRIPT WORD...: the command line that runs tpu/worker/SCRIPT there, as root like the startup script:
# what one of two users leaves behind (libtpu's lock file, /tmp) would stand in the other's way.
worker_command() {
    # shellcheck disable=SC2016  # expanded there, not here
    printf 'sudo -n "${LBOPT_ROOT:-/var/lib/lbopt}/source/tpu/worker/%s"' "$1"
    shift
    [ $# -eq 0 ] || printf ' %q' "$@"
}
