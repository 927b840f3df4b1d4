"""The training programs, and what they share."""
