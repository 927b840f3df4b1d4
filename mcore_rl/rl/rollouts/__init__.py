"""Rollout batches: prompts, completions, scores."""
