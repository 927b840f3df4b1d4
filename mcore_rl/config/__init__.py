"""What a run is, as frozen typed objects read from TOML. Imports neither torch nor Megatron."""
