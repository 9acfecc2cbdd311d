#!/bin/sh
# Build Horovod 0.28.1 for the PyTorch of /opt/hvdkit, with Gloo and the system's MPI, into the folder of the argument.
set -eu
. "$(dirname "$0")/packages.env"
# shellcheck disable=SC2086 (one word a package)
"$(dirname "$0")/install.sh" setuptools wheel 'cmake<4' $HOROVOD_REQUIREMENTS
source=/wheels
[ -n "$(find /wheels -name 'horovod-*' -print -quit)" ] || source=

wrapper=$(mktemp -d)
cat > "$wrapper/c++" <<'WRAPPER'
#!/bin/bash
# The headers of today's PyTorch need C++17; what is written for a debugger takes longer than the rest.
words=()
for word in "$@"; do
    [ "$word" = -g ] || words+=("${word/#-std=c++1[14]/-std=c++17}")
done
exec /usr/bin/c++ "${words[@]}"
WRAPPER
chmod +x "$wrapper/c++"

export PATH="/opt/hvdkit/bin:$PATH" CXX="$wrapper/c++" MAKEFLAGS="-j$(nproc)"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps ${source:+--no-index --find-links /wheels} \
    --wheel-dir "$1" horovod==0.28.1
rm -rf "$wrapper"
