"""Estimates of a run's weights, memory and FLOPs in closed form, without torch."""
