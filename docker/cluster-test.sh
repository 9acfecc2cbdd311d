#!/bin/bash
# Build the image of the cluster and run tests/cluster, on two clusters of three workers side by side: make cluster-test.
#
#   docker/cluster-test.sh PYTHON [WORDS FOR PYTEST...]     # --all: what is marked thorough, too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1 target=essential
shift
# Tests that are named may be any.
[[ " $* " != *" --all "* && "$*" != *::* ]] || target=cluster
[[ " $*" == *" tests/cluster"* ]] || set -- tests/cluster "$@"

SECONDS=0
rm -f build/cluster-faults.md
started=$(docker/engine.sh) fetching=
end() {
    [ -z "$fetching" ] || kill "$fetching" 2> /dev/null || true
    # Whatever ended this script: no host of the cluster stays.
    docker ps --all --quiet --filter label=hvdkit.cluster-test | xargs -r docker rm --force > /dev/null || true
    [ -z "$started" ] || kill "$started"
}
trap end EXIT

echo "cluster-test: fetching wheels into docker/wheels"
PYTHON=$python docker/wheels.sh &
fetching=$!
base=${BASE_IMAGE:-debian:bookworm-slim} build=${BASE_IMAGE:-debian:bookworm-slim}
if ! docker image inspect "$base" > /dev/null 2>&1 && ! docker pull --quiet "$base" > /dev/null 2>&1; then
    echo "cluster-test: $base cannot be pulled; making a base image from Debian's packages"
    base=hvdkit-base:runtime build=hvdkit-base:build
    docker image inspect "$base" "$build" > /dev/null 2>&1 || docker/base-image.sh
fi
wait "$fetching"
fetching=
echo "cluster-test: building the image hvdkit:$target ($SECONDS s so far)"
# BuildKit copies between stages in a fifth of the time. A newer docker without buildx lacks it, Debian's has its own.
builder=(docker)
for one in docker /usr/bin/docker; do
    if echo "FROM scratch" | DOCKER_BUILDKIT=1 "$one" build --quiet - > /dev/null 2>&1; then
        builder=(env DOCKER_BUILDKIT=1 "$one")
        break
    fi
done
log=$(mktemp)
"${builder[@]}" build -f docker/Dockerfile --build-arg BASE_IMAGE="$base" --build-arg BUILD_IMAGE="$build" --target "$target" \
    -t "hvdkit:$target" . > "$log" 2>&1 || { tail -n 40 "$log" >&2; exit 1; }
rm "$log"
echo "cluster-test: the image is $(docker image inspect --format '{{.Size}}' "hvdkit:$target" | numfmt --to=iec) ($SECONDS s so far)"

status=0
# The tests of a file stay together: those of faults share a report.
"$python" -m pytest -q --numprocesses=2 --dist=loadfile --durations=10 --cluster "hvdkit:$target" "$@" || status=$?
[ ! -e build/cluster-faults.md ] || cat build/cluster-faults.md
echo "cluster-test: took $((SECONDS / 60)) min $((SECONDS % 60)) s"
exit "$status"
