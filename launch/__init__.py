"""Slurm jobs from a config and a cluster. Imports only packages of mcore_rl that need no torch, so that it answers at once."""
