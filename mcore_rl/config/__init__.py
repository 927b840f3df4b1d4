"""The description of a run, as frozen typed objects read from TOML. Imports neither torch nor Megatron."""
