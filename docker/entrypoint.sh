#!/bin/sh
# What a container does first. `sshd` as the command makes it a host of a cluster: keys are made now, none is in the image.
#
# /cluster is a volume that only the containers of one cluster share. The first one makes the key with which all log in;
# each makes a host key of its own, keeps it to itself, and writes down its public part for the others.
set -eu
[ "${1-}" = sshd ] || exec "$@"

umask 077
keys=/cluster/ssh
mkdir -p "$keys"
host_key=$(mktemp -d)/host_key
ssh-keygen -q -t ed25519 -N '' -C "$(hostname)" -f "$host_key"
(
    flock 9
    [ -e "$keys/id_ed25519" ] || ssh-keygen -q -t ed25519 -N '' -C cluster -f "$keys/id_ed25519"
    touch "$keys/known_hosts"
    { grep -v "^\[$(hostname)\]:" "$keys/known_hosts" || true; echo "[$(hostname)]:2222 $(cut -d ' ' -f 1,2 "$host_key.pub")"; } \
        > "$keys/known_hosts.new"
    mv "$keys/known_hosts.new" "$keys/known_hosts"
) 9> "$keys/lock"

# Only on the network of the cluster, and the loopback interface, never on all.
exec /usr/sbin/sshd -D -e -f /etc/ssh/hvdkit_sshd_config -h "$host_key" \
    -o "ListenAddress=$(hostname --ip-address | cut -d ' ' -f 1)" -o ListenAddress=127.0.0.1
