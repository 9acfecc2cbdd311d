#!/bin/bash
# What the tests cover, in a copy of this checkout whose native part is built for gcov: build/coverage.txt.
#
#   tests/suite/coverage.sh PYTHON WORKERS [WORDS FOR PYTEST...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$1 workers=$2
shift 2
tree=$PWD/build/coverage
rm -rf "$tree"
git ls-files -z | xargs -0 cp --parents -t "$(mkdir -p "$tree" && echo "$tree")"
cd "$tree"
echo "coverage: building the native part for gcov in $tree"
HVDKIT_COVERAGE=1 "$python" setup.py --quiet build_ext --inplace > build.log 2>&1 || { tail -n 40 build.log >&2; exit 1; }

export PYTHONPATH=$tree COVERAGE_FILE=$tree/data/.coverage
mkdir data
status=0
"$python" -m coverage run -m pytest -q -n "$workers" "$@" || status=$?
"$python" -m coverage combine --quiet data
{
    echo "Python: $("$python" -m coverage report --format=total --precision=1)% of lines and branches"
    "$python" -m gcovr --root . --filter 'hvdkit/' --exclude-throw-branches --print-summary --txt gcovr.txt \
        --gcov-ignore-parse-errors suspicious_hits.warn --gcov-ignore-parse-errors negative_hits.warn build 2> gcovr.log |
        grep '^[lb]' | sed 's/^/C++: /'
    "$python" -m coverage report --precision=1
} | tee ../coverage.txt
exit "$status"
