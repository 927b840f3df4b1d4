"""Whether a run can work, told before ranks start: one file a section, each violation with its reason and remedy."""
