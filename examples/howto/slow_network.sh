#!/bin/sh
# Runs a script as two ranks on two hosts that are namespaces of this machine, with a slow wire between them. As root:
#     sh slow_network.sh 1gbit python train.py
set -eu
rate=$1 # as tc writes it: 1gbit, 200mbit
shift
host0=slow-$$-0 host1=slow-$$-1 ranks=

clean_up() {
    if [ -n "$ranks" ]; then kill $ranks 2>/dev/null || true; fi
    for host in "$host0" "$host1"; do ip netns delete "$host" 2>/dev/null || true; done # the wire goes with them
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

set_up() { # host, address
    ip -n "$1" link set lo up
    ip -n "$1" link set wire up
    ip -n "$1" address add "$2/24" dev wire
    tc -n "$1" qdisc add dev wire root tbf rate "$rate" burst 128kb latency 20ms # what this host sends
}
ip netns add "$host0"
ip netns add "$host1"
ip link add wire netns "$host0" type veth peer name wire netns "$host1"
set_up "$host0" 198.18.0.1
set_up "$host1" 198.18.0.2

export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=198.18.0.1 MASTER_PORT=29500
RANK=0 ip netns exec "$host0" "$@" &
ranks=$!
RANK=1 ip netns exec "$host1" "$@" &
ranks="$ranks $!"
for rank in $ranks; do wait "$rank"; done
