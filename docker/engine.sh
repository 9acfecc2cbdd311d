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

if ! { have dockerd && have debootstrap && { docker compose version > /dev/null 2>&1 || have docker-compose; }; }; then
    [ "$(id -u)" = 0 ] && have apt-get || fail "it is not installed, and only root can install Debian's"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes docker.io docker-compose debootstrap; } \
        > /dev/null || fail "Debian's docker.io could not be installed"
fi
docker info > /dev/null 2>&1 && exit 0
[ "$(id -u)" = 0 ] || fail "none runs, and only root can start one"
log=$(mktemp)
setsid dockerd > "$log" 2>&1 < /dev/null &
started=$!
for _ in $(seq 60); do
    if docker info > /dev/null 2>&1; then
        echo "$started"
        exit 0
    fi
    kill -0 "$started" 2> /dev/null || fail "dockerd ended: $(tail -n 1 "$log")"
    sleep 0.5
done
kill "$started"
fail "dockerd did not answer within 30 s: $(tail -n 1 "$log")"
