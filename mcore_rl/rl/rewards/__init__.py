"""Rewards of completions: built-in rules, user-defined functions, and their weighted sum."""
