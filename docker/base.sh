#!/bin/sh
# Makes the Dockerfile's base image where no registry is reachable: Debian with its own Python, by debootstrap.
#
#     docker/base.sh [IMAGE]      needs root; DEBIAN_MIRROR is debootstrap's mirror
#
# Prints `kept`, `pulled` or `made`.
set -eu

IMAGE=${1:-python:3.11-slim-bookworm}
PULL_S=60

case "$IMAGE" in
*3.11*bookworm*) suite=bookworm ;;
*) echo "error: no Debian release is known to have the Python of $IMAGE; use a 3.11 bookworm image" >&2 && exit 78 ;;
esac

if docker image inspect "$IMAGE" >/dev/null 2>&1; then
    echo kept && exit 0
fi
if timeout "$PULL_S" docker pull --quiet "$IMAGE" >/dev/null 2>&1; then
    echo pulled && exit 0
fi

folder=$(mktemp -d)
root=$folder/root
clean() {
    umount --lazy "$root/proc" "$root/sys" 2>/dev/null || true
    rm -rf --one-file-system "$folder"
}
trap clean EXIT
trap 'exit 130' INT TERM HUP

if ! debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
    "$suite" "$root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$folder/log" 2>&1; then
    tail -n 5 "$folder/log" >&2
    echo "error: debootstrap failed; it needs root and a Debian mirror (DEBIAN_MIRROR)" >&2
    exit 1
fi
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
    "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/info/* "$root"/usr/share/locale/*
tar -C "$root" --one-file-system -c . | docker import --change 'CMD ["python3"]' - "$IMAGE" >/dev/null
echo made
