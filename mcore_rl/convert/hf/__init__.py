"""Hugging Face folders: config.json and safetensors, read and written."""
