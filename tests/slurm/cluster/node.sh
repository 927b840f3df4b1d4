#!/usr/bin/env bash
# Switches a node on, inside of the cluster: its own network, names, processes, /dev/shm and cgroup.
#   node.sh FOLDER NODE
set -euo pipefail
folder=$1
node=$2
address=$(awk -v node="$node" '$2 == node { print $1 }' /etc/hosts)
if [ ! -e "/run/netns/$node" ]; then
  ip netns add "$node"
  ip link add "to-$node" type veth peer name eth0 netns "$node"
  ip link set "to-$node" master br0
fi
ip link set "to-$node" up
ip -n "$node" link set lo up
ip -n "$node" address replace "$address/24" dev eth0
ip -n "$node" link set eth0 up

boot=$(
  cat <<'IN_THE_NODE'
hostname "$2"
mount -t tmpfs -o size=64m tmpfs /dev/shm
# What slurmd sees as the root of the cgroups is this node's own.
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/freezer
mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer
mkdir -p "/var/spool/slurmd-$2"
slurmd -D -N "$2" &
while :; do
  sleep 3600 &
  wait $! || true
done
IN_THE_NODE
)
# To be in this cgroup when the namespace is made is what makes it the namespace's root.
cgroup=/sys/fs/cgroup/freezer/$(cat "$folder/run/cgroup")/$node
mkdir -p "$cgroup"
(
  echo "$BASHPID" >"$cgroup/cgroup.procs"
  exec setsid ip netns exec "$node" unshare --cgroup --mount --uts --ipc --pid --fork --mount-proc --kill-child \
    bash -c "$boot" boot "$folder" "$node" </dev/null >>"$folder/log/$node.log" 2>&1
) &
echo $! >"$folder/run/$node.pid"
