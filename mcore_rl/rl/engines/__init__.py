"""Rollout engines: what makes completions of prompts."""
