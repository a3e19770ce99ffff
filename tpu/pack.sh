# Sourced by create and setup: sends the checkout to the bucket. A machine fetches it at each boot.
# Beside a copy of these scripts (lbopt tpu --copy) it is the checkout of the user's project.
# shellcheck shell=bash

# pack [DIRTY]: send the committed files, or with DIRTY all files that git does not ignore.
pack() {
    local archive=$SCRATCH/source.tar.gz said changed
    # A new machine takes the source from the bucket: it must be the source of the present run.
    if is_wanted && [ -z "$DRY_RUN" ]; then
        die 2 "NAME=$NAME: a run is wanted, with the source it began with; tpu/stop first"
    fi
    [ -f "$TPU/requirements.txt" ] || [ -f "$ROOT/pyproject.toml" ] ||
        die 2 "$TPU: these scripts were installed with lbopt and have no project to send;" \
            "lbopt tpu --copy=FOLDER copies them into yours"
    said=$(git -C "$ROOT" rev-parse --verify --quiet HEAD 2>&1 >/dev/null) ||
        die 3 "$ROOT is not a git checkout with a commit${said:+ (${said%%$'\n'*})};" \
            "clone the repository, or commit your project's files:" \
            "git init && git add --all && git commit --message=start"

    if [ -n "${1:-}" ]; then
        if [ -n "$DRY_RUN" ]; then
            local list='git ls-files -z --cached --others --exclude-standard'
            local tar='tar --create --gzip --null --files-from=- --file=source.tar.gz'
            show sh -c "cd ${ROOT@Q} && $list | $tar"
        else
            # Files that were deleted but are still known to git are left out.
            (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard --deduplicate |
                tar --create --gzip --null --ignore-failed-read --files-from=- \
                    --file="$archive" 2>/dev/null) || die 1 "tar could not pack $ROOT"
        fi
    else
        changed=$(git -C "$ROOT" status --porcelain)
        changed=${changed%%$'\n'*}
        [ -z "$changed" ] ||
            die 2 "$ROOT has changes that are not committed (the first: ${changed:3}), which the" \
                "machines would not get; name data and runs in .gitignore, and commit the rest," \
                "or send it too: --dirty"
        do_it git -C "$ROOT" archive --format=tar.gz --output="$archive" HEAD
    fi

    storage cp "$archive" "$HOME_URL/source.tar.gz"
    storage cp "$TPU/worker/startup.sh" "$HOME_URL/startup.sh"
    put "$EXTRAS" extras
    put "$DATA_DIR" data
}
