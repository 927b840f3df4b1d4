"""From a config and a cluster to a job in Slurm's queue. Imports `mcore_rl.config` only, so that it answers at once."""
