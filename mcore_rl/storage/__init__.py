"""Folders that hold models, and their descriptions of the model, read without torch."""
