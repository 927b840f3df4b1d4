"""Bytes, FLOPs and seconds of a training, and a search for the best mesh; without torch."""
