"""Folders that hold models (checkpoints, Hugging Face's, runs), and their descriptions of the model, read without
torch.
"""
