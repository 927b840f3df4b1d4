"""The section `rl` of a config, with a file for each part; `mcore_rl.config.rl_run` has the whole."""
