#!/bin/bash
# Make two base images from Debian's packages, for machines that can pull none: hvdkit-base:runtime, hvdkit-base:build.
#
#   sudo docker/base-image.sh
#   docker build --build-arg BASE_IMAGE=hvdkit-base:runtime --build-arg BUILD_IMAGE=hvdkit-base:build ...
#
# Needs root, debootstrap, Docker, and a mirror of Debian's that debootstrap reaches (MIRROR=... for another one).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source packages.env

if ! command -v debootstrap > /dev/null; then
    { apt-get update -qq && apt-get install -qq --yes debootstrap; } > /dev/null
fi

SUITE=bookworm
folder=$(mktemp -d)
trap 'rm -rf --one-file-system "$folder"' EXIT

quietly() { # COMMAND, of which only a failure is shown
    "$@" > "$folder/log" 2>&1 || { tail -n 20 "$folder/log" >&2; exit 1; }
}
add() { # PACKAGES, with apt: debootstrap takes twice as long for them
    quietly chroot "$root" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "$@"
}
import() { # TAG
    rm -f "$root"/etc/ssh/ssh_host_*  # no image shall have keys
    tar --directory "$root" --create --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
        --exclude=./etc/resolv.conf --exclude=./usr/sbin/policy-rc.d . |
        docker import --change 'CMD ["bash"]' - "hvdkit-base:$1" > /dev/null
}

echo "base-image.sh: hvdkit-base:runtime, from Debian's packages"
root=$folder/root
quietly debootstrap --variant=minbase "$SUITE" "$root" ${MIRROR:+"$MIRROR"}
cp /etc/resolv.conf "$root/etc/resolv.conf"
# No package shall start its server here.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod +x "$root/usr/sbin/policy-rc.d"
quietly chroot "$root" apt-get update -qq
# shellcheck disable=SC2086 (one word a package)
add $RUNTIME_PACKAGES $MPI_PACKAGES
import runtime

echo "base-image.sh: hvdkit-base:build, with a compiler"
# shellcheck disable=SC2086
add $BUILD_PACKAGES
import build
