"""Environments that answer the policy: the interface, the built-in environments, and conversations with them."""
