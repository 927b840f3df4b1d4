"""Agents: programs of the user's that know a base URL, a key and a model name, as rollouts."""
