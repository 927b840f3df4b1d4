"""Processes that run functions of the user's own: rewards, environments, tools."""
