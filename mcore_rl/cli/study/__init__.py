"""Studies: comparisons of many runs of one config."""
