"""The section `rl.ptx`: texts with a cross entropy that is added to the policy's loss."""

from pydantic import NonNegativeFloat, PositiveInt

from mcore_rl.config.section import Section


class PtxConfig(Section):
    """Gradient of pretraining or fine-tuning in each update of the policy (PTX: 2203.02155; Kimi K2, 2507.20534)."""

    coeff: NonNegativeFloat = 0.0
    """Weight of the texts' cross entropy per token, which is added to the policy's loss; 0: no texts."""
    files: tuple[str, ...] = ()
    """Conversations, in the forms of fine-tuning's data.train: the assistant's tokens count. Conversations longer than
    a packed sequence are left out."""
    tokens: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, as pretraining's data.train, instead of `files`: every token counts."""
    sequences: PositiveInt = 8
    """Packed sequences of texts per update, over all ranks, each as long as the policy's microbatches
    (rl.update.max_tokens_per_microbatch)."""
