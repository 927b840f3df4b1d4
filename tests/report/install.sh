#!/usr/bin/env bash
# Installs what the tests of the report in a browser need: Debian's or Ubuntu's Chromium, and playwright, which drives it,
# into the Python that is given.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}

if ! "$python" -c 'import playwright' 2>/dev/null; then
  "$python" -m pip install -q -c constraints.txt playwright
fi
for name in chromium chromium-browser google-chrome; do
  if type -P "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ]; then
  echo "missing: a Chromium. Install the package chromium, or run this as root." >&2
  exit 2
fi
apt-get update -q -o DPkg::Lock::Timeout=300
DEBIAN_FRONTEND=noninteractive apt-get install -q -y -o DPkg::Lock::Timeout=300 --no-install-recommends chromium
