"""Building a rank's chunks of a model, and the layers that replace TransformerEngine's."""

import mcore_rl.megatron.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
