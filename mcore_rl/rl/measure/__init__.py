"""Measurements of a policy that are not part of its updates."""
