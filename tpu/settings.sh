# Reads and checks settings. A settings file is data: nothing in it is run.
# shellcheck shell=bash disable=SC2034,SC2153  # the sourcing scripts read the variables

REQUIRED=(PROJECT ZONE NAME ACCELERATOR CAPACITY BUCKET COMMAND)
declare -A DEFAULTS=(
    [WORKDIR]='' [NUM_SLICES]=1 [RUNTIME]='' [EXTRAS]='tpu,gcs,data' [DATA_DIR]=''
    [SERVICE_ACCOUNT]='' [NETWORK]='' [SUBNETWORK]='' [FIREWALL]=check [RESERVATION]=''
    [MAX_FAILURES]=3 [MAX_PREEMPTIONS]=100 [MAX_LOST_PEERS]=10 [MAX_CREATE_TRIES]=20
    [CREATE_WAIT_S]=86400 [RETRY_S]=60 [POLL_S]=60 [RESTART_S]=10 [HEALTHY_S]=3600 [SYNC_S]=60
    [STOP_S]=300 [SSH_S]=300 [SETUP_S]=1800 [PREFLIGHT_S]=120 [IMAGE]='' [CLUSTER]=''
)
# The settings that keep needs on a worker. WISH identifies a run among those of the same NAME.
WANTED=(WISH COMMAND WORKDIR MAX_FAILURES MAX_PREEMPTIONS MAX_LOST_PEERS)
WANTED+=(RESTART_S HEALTHY_S SYNC_S STOP_S)

# read_settings FILE NAME...: set these shell variables from lines NAME=VALUE. Other names are
# refused.
read_settings() {
    local file=$1 line name rest number=0 end='[[:space:]]*([[:space:]]#.*)?$'
    local single="^'([^']*)'$end" double="^\"([^\"]*)\"$end" plain="^([^[:space:]'\"]*)$end"
    shift
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1)) line=${line%$'\r'}
        [[ $line =~ ^[[:space:]]*(#.*)?$ ]] && continue
        [[ $line =~ ^([A-Z_]+)=(.*)$ ]] ||
            die 2 "$file line $number: '$line' is not a setting;" \
                "write NAME=VALUE, e.g. ZONE=us-central2-b"
        name=${BASH_REMATCH[1]} rest=${BASH_REMATCH[2]}
        [[ " $* " == *" $name "* ]] ||
            die 2 "$file line $number: $name is no setting of ours; tpu/env.example has them all"
        [[ $rest =~ $single || $rest =~ $double || $rest =~ $plain ]] ||
            die 2 "$file line $number: $name=$rest cannot be read;" \
                "put single quotes around the value"
        printf -v "$name" %s "${BASH_REMATCH[1]}"
    done <"$file"
}

# write_settings NAME...: print lines for read_settings. No value has both kinds of quotes, because
# read_settings accepts only one kind inside the other.
write_settings() {
    local name
    for name in "$@"; do
        case ${!name} in
        *\'*) printf '%s="%s"\n' "$name" "${!name}" ;;
        *) printf "%s='%s'\n" "$name" "${!name}" ;;
        esac
    done
}

# must NAME PATTERN FIX: end the script unless the whole value matches.
must() {
    [[ ${!1} =~ ^($2)$ ]] || die 2 "$1='${!1}' in $ENV_FILE: ${*:3}"
}

load_settings() {
    local name
    [ -f "$ENV_FILE" ] ||
        die 2 "--env=$ENV_FILE: there is no such file; cp tpu/env.example tpu/env and fill it in"
    for name in "${REQUIRED[@]}"; do printf -v "$name" %s ''; done
    for name in "${!DEFAULTS[@]}"; do printf -v "$name" %s "${DEFAULTS[$name]}"; done
    read_settings "$ENV_FILE" "${REQUIRED[@]}" "${!DEFAULTS[@]}"
    for name in "${REQUIRED[@]}"; do
        [ -n "${!name}" ] ||
            die 2 "$name is missing in $ENV_FILE: add a line $name=..., as in tpu/env.example"
    done
    WORKDIR=${WORKDIR:-${BUCKET%/}/runs/$NAME}
    check_settings
    BUCKET=${BUCKET%/}
    HOME_URL=$BUCKET/lbopt/$NAME
}

# calls_program: whether COMMAND runs lbopt, python or a file of the checkout.
calls_program() {
    local word
    for word in $COMMAND; do
        [[ ! ${word##*/} =~ ^(lbopt|python[0-9.]*)$ ]] || return 0
        [[ $word == *[*?[]* || ! -f $ROOT/$word ]] || return 0
    done
    return 1
}

check_settings() {
    local name
    must PROJECT '[a-z0-9.:-]*[a-z][a-z0-9.:-]+' "write the project's ID, e.g. my-project-123"
    must ZONE '[a-z]+-[a-z]+[0-9]+-[a-z]' "write a zone, e.g. us-central2-b"
    must NAME '[a-z]([a-z0-9-]{0,38}[a-z0-9])?' \
        "use up to 40 small letters, digits and dashes, a letter first"
    must CAPACITY 'spot|on-demand|reserved' "write spot, on-demand or reserved"
    must FIREWALL 'check|skip' "write check or skip"
    must NUM_SLICES '[1-9][0-9]{0,2}' "write how many slices, from 1 to 999"
    must EXTRAS '[a-z]+(,[a-z]+)*' "write names of extras with commas, e.g. tpu,gcs"
    must BUCKET 'gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/[A-Za-z0-9._/-]+)?/?' \
        "write gs:// and the bucket's name, e.g. gs://my-bucket"
    must DATA_DIR '|(gs://|disk:)[a-z0-9][[:alnum:]._-]+(/[[:alnum:]._/=@:+%~-]+)?/?|/[[:alnum:]._/=@:+%~-]+' \
        "write gs://BUCKET/FOLDER, disk:NAME/FOLDER or the path of a folder on all machines"
    DATA_DIR=${DATA_DIR%/}
    must WORKDIR '(gs://[a-z0-9]|/)[[:alnum:]._/=@:+,%~-]+' \
        "write gs://... or the path of a folder that all workers share;" \
        "letters, digits and . _ / = @ : + , % ~ -"
    must COMMAND '[^;&|<>`[:cntrl:]]*' \
        "one command without ; & | < > and backquotes;" \
        "put more into a script of the checkout and name that"
    # shellcheck disable=SC2016  # these characters, not an expansion
    [[ $COMMAND != *'$('* && $COMMAND != -* ]] ||
        must COMMAND '' "one command without \$(...); put more into a script and name that"
    bash -n -c "$COMMAND" 2>/dev/null ||
        must COMMAND '' "the shell cannot read it; close its quotes and brackets"
    calls_program ||
        must COMMAND '' "it calls neither lbopt nor python nor a script of the checkout;" \
            "e.g. lbopt train --config=FILE --workdir=\$WORKDIR"
    for name in "${!DEFAULTS[@]}"; do
        [[ $name != MAX_* && $name != *_S ]] ||
            must "$name" '0|[1-9][0-9]{0,7}' "write a whole number"
    done
    look_up_accelerator
}

# look_up_accelerator: set CHIPS DEVICES HOSTS PLAN GKE_* from the table, and RUNTIME if it is empty.
look_up_accelerator() {
    local key generation runtime asked=${ACCELERATOR,,} near='' same='' all='' fix
    while IFS=$'\t' read -r key generation CHIPS DEVICES HOSTS runtime PLAN \
        GKE_MACHINE GKE_ACCELERATOR GKE_TOPOLOGY; do
        if [ "$key" = "$ACCELERATOR" ]; then
            RUNTIME=${RUNTIME:-$runtime}
            return
        fi
        # Also known by its generation (v5e-64) and by its topology (v5e:8x8).
        case $asked in "$key" | "$generation-${key##*-}" | "$PLAN") near=$key ;; esac
        [[ $asked != "$generation"[-:]* && $asked != "${key%-*}"[-:]* ]] || same+=" $key"
        [[ " $all " == *" ${key%-*}-N "* ]] || all+=" ${key%-*}-N"
    done < <(grep -v '^#' "$TPU/accelerators.tsv" | tail -n +2)

    fix="write one of those or add a line to the table"
    if [ -n "$near" ]; then
        fix="did you mean $near?"
        same=''
    elif [ -n "$same" ]; then
        same=", which has$same"
    else
        same=", which has$all"
    fi
    die 2 "ACCELERATOR='$ACCELERATOR' in $ENV_FILE: not in tpu/accelerators.tsv$same; $fix"
}
