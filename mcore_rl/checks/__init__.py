"""Checks that a run can work, made before ranks start: one file per section, each violation with reason and remedy."""
