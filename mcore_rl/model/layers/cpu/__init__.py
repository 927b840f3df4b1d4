"""Layers in the form that is fastest on a CPU; a reader of the GPU path can skip this folder."""
