"""One step of reinforcement learning: batches, passes, advantages, losses and updates."""
