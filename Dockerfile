# mcore_rl on NVIDIA's PyTorch image, which brings torch, CUDA, NCCL, TransformerEngine and apex, built for one another.
#   docker build -t mcore-rl .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/data:/data" -v "$PWD/runs:/workspace/runs" mcore-rl \
#       mcore-rl pretrain tiny_moe/pretrain data.train=/data/books    # data/books.bin and .idx, of `mcore-rl data preprocess`
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.12-py3
FROM ${BASE_IMAGE}

WORKDIR /opt/mcore_rl
COPY setup.py pyproject.toml README.md LICENSE ./
COPY mcore_rl ./mcore_rl
COPY launch ./launch
COPY tools ./tools

# The image pins its own packages in /etc/pip/constraint.txt: pip keeps its torch and refuses whatever would replace it.
RUN python -m pip install --no-cache-dir --editable .

WORKDIR /workspace
CMD ["mcore-rl", "--help"]
