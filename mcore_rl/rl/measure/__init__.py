"""Measurements of a policy that no update needs."""
