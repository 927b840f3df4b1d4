"""Passes of models over rollout batches: packed microbatches, their routes, and what a pass computes."""
