"""Checkpoints between Hugging Face's and Megatron's formats: streamed, proved from headers, without a model."""
