#!/bin/sh
# pip install into /opt/hvdkit: from /wheels if docker/wheels.sh has put something there, else from pip's package index.
#
#   install.sh WORDS FOR PIP...
#   install.sh --requirements EXTRA...    what hvdkit and these extras of it need
set -eu
here=/usr/local/lib/hvdkit
if [ "$1" = --requirements ]; then
    shift
    python3 "$here/requirements.py" "$here/pyproject.toml" "$@" > /tmp/requirements.txt
    set -- --requirement /tmp/requirements.txt
fi
if [ -n "$(find /wheels -name '*.whl' -print -quit)" ]; then
    set -- --no-index --find-links /wheels "$@"
fi
/opt/hvdkit/bin/python -m pip install --quiet --no-cache-dir --no-compile --disable-pip-version-check \
    --constraint "$here/constraints.txt" "$@"
# pip would compile one file after the other. As for pip, a file that is none of this Python's is no error.
/opt/hvdkit/bin/python -m compileall -qq -j 0 /opt/hvdkit/lib || true
