"""A compiled file for CPUs only, with products and attention that use it. `model/layers/cpu` makes layers of it."""
