#!/usr/bin/env bash
# Makes (or updates) the virtual environment in $1, default .venv-te, with TransformerEngine: what tests/te runs in.
#
# It needs CUDA 13's compiler and no GPU: TransformerEngine's torch extension is compiled once, in about 7 minutes on two
# cores. 6 GB; the compiled wheel stays in $1/wheels and also serves a GPU machine with the same Python and torch.
# PYTHON=/path/to/python3.12  the interpreter to use; otherwise python3.12, for which megatron-core 0.19 exists
# CUDA_HOME=/path             the toolkit with bin/nvcc; otherwise /usr/local/cuda
# MAX_JOBS=2                  compilers at once
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -m "${1:-.venv-te}")
te_version=2.20.2
torch_version=2.11.0
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}

if [ ! -x "$CUDA_HOME/bin/nvcc" ]; then
    echo "No CUDA compiler at $CUDA_HOME/bin/nvcc. Install CUDA's toolkit 13.0, or name its folder: CUDA_HOME=/path" >&2
    exit 1
fi
is_3_12() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    python=
    # A shim of pyenv answers only for the version that is switched on: the others are asked by their path.
    for path in $(type -aP "${PYTHON:-python3.12}") "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3.12; do
        if is_3_12 "$path"; then
            python=$path
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "No Python 3.12 with its venv module was found. Install it, or name it: PYTHON=/path/to/python3.12" >&2
        exit 1
    fi
    echo "Making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# First, as the extension is compiled against it; the rest is what every environment of this repository has.
pip install "torch==$torch_version"
tools/make_venv.sh "$venv"
pip install setuptools wheel ninja pybind11 einops onnx onnxscript nvdlfw-inspect importlib-metadata
pip install --no-deps "transformer-engine-cu13==$te_version" "transformer-engine==$te_version"
if ! ls "$venv"/wheels/transformer_engine_torch-"$te_version"-*.whl >/dev/null 2>&1; then
    sources=$(mktemp -d)
    trap 'rm -rf "$sources"' EXIT
    pip download --no-deps --no-binary :all: --no-build-isolation -d "$sources" "transformer_engine_torch==$te_version"
    tar -xf "$sources"/*.tar.gz -C "$sources" --strip-components=1
    # CUDA's libraries came with torch, each with its headers in a folder of its own.
    includes=$(find "$venv"/lib/python3.12/site-packages/nvidia -maxdepth 2 -name include -printf '%p:')
    NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-2} TORCH_CUDA_ARCH_LIST=9.0 \
        CPLUS_INCLUDE_PATH=$includes \
        "$venv/bin/python" -m pip wheel --no-build-isolation --no-deps -w "$venv/wheels" "$sources"
fi
pip install --no-deps "$venv"/wheels/transformer_engine_torch-"$te_version"-*.whl
"$venv/bin/python" -c 'from importlib.metadata import version; print("TransformerEngine", version("transformer-engine"))'
