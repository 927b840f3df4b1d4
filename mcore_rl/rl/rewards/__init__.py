"""What a completion is worth: rules, a user's functions, and their weighted sum."""
