"""What a run takes, in closed form: weights, memory, FLOPs. Imports no torch."""
