"""Rewards of completions: rules, functions of the user's own, and their weighted sum."""
