"""From a scored rollout batch to optimizer steps."""
