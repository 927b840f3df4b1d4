"""Layers as a CPU computes them fastest: a reader of the GPU path may skip this folder."""
