#!/usr/bin/env bash
# Runs at every boot of a TPU machine (startup-script metadata), so that a new machine resumes the
# run: it fetches the source from the bucket, installs it, and starts the run if the bucket has a
# wish for one. With the argument "setup" (tpu/setup) it starts nothing. It arrives without the
# checkout and uses no other file before it has fetched the source.
set -euo pipefail
umask 022
root=${LBOPT_ROOT:-/var/lib/lbopt}
mode=${1:-boot}
export HOME=${HOME:-/root} PATH=$PATH:/snap/bin
mkdir -p "$root/run"
# Record the end of the boot, also if it fails: until then the worker counts as booting.
booted() {
    echo "${BOOT_ID:-$(cat /proc/sys/kernel/random/boot_id)}" >"$root/booted"
}
[ "$mode" != boot ] || trap booted EXIT
exec 8>"$root/setup.lock"
flock --timeout 1800 8

attribute() {
    curl --silent --fail --max-time 10 --header 'Metadata-Flavor: Google' \
        "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

fail() {
    echo "lbopt $id setup failed: $*"
    exit 3
}

# fetch OBJECT FILE: copy an object from the bucket; a new machine may have no network at first.
fetch() {
    local try
    for try in 1 2 3 4 5; do
        timeout 300 gcloud storage cp "$home/$1" "$2" --quiet 2>"$root/fetch.err" && return
        sleep "$((try * ${FETCH_PAUSE_S:-5}))"
    done
    fail "$home/$1 cannot be read:" \
        "$(grep -m1 ERROR "$root/fetch.err" || tail -n1 "$root/fetch.err");" \
        "grant the machines' service account roles/storage.objectAdmin on the bucket"
}

# unpack ARCHIVE FOLDER: extract into FOLDER; paths that leave it are refused.
unpack() {
    local names
    names=$(tar --list --gzip --file="$1" 2>&1) ||
        fail "$home/source.tar.gz cannot be unpacked: ${names##*$'\n'}; tpu/setup sends it again"
    if grep -qE '(^/|(^|/)\.\.(/|$))' <<<"$names"; then
        fail "$home/source.tar.gz has a path that leaves its folder"
    fi
    rm -rf "$2"
    mkdir "$2"
    tar --extract --gzip --no-same-owner --file="$1" --directory="$2" ||
        fail "$home/source.tar.gz cannot be unpacked; is the disk full?"
}

id=0-0
home=$(attribute lbopt-home) ||
    fail "the metadata lbopt-home is missing; make the machines with tpu/create"
slice=$(attribute tpu-env 2>/dev/null |
    sed -n "s/^MEGASCALE_SLICE_ID: *'\{0,1\}\([0-9]*\).*/\1/p") || slice=''
worker=$(attribute agent-worker-number) || worker=0
id=${slice:-0}-$worker
echo "$id" >"$root/id"
echo "$home" >"$root/home"

fetch source.tar.gz "$root/source.tar.gz.new"
fetch extras "$root/extras"
fetch data "$root/data"
if [ ! -d "$root/source" ] || ! cmp --silent "$root/source.tar.gz.new" "$root/source.tar.gz"; then
    # A running program still reads modules and configs from the old source.
    flock --shared --nonblock "$root/run/lock" true ||
        fail "a run is going on, and the source in the bucket is another one; tpu/stop first"
    unpack "$root/source.tar.gz.new" "$root/source.new"
    rm -rf "$root/source"
    mv "$root/source.new" "$root/source"
    mv "$root/source.tar.gz.new" "$root/source.tar.gz"
fi

for try in 1 2 3; do # package archives sometimes fail
    if bash "$root/source/tpu/worker/install" "$(cat "$root/extras")" \
        >"$root/setup.log" 2>&1 8>&-; then
        break
    fi
    [ "$try" -lt 3 ] || fail "$(tail -n1 "$root/setup.log")"
    sleep "$((try * ${FETCH_PAUSE_S:-5}))"
done
reason=$(bash "$root/source/tpu/worker/mount" "$(cat "$root/data")" 2>&1 8>&-) ||
    fail "${reason##*$'\n'}"
echo "lbopt $id setup done"
if [ "$mode" = boot ]; then "$root/source/tpu/worker/start" 8>&-; fi
