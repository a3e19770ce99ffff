# Calls of gcloud. Every call has a time limit, and its output is reported in one line.
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

# logged_out: whether gcloud's last error is that nobody is logged in, which waiting does not mend.
logged_out() {
    [[ $ERR == *'active account'* || $ERR == *'gcloud auth login'* ]]
}

# patiently WORD...: run a command of this file; with --patient repeat it up to ten times, POLL_S
# apart, if gcloud fails for a reason that may pass.
patiently() {
    local number
    for ((number = 1; number <= 10; number++)); do
        "$@" && return
        [ -n "${OPT[patient]:-}" ] && ! logged_out || return 1
        [[ $ERR != *PERMISSION_DENIED* && $ERR != *INVALID_ARGUMENT* ]] || return 1
        say "gcloud: $REASON"
        [ "$number" -eq 10 ] || sleep "$POLL_S"
    done
    return 1
}

# storage WORD...: run gcloud storage; a failure ends the script and names the bucket.
storage() {
    try cloud storage "$@" ||
        die 3 "BUCKET=$BUCKET: ${REASON:-gcloud storage $1 failed}; create the bucket," \
            "or grant this account roles/storage.objectAdmin on it"
}

# put TEXT OBJECT: write a small object below HOME_URL.
put() {
    printf '%s\n' "$1" >"$SCRATCH/object"
    [ -z "$DRY_RUN" ] || printf '# object: %s\n' "${1//$'\n'/; }" >&3
    storage cp "$SCRATCH/object" "$HOME_URL/$2"
}

# new_secret: print 64 random hexadecimal digits.
new_secret() {
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

# need_secret: put the secret by which the processes of NAME authenticate each other into the
# bucket, if it is not there. It is written once, because new machines must have the same secret.
need_secret() {
    local code=0
    ask_object secret || code=$?
    [ "$code" -ne 2 ] ||
        die 3 "BUCKET=$BUCKET: $HOME_URL/secret cannot be read: ${REASON:-no answer};" \
            "run this again, or grant this account roles/storage.objectAdmin on the bucket"
    OUT=''
    [ "$code" -eq 0 ] || put "$(new_secret)" secret
}

no_such_object() {
    [[ $ERR == *'matched no objects'* || $ERR == *'not found: 404'* ]]
}

# ask_object OBJECT: read an object below HOME_URL. 0: OUT = its text; 1: it does not exist;
# 2: gcloud failed with REASON.
ask_object() {
    try cloud storage cat "$HOME_URL/$1" && return
    no_such_object || return 2
    return 1
}

# is_wanted: whether the bucket has a wish for a run; OUT = the wish. If gcloud fails, the script
# ends: a failure must not be taken for "no".
is_wanted() {
    local code=0
    ask_object wanted || code=$?
    [ "$code" -ne 2 ] ||
        die 3 "PROJECT=$PROJECT BUCKET=$BUCKET: whether a run is wanted cannot be read:" \
            "${REASON:-no answer}; run this again, or grant this account" \
            "roles/storage.objectAdmin on the bucket"
    return "$code"
}

# wish_in TEXT: print the WISH in TEXT, which write_settings has written.
wish_in() {
    sed -n "s/^WISH='\(.*\)'$/\1/p" <<<"$1"
}

# forget_states: remove the workers' states from the bucket. Running workers write theirs again.
forget_states() {
    try cloud storage rm "$HOME_URL/workers/*/state" || no_such_object
}

# ask_state: STATE = the state of the queued resource, ABSENT, or UNKNOWN with REASON.
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

# need_answer: ask_state; end the script if gcloud fails.
need_answer() {
    patiently answered ||
        die 3 "PROJECT=$PROJECT ZONE=$ZONE: $REASON; check both, and gcloud auth login"
}

# remove_request: delete the queued resource with all its nodes; 1 and REASON if that fails.
remove_request() {
    LIMIT=1800 try tpus queued-resources delete "$NAME" --force || [[ $ERR == *NOT_FOUND* ]]
}

# need_active: end the script unless the queued resource is ACTIVE.
need_active() {
    need_answer
    [ -z "$DRY_RUN" ] || return 0
    case $STATE in
    ACTIVE) ;;
    ABSENT) die 3 "NAME=$NAME: there is no such queued resource; tpu/create makes it" ;;
    *)
        die 3 "NAME=$NAME: the queued resource is $STATE, not ACTIVE;" \
            "wait for tpu/create, or let tpu/babysit make it anew"
        ;;
    esac
}

nodes() {
    local slice
    [ "$NUM_SLICES" -gt 1 ] || { echo "$NAME" && return; }
    for ((slice = 0; slice < NUM_SLICES; slice++)); do echo "$NAME-$slice"; done
}

# worker_ids: print SLICE-WORKER of every machine of the run.
worker_ids() {
    local slice worker
    for ((slice = 0; slice < NUM_SLICES; slice++)); do
        for ((worker = 0; worker < HOSTS; worker++)); do echo "$slice-$worker"; done
    done
}

on_node() { # NODE WORKER COMMAND
    tpus tpu-vm ssh "$1" --worker="$2" --command="$3"
}

# on_workers COMMAND: run it on all machines of all slices at once; ANSWERS = their output lines
# that begin with "lbopt".
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
    # gcloud may put its own words before a line of the worker.
    ANSWERS=$(cat "$SCRATCH"/node.* 2>/dev/null | grep -oE 'lbopt [0-9]+-[0-9]+ .*' || true)
    REASON=$(cat "$SCRATCH"/node.*.err 2>/dev/null |
        grep -E 'ERROR|ssh:|denied|refused|timed out' | head -n1 || true)
    return "$code"
}

# silent: print the IDs of the workers that are missing in ANSWERS, one a line.
silent() {
    local id
    for id in $(worker_ids); do
        grep -q "^lbopt $id " <<<"$ANSWERS" || echo "$id"
    done
}

# name_of ID: print a worker's name for messages.
name_of() {
    if [ "$NUM_SLICES" -gt 1 ]; then
        echo "worker ${1#*-} of $HOSTS in slice ${1%-*} of $NUM_SLICES (counted from 0)"
    else
        echo "worker ${1#*-} of $HOSTS (counted from 0)"
    fi
}

# ask_workers: STATES[ID] = the state of each worker's keep; for a worker that does not answer, its
# state in the bucket, marked "silent".
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

# worker_command SCRIPT WORD...: print the command line that runs tpu/worker/SCRIPT on a worker. It
# runs as root like the startup script: files of another user (libtpu's lock, /tmp) would block it.
worker_command() {
    # shellcheck disable=SC2016  # expanded there, not here
    printf 'sudo -n "${LBOPT_ROOT:-/var/lib/lbopt}/source/tpu/worker/%s"' "$1"
    shift
    [ $# -eq 0 ] || printf ' %q' "$@"
}
