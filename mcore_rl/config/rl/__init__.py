"""The section `rl` of a config, a file for each part of it; the whole is `mcore_rl.config.rl.section`."""
