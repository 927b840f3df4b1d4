"""Folders that hold models: checkpoints, Hugging Face's, runs; what they say of their model is read without torch."""
