"""Stand-ins for CUDA and faster products, for machines without a GPU: a reader of the GPU path may skip this folder."""
