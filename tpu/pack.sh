# Sourced by create and setup: sends the checkout to the bucket, where every machine fetches it on every boot.
# shellcheck shell=bash

# pack [DIRTY]: what is committed, or with DIRTY what lies there, without what git ignores.
pack() {
    local archive=$SCRATCH/source.tar.gz
    # A machine that is replaced takes what the bucket has: that must be what the others run.
    if is_wanted && [ -z "$DRY_RUN" ]; then
        die 2 "NAME=$NAME: a run is wanted, with the source it began with; tpu/stop first"
    fi
    git -C "$ROOT" rev-parse --verify --quiet HEAD >/dev/null || die 3 "$ROOT is not a git checkout with a commit; clone the repository"
    if [ -n "${1:-}" ]; then
        if [ -n "$DRY_RUN" ]; then
            show sh -c "cd ${ROOT@Q} && git ls-files -z --cached --others --exclude-standard | tar --create --gzip --null --files-from=- --file=source.tar.gz"
        else
            # A file that git knows and that was deleted is no reason to stop: it is simply not sent.
            (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard --deduplicate |
                tar --create --gzip --null --ignore-failed-read --files-from=- --file="$archive" 2>/dev/null) || die 1 "tar could not pack $ROOT"
        fi
    else
        [ -z "$(git -C "$ROOT" status --porcelain)" ] ||
            die 2 "$ROOT has changes that are not committed, which the machines would not get; commit them, or send them too: --dirty"
        do_it git -C "$ROOT" archive --format=tar.gz --output="$archive" HEAD
    fi
    storage cp "$archive" "$HOME_URL/source.tar.gz"
    storage cp "$TPU/worker/startup.sh" "$HOME_URL/startup.sh"
    put "$EXTRAS" extras
}
