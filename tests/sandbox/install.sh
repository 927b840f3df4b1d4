#!/usr/bin/env bash
# Installs what the tests of programs in a sandbox need: Debian's or Ubuntu's bubblewrap.
set -euo pipefail
if type -P bwrap >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
  echo "missing: bubblewrap. Install it, or run this as root." >&2
  exit 2
fi
apt-get update -q -o DPkg::Lock::Timeout=300
DEBIAN_FRONTEND=noninteractive apt-get install -q -y -o DPkg::Lock::Timeout=300 --no-install-recommends bubblewrap
