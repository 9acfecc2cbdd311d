#!/bin/bash
# Build the wheel for each Python named, and try it where there is this Python and no compiler: make wheel-test.
#
#   sudo docker/wheel-test.sh PYTHON[=FRAMEWORK]...
#
# PYTHON is debian:SUITE, the python3 of that release, or a folder, the prefix of a Python that was built on this machine or
# links nothing of it, as those of pyenv and uv. FRAMEWORK, with which digits are trained, is tensorflow-cpu if not named,
# or torch, which is gigabytes where the package index has it for CUDA only; WHEELS=FOLDER has pip look there, too. For the
# first Python the pure wheel is tried as well.
#
# Needs root, debootstrap, Docker (engine.sh), a mirror of Debian's (MIRROR=... for another one) and a package index. Where
# a mirror's lists are past their date, as those of Debian's next release may be, apt refuses them; STALE=1 takes them, and
# signatures are still checked. What is downloaded goes into TMPDIR. The images hvdkit-wheel-test:* stay, for the next time:
# docker images --quiet hvdkit-wheel-test | xargs docker rmi
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NAME=hvdkit-wheel-test
BUILD_SECONDS=2400 TRY_SECONDS=900
ACCURACY=97  # what tests/examples asks of the same run
CERTIFICATES=/etc/ssl/certs
valid=true
[ "${STALE:-}" != 1 ] || valid=false

[ $# != 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
started=$(docker/engine.sh)
folder=$(mktemp -d)
# shellcheck disable=SC2329
end() {
    docker ps --all --quiet --filter "label=$NAME=$$" | xargs -r docker rm --force > /dev/null || true
    rm -rf --one-file-system "$folder"
    [ -z "$started" ] || kill "$started"
}
trap end EXIT
if ! command -v debootstrap > /dev/null; then
    { apt-get update -qq && apt-get install -qq --yes debootstrap; } > /dev/null
fi

quietly() { # COMMAND, of which only a failure is shown
    "$@" > "$folder/log" 2>&1 || { tail -n 40 "$folder/log" >&2; return 1; }
}

container() { # SECONDS WORDS FOR DOCKER...
    local seconds=$1
    shift
    quietly timeout "$seconds" docker run --init --label "$NAME=$$" "$@"
}

minbase() { # SUITE
    local root=$folder/root script=/usr/share/debootstrap/scripts/$1
    [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid  # of a release younger than debootstrap
    quietly debootstrap --variant=minbase "$1" "$root" "${MIRROR:-http://deb.debian.org/debian}" "$script" || return
    tar --directory "$root" --create --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' . |
        docker import - "$NAME:$1" > /dev/null || return
    rm -rf --one-file-system "$root"
}

image() { # SUITE PACKAGES...: sets image to one that has them and what they need, and nothing else
    local suite=$1 made
    shift
    image=$NAME:$suite-$(echo "$@" | md5sum | cut -c 1-8)
    ! docker image inspect "$image" > /dev/null 2>&1 || return 0
    docker image inspect "$NAME:$suite" > /dev/null 2>&1 || minbase "$suite" || return
    rm -f "$folder/id"  # of one that failed
    # What the container's shell expands is no business of this one.
    # shellcheck disable=SC2016
    container "$BUILD_SECONDS" --cidfile "$folder/id" --network host --env "VALID=$valid" "$NAME:$suite" sh -euc '
        apt-get update -qq -o "Acquire::Check-Valid-Until=$VALID"
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "$@"
        rm -rf /var/lib/apt/lists/* /var/cache/apt/*' sh "$@" || return
    made=$(< "$folder/id")
    rm "$folder/id"
    docker commit "$made" "$image" > /dev/null && docker rm "$made" > /dev/null
}

libraries() { # PREFIX: the packages of this machine's Debian that its Python links, less those of tkinter's windows
    { find "$1"/bin "$1"/lib/libpython* "$1"/lib/python*/lib-dynload -type f ! -name "_tkinter*" -exec ldd {} + || true; } 2> /dev/null |
        awk '$2 == "=>" && $3 ~ "^/(usr/)?lib" { sub("^/usr", "", $3); print $3; print "/usr" $3 }' | sort -u |
        { xargs -r dpkg-query --search 2> /dev/null || true; } | cut -d : -f 1 | sort -u
}

wheels() { # PYTHON FRAMEWORK WORDS FOR DOCKER...: the wheels of hvdkit and of all that it needs, into $folder/wheels
    local python=$1 framework=$2
    shift 2
    # shellcheck disable=SC2016
    container "$BUILD_SECONDS" --rm --network host --volume "$PWD:/source:ro" --volume "$folder/wheels:/wheels" \
        --volume "$CERTIFICATES:$CERTIFICATES:ro" --volume "${WHEELS:-$PWD/docker/wheels}:/more:ro" \
        --env PIP_INDEX_URL --env PIP_EXTRA_INDEX_URL --env PIP_FIND_LINKS=/more \
        --env PIP_CERT=$CERTIFICATES/ca-certificates.crt --env PIP_DISABLE_PIP_VERSION_CHECK=1 "$@" bash -euc '
        mkdir /build
        cd /source
        cp -r pyproject.toml setup.py README.md LICENSE constraints.txt hvdkit /build
        cd /build
        find . -name "*.so" -delete
        "$1" -m venv /venv
        export HVDKIT_REQUIRE_NATIVE=1
        /venv/bin/python -m pip wheel --wheel-dir /wheels --only-binary :all: -c constraints.txt ".[$2]" pip
        rm -rf build
        unset HVDKIT_REQUIRE_NATIVE
        HVDKIT_PURE=1 /venv/bin/python -m pip wheel --wheel-dir /wheels/pure --no-deps .
        ' bash "$python" "$framework,mpi,examples"
}

try() { # native|numpy PYTHON FRAMEWORK WORDS FOR DOCKER...: install without a network, train, and say what was seen
    local backend=$1 python=$2 framework=$3 example=pytorch_digits.py kind=.
    shift 3
    [ "$framework" = torch ] || example=tensorflow2_digits.py
    [ "$backend" = native ] || kind=pure
    # shellcheck disable=SC2016
    container "$TRY_SECONDS" --rm --network none --shm-size 1g --volume "$folder/wheels:/wheels:ro" \
        --volume "$PWD/examples:/examples:ro" --env TF_CPP_MIN_LOG_LEVEL=2 "$@" bash -euc '
        for program in cc c++ gcc g++ clang; do
            ! command -v "$program" || exit 1
        done
        wheel=$(echo /wheels/"$5"/hvdkit-*.whl) pip=$(echo /wheels/pip-*.whl)
        "$1" -m venv --without-pip /venv
        # pip runs from its own wheel, so that Python needs none.
        /venv/bin/python "$pip/pip" install --no-index --find-links /wheels --no-compile "$wheel[$2,mpi,examples]"
        cd /tmp
        /venv/bin/python -W error -c "from hvdkit import kernels; assert kernels.backend() == \"$3\", kernels.backend()"
        /venv/bin/hvdkitrun -np 2 /venv/bin/python "/examples/$4"
        /venv/bin/python - "$2" << END
import importlib.metadata, platform, sys
framework = sys.argv[1]
print("SEEN Python", platform.python_version() + ": ${wheel##*/}, $3 kernels,", framework, importlib.metadata.version(framework))
END
        ' bash "$python" "$framework" "$backend" "$example" "$kind" || return
    trained=$(grep -o 'test accuracy [0-9.]*% (360 images, 2 process(es), [0-9.]* s)' "$folder/log") || trained=
    awk -v said="$trained" "BEGIN { split(said, words); exit !(words[3] + 0 >= $ACCURACY) }" ||
        { echo "wheel-test: trained to less than $ACCURACY %: ${trained:-nothing said}" >&2; return 1; }
    seen=$(sed -n 's/^SEEN //p' "$folder/log")
}

whole() { # PYTHON FRAMEWORK pure|: all of it for one Python; says a line for each wheel
    local name=$1 framework=$2 python=/usr/bin/python3 suite mounted=() packages=() build_packages=() begun=$SECONDS built
    step="the images"
    if [[ $name == debian:* ]]; then
        suite=${name#debian:}
        packages=(python3) build_packages=(python3-dev python3-venv g++)
    else
        [ -x "$name/bin/python3" ] || { echo "wheel-test: there is no $name/bin/python3" >&2; return 1; }
        # shellcheck source=/dev/null
        suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
        python=$name/bin/python3
        mounted=(--volume "$name:$name:ro")
        mapfile -t packages < <(libraries "$name")
        build_packages=("${packages[@]}" g++)
    fi
    image "$suite" "${packages[@]}" || return
    local bare=$image
    image "$suite" "${build_packages[@]}" || return
    step="its build"
    rm -rf --one-file-system "$folder/wheels"
    mkdir "$folder/wheels"
    begun=$SECONDS
    wheels "$python" "$framework" "${mounted[@]}" "$image" || return
    built=$((SECONDS - begun)) begun=$SECONDS step="its container"
    try native "$python" "$framework" "${mounted[@]}" "$bare" || return
    echo "wheel-test: $name, $seen, $trained; built in $built s, tried in $((SECONDS - begun)) s"
    [ "$3" = pure ] || return 0
    begun=$SECONDS step="the pure wheel's container"
    try numpy "$python" "$framework" "${mounted[@]}" "$bare" || return
    echo "wheel-test: $name, $seen, $trained; tried in $((SECONDS - begun)) s"
}

status=0 pure=pure
for one in "$@"; do
    framework=tensorflow-cpu
    [[ $one != *=* ]] || framework=${one##*=}
    [[ $framework =~ ^(torch|tensorflow-cpu)$ ]] || { echo "wheel-test: no framework of that name: $framework" >&2; exit 2; }
    whole "${one%=*}" "$framework" "$pure" || { echo "wheel-test: ${one%=*} FAILED at $step"; status=1; }
    pure=
done
exit "$status"
