# Sourced by submit and xpk, in place of tpu/common.sh.
# shellcheck shell=bash

# shellcheck source=tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
SCRIPT=gke/$SCRIPT

load_gke_settings() {
    load_settings
    [ -n "$IMAGE" ] ||
        die 2 "IMAGE is missing in $ENV_FILE:" \
            "the image you built from tpu/gke/Dockerfile and pushed, with its tag"
    must IMAGE '[a-z0-9][A-Za-z0-9._/:@-]+' "write REGISTRY/NAME:TAG"
    must WORKDIR 'gs://.*' "write gs://...: pods share no folder"
    must CLUSTER '[a-z0-9-]*' "write the cluster's name" # xpk puts it into shell commands
    must RESERVATION '[a-z0-9-]*' "write the reservation's name"
    [ "$CAPACITY" != reserved ] || [ -n "$RESERVATION" ] ||
        die 2 "RESERVATION is missing in $ENV_FILE:" \
            "CAPACITY=reserved on GKE needs the reservation's name"
    local topology=$PLAN
    [ "$NUM_SLICES" -eq 1 ] && [ "$PLAN" != - ] || topology=''
    # The name of a pod has at most 63 letters, JobSet's own among them.
    # shellcheck disable=SC2034  # the sourcing scripts read these
    PREFLIGHT_NAME=${NAME:0:30}-preflight PREFLIGHT_WORDS=(tpu/gke/preflight
        $((HOSTS * NUM_SLICES)) $((DEVICES * NUM_SLICES)) "$PREFLIGHT_S" "$topology")
}
