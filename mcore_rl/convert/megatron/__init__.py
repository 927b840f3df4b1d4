"""Megatron distributed checkpoints, read and written without a process group."""
