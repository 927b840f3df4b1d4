"""How long a step takes and which mesh is best, of what `mcore_rl.plan` counts; without torch."""
