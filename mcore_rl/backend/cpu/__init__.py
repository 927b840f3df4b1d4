"""A compiled file for CPUs alone, with products and attention by it. `model/layers/cpu` makes layers of it."""
