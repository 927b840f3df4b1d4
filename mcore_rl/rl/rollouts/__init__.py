"""Rollout batches: prompts, completions and scores."""
