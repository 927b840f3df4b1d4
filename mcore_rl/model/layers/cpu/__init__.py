"""Layers in the form that is fastest on a CPU, by the compiled file; a reader of the GPU path can skip this folder."""
