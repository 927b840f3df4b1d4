"""Families of models, the layers they are made of without TransformerEngine, and how a rank builds its chunks."""

import mcore_rl.backend.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
