#!/usr/bin/env bash
# Installs what the tests on a real Slurm need, from Debian's or Ubuntu's packages. No service is started: each cluster
# of the tests starts its own daemons in its own namespaces.
set -euo pipefail
packages=(slurmctld slurmd slurm-client munge iproute2 procps util-linux)

is_installed() { [ "$(dpkg-query -W -f='${db:Status-Abbrev}' "$1" 2>/dev/null)" = "ii " ]; }

missing=()
for package in "${packages[@]}"; do is_installed "$package" || missing+=("$package"); done
if [ ${#missing[@]} = 0 ]; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
  echo "missing: ${missing[*]}. Install them, or run this as root." >&2
  exit 2
fi
policy=/usr/sbin/policy-rc.d # asked by every package before it starts its service
if [ ! -e $policy ]; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' >$policy
  chmod +x $policy
fi
apt-get update -q -o DPkg::Lock::Timeout=300
DEBIAN_FRONTEND=noninteractive apt-get install -q -y -o DPkg::Lock::Timeout=300 --no-install-recommends "${missing[@]}"
