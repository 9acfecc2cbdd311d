#!/bin/bash
# Every test there is, and tests/REPORT.md about it.
#
#   tests/suite/all.sh PYTHON WORKERS
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$1 workers=$2
rm -rf build/tests
failed=()
part() { # NAME COMMAND...
    local name=$1
    shift
    echo "test-all: $name"
    "$@" || failed+=("$name")
}
apt() { # PROGRAM PACKAGE: what tests for other processors need
    command -v "$1" > /dev/null || { [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq --yes "$2"; } > /dev/null ||
        echo "test-all: no $1; its tests are skipped"
}

apt aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
apt qemu-aarch64 qemu-user
part tests "$python" -m pytest -q -n "$workers" --all --tell build/tests/tests.json
part "200 random faults" "$python" -m tests.faults.report --count 200 --report build/tests/faults
part "cluster tests" docker/cluster-test.sh "$python" --all --tell "$PWD/build/tests/cluster.json"
"$python" -m tests.suite.report build/tests || failed+=("report")
[ ${#failed[@]} = 0 ] || { printf 'test-all: failed: %s\n' "${failed[@]}" >&2; exit 1; }
