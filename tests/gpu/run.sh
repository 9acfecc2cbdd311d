#!/bin/sh
# Try all of hvdkit on one GPU, in at most 8 minutes, and write one table: what ran, passed, failed, was skipped and why,
# and the figures.
#
#   tests/gpu/run.sh                              all parts; results in benchmarks/results/gpu-<card>.json and .txt
#   tests/gpu/run.sh --results FOLDER             results elsewhere
#   tests/gpu/run.sh --only build steps-1         some parts (--list names them)
#   tests/gpu/run.sh --device cpu                 without a GPU: do the parts run?
#
# Needs a Python (PYTHON, else python3) with PyTorch for CUDA, pytest and what hvdkit depends on, and a C++ compiler; no
# network, and nothing is installed but in a temporary folder. What that Python lacks is taken from wheels in the folder
# WHEELS, if that is set. Gather them where there is a network, for its version of Python:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#       --platform manylinux2014_x86_64 -d "$WHEELS" numpy ml_dtypes cloudpickle psutil pytest pytest-timeout pybind11 \
#       setuptools wheel tqdm matplotlib hypothesis
set -u
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-}
if [ -n "$WHEELS" ] && ls "$WHEELS"/*.whl > /dev/null 2>&1; then
    SITE=$(mktemp -d)
    trap 'rm -rf "$SITE"' EXIT
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl || exit 1
    PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
fi
"$PYTHON" -m tests.gpu.run "$@"
