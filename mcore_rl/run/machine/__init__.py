"""A machine or a node: its hardware and packages, and whether it is sound."""
