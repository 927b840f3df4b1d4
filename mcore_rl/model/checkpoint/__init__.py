"""Megatron distributed checkpoints: folders that are complete or do not count, written and read by all ranks."""
