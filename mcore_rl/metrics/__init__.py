"""Metrics of a run, their table, and where they are written: console, metrics.jsonl, TensorBoard, W&B."""
