"""Kernels in Triton for GPUs, in the place of several of torch's: a reader of the CPU path may skip this folder."""
