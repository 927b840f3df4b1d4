"""The rollout engine on the modules that train: decoding, scheduling."""
