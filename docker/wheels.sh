#!/bin/bash
# Fetch every wheel that the images need into docker/wheels, so that building them needs no package index.
#
#   docker/wheels.sh            # with the Python of PATH, or PYTHON=...
#
# Where torch comes from is pip's to know (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf); a CPU build keeps images small.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source docker/packages.env
PYTHON=${PYTHON:-python3}
fetch=("$PYTHON" -m pip download --quiet --disable-pip-version-check --dest docker/wheels --constraint constraints.txt)
# The images' Python is Debian's, whatever runs here.
debian=(--python-version 3.11 --only-binary=:all: --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64
    --platform manylinux2010_x86_64 --platform manylinux_2_5_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64)

"$PYTHON" docker/requirements.py pyproject.toml torch tensorflow-cpu mpi examples > docker/wheels/requirements.txt
"${fetch[@]}" "${debian[@]}" --requirement docker/wheels/requirements.txt setuptools wheel pybind11
# For the cluster's tests: pytest, and Horovod's source, what builds it, and what it runs with.
# shellcheck disable=SC2086 (one word a package)
"${fetch[@]}" "${debian[@]}" pytest 'cmake<4' $HOROVOD_REQUIREMENTS
"${fetch[@]}" --no-deps --no-binary horovod horovod==0.28.1
