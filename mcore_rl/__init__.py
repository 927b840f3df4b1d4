"""Pretraining, fine-tuning and reinforcement learning of Mixture-of-Experts models on Megatron-Core."""

__version__ = "0.2.0"
