"""The training programs, and the parts that they share."""
