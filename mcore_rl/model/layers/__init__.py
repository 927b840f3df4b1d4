"""Layers without TransformerEngine, for CPUs and plain CUDA, in the places that Megatron's specs have for them."""
