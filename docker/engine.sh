#!/bin/bash
# Have a Docker engine run: the one that does, else Debian's, installed and started here. Prints the number of the
# dockerd that it started, if it did, so that the caller can end it; fails with the reason where there can be none.
set -euo pipefail

fail() {
    echo "engine.sh: no Docker engine: $1" >&2
    exit 1
}

have() {
    command -v "$1" > /dev/null
}

compose() {
    docker compose version > /dev/null 2>&1 || have docker-compose
}

runs() {
    have docker && docker info > /dev/null 2>&1
}

runs && compose && exit 0
missing=()
have docker && { runs || have dockerd; } || missing+=(docker.io)
compose || missing+=(docker-compose)
if [ ${#missing[@]} != 0 ]; then
    [ "$(id -u)" = 0 ] && have apt-get || fail "there is no ${missing[*]}, and only root can install Debian's"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-remove "${missing[@]}"; } \
        > /dev/null || fail "Debian's ${missing[*]} could not be installed"
fi
runs && exit 0
[ "$(id -u)" = 0 ] || fail "none runs, and only root can start one"
log=$(mktemp)
setsid dockerd > "$log" 2>&1 < /dev/null &
started=$!
for _ in $(seq 60); do
    if runs; then
        echo "$started"
        exit 0
    fi
    kill -0 "$started" 2> /dev/null || fail "dockerd ended: $(tail -n 1 "$log")"
    sleep 0.5
done
kill "$started"
fail "dockerd did not answer within 30 s: $(tail -n 1 "$log")"
