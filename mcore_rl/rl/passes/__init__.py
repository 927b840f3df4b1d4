"""Passes of models over rollout batches: packed microbatches, their routes, and outputs of the passes."""
