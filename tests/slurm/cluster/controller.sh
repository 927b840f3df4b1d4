#!/usr/bin/env bash
# Process 1 of a cluster: started by cluster.py as root in new namespaces of mounts, network, names and processes, which
# all end with it.      controller.sh FOLDER NODE...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
shift
hostname controller
for place in /run /var/spool /dev/shm; do mount -t tmpfs tmpfs $place; done
mkdir -p /run/munge /run/netns /run/lock
mount --bind "$folder/etc/slurm" /etc/slurm
for file in hosts nsswitch.conf resolv.conf passwd group; do mount --bind "$folder/etc/$file" "/etc/$file"; done
# The checkout and Python may lie where the jobs' user cannot go, as in root's home.
for place in code venv python; do mount --bind "$(readlink "$folder/$place.source")" "$folder/$place"; done
python=$(readlink "$folder/python.source")
if [[ $python == "$HOME"/* ]]; then
  mount -t tmpfs -o mode=755 tmpfs "$HOME"
  mkdir -p "$python"
  mount --bind "$folder/python" "$python"
fi
# glibc takes no address of a machine that has loopback only for one; the bridge is also the switch of the nodes.
ip link set lo up
ip link add br0 type bridge
ip address add 10.77.0.1/24 dev br0
ip link set br0 up

chown munge:munge /run/munge "$folder/munge" "$folder/munge/key"
setpriv --reuid=munge --regid=munge --clear-groups munged --num-threads=4 --key-file="$folder/munge/key" \
  --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
slurmctld
for node in "$@"; do "$here/node.sh" "$folder" "$node"; done # one by one: `ip netns add` cannot be run side by side
touch "$folder/run/up"
while :; do
  sleep 3600 & # bash takes in what its children leave behind only between commands
  wait $! || true
done
