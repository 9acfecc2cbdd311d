#!/bin/bash
# Build the image of the cluster and run tests/cluster on three workers: make cluster-test.
#
#   docker/cluster-test.sh PYTHON [WORDS FOR PYTEST...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
shift

SECONDS=0
rm -f build/cluster-faults.md
started=$(docker/engine.sh)
end() {
    # Whatever ended this script: no host of the cluster stays.
    docker ps --all --quiet --filter label=com.docker.compose.project=hvdkit-tests | xargs -r docker rm --force > /dev/null || true
    [ -z "$started" ] || kill "$started"
}
trap end EXIT

base=${BASE_IMAGE:-debian:bookworm-slim} build=${BASE_IMAGE:-debian:bookworm-slim}
if ! docker image inspect "$base" > /dev/null 2>&1 && ! docker pull --quiet "$base" > /dev/null 2>&1; then
    echo "cluster-test: $base cannot be pulled; making a base image from Debian's packages"
    base=hvdkit-base:runtime build=hvdkit-base:build
    docker image inspect "$base" "$build" > /dev/null 2>&1 || docker/base-image.sh
fi
echo "cluster-test: fetching wheels, building the image hvdkit:cluster ($SECONDS s so far)"
PYTHON=$python docker/wheels.sh
log=$(mktemp)
docker build -f docker/Dockerfile --build-arg BASE_IMAGE="$base" --build-arg BUILD_IMAGE="$build" --target cluster \
    -t hvdkit:cluster . > "$log" 2>&1 || { tail -n 40 "$log" >&2; exit 1; }
rm "$log"
echo "cluster-test: the image is $(docker image inspect --format '{{.Size}}' hvdkit:cluster | numfmt --to=iec) ($SECONDS s so far)"

status=0
"$python" -m pytest -q --durations=10 tests/cluster --cluster hvdkit:cluster "$@" || status=$?
[ ! -e build/cluster-faults.md ] || cat build/cluster-faults.md
echo "cluster-test: took $((SECONDS / 60)) min $((SECONDS % 60)) s"
exit "$status"
