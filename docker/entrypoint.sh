#!/bin/sh
# What a container does:
#
#     seed       makes the run when there is none, writes run file and address to /invite, and trains
#     trainer    takes a home of its own below /var/lib/atoll, waits for /invite, and trains
#     …          anything else is a command line of atoll
#
# Both end as `atoll start` ends: it replaces this shell, so signals and exit codes are its own.
set -eu

HOMES=/var/lib/atoll
INVITE=/invite
RUN=${ATOLL_RUN:-atoll}
PORT=4710

# In one step: a trainer reads the whole file or none.
publish() {
    cat >"$INVITE/.$1" && mv "$INVITE/.$1" "$INVITE/$1"
}

seed() {
    # shellcheck disable=SC2086 # the options are words
    [ -e "$ATOLL_HOME/runs/$RUN.run" ] || atoll run new "$RUN" ${ATOLL_RUN_OPTIONS:-}
    peer=$(atoll id show)
    peer=${peer%%
*}
    publish run <"$ATOLL_HOME/runs/$RUN.run"
    echo "/dns4/${ATOLL_SEED_HOST:-seed}/tcp/$PORT/p2p/$peer" | publish seed
    # shellcheck disable=SC2086
    train --run "$RUN" --name seed --port "$PORT" ${ATOLL_SEED_OPTIONS:-}
}

trainer() {
    claim_home
    until [ -s "$INVITE/run" ] && [ -s "$INVITE/seed" ]; do
        echo "waiting for the seed" && sleep 2
    done
    train --run "$INVITE/run" --seed "$(cat "$INVITE/seed")" --name "${ATOLL_NAME:-trainer}-$number"
}

# The first home that no living container holds. The lock lives as long as `atoll start`, which inherits it, so
# a replica that comes back finds an identity and a state that nobody else has: its own when it alone was gone.
claim_home() {
    number=1
    until hold "$HOMES/$number"; do
        number=$((number + 1))
    done
    ln -sfn "$HOMES/$number" "$ATOLL_HOME"
}

hold() {
    mkdir -p "$1"
    exec 9>"$1/container.lock"
    flock --nonblock 9
}

# Without port maps: what a router could map is the host's address, not the container's.
train() {
    # shellcheck disable=SC2086
    exec atoll start --plain --no-port-map --threads "${ATOLL_THREADS:-1}" ${ATOLL_START_OPTIONS:-} "$@"
}

case "${1:-}" in
seed | trainer) "$1" ;;
*) exec atoll "$@" ;;
esac
