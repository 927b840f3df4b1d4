"""Predictions of the duration of a step, and a search for the best mesh, from the counts of `mcore_rl.plan`; without
torch.
"""
