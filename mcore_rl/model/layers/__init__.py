"""Layers that replace TransformerEngine's in Megatron's specs, for CPUs and for CUDA without TransformerEngine."""
