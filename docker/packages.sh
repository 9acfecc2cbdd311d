#!/bin/sh
# Install Debian's packages, if they are not there already: a base image of base-image.sh has them, and needs no network.
set -eu
missing=
for package in "$@"; do
    dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
apt-get update --quiet --quiet
# shellcheck disable=SC2086 (one word a package)
DEBIAN_FRONTEND=noninteractive apt-get install --quiet --quiet --yes --no-install-recommends $missing
rm -rf /var/lib/apt/lists/*
# Openssh's package makes keys, which no image shall have.
rm -f /etc/ssh/ssh_host_*
