"""Environments that answer the policy: their interface, those that ship, and the conversations with them."""
