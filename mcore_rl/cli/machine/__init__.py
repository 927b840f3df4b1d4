"""A machine or node: its hardware and packages, and whether it works."""
