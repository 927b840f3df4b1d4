"""Slurm jobs from a config and a cluster. It imports nothing of mcore_rl that needs torch, so that it is quick."""
