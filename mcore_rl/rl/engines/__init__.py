"""Rollout engines, which generate completions of prompts."""
