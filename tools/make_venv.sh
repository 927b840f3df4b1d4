#!/usr/bin/env bash
# Makes (or updates) the virtual environment in $1, default .venv, with the versions of constraints.txt.
#
# PYTHON=/path/to/python3   the interpreter to use; otherwise the first of python3.11, 3.12, ... that works
# TORCH_PIP_ARGS="..."      further arguments for installing torch, e.g. an index that holds CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
has_cuda_torch() { "$1" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' >/dev/null 2>&1; }

candidates=()
for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    # A shim of pyenv answers only for the version that is switched on: the others are asked by their path.
    for path in $(type -aP "$name") "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/"$name"; do
        usable "$path" && candidates+=("$path")
    done
done
if [ ${#candidates[@]} -eq 0 ]; then
    echo "No Python 3.11 or newer with its venv module was found (tried: ${PYTHON:-python3.11 ... python3})." >&2
    echo "Install one, or name it: make venv PYTHON=/path/to/python3" >&2
    exit 1
fi

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    python=${candidates[0]} site=()
    for path in "${candidates[@]}"; do # an installed CUDA build of torch fits this machine's driver: it is kept
        if has_cuda_torch "$path"; then
            python=$path site=(--system-site-packages)
            break
        fi
    done
    echo "Making $venv with $("$python" --version) ($python) ${site[*]}"
    "$python" -m venv --clear "${site[@]}" "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
# The version by which pip knows it: torch's own has the build's suffix even where the package's has none.
if torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null); then
    sed "s/^torch==.*/torch==$torch/" constraints.txt >"$constraints"
else
    cp constraints.txt "$constraints"
    # First and alone, so that a CPU build is not replaced by what another package asks for.
    # shellcheck disable=SC2086
    pip install "$(grep '^torch==' constraints.txt)" -c "$constraints" ${TORCH_PIP_ARGS:-}
fi
pip install -e '.[dev]' -c "$constraints"
echo "mcore-rl is in $venv/bin; to have it on the PATH: source $venv/bin/activate"
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__, "with CUDA" if torch.cuda.is_available() else "on CPU")'
