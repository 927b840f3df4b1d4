"""Layers compiled for speed on a CPU; a reader of the GPU path can skip this folder."""
