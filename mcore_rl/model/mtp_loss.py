"""The loss of multi-token prediction as a sum over tokens, the same on every mesh and in every version of Megatron.

Megatron 0.19 weighs it by the tokens of each microbatch and rank, so its gradient depends on microbatches, packing and
context parallelism; both versions record its mean per microbatch and rank, which in 0.16 is 0/0 for a mask of zeros.
Without labels 0.16 fails, and 0.19 makes up labels from the input and adds the gradient of that loss to the gradient
through the logits. This module can go when Megatron returns a sum and a count, as for the main loss, and only if labels
are given.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor

MTP_INPUTS = (
    "input_ids position_ids attention_mask padding_mask rotary_pos_emb rotary_pos_cos rotary_pos_sin "
    "packed_seq_params sequence_len_offset"
).split()


def postprocessed_with_mtp(model: Any, postprocess: Callable[..., Any], **inputs: Any) -> Any:
    """Call `postprocess`, Megatron's `_postprocess` of a model with MTP layers, with our MTP losses instead of
    Megatron's: as sums over tokens, and only if labels are given.
    """
    depth = model.config.mtp_num_layers
    if inputs["labels"] is not None:
        inputs["hidden_states"] = _with_mtp_losses(model, depth, **inputs)
    # Hide the MTP layers from Megatron, which then computes only the main logits and loss.
    model.config.mtp_num_layers = None
    try:
        return postprocess(**inputs | {"mtp_in_postprocess": False})
    finally:
        model.config.mtp_num_layers = depth


def _with_mtp_losses(
    model: Any,
    depth: int,
    *,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor | None,
    **inputs: Any,
) -> torch.Tensor:
    """Return the main hidden states `[s, B, D]`; their backward pass also adds the gradients of the MTP losses.

    Collective over the context-parallel ranks, which exchange the tokens at the ends of their parts. In training mode
    `model.mtp_sums` `[depth, 2]` accumulates each depth's loss and token count on this rank, for the metric.
    """
    config = model.config
    assert config.calculate_per_token_loss, "the schedule divides all losses by the world's tokens"
    hidden_states = model.mtp(
        hidden_states=hidden_states,
        inference_params=None,
        embedding=model.embedding,
        **{name: inputs[name] for name in MTP_INPUTS if name in inputs},
        **(inputs.get("extra_block_kwargs") or {}),
    )
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    hidden_states, *predictions = torch.chunk(hidden_states, 1 + depth, dim=0)
    mask = torch.ones_like(labels) if loss_mask is None else loss_mask
    for index, prediction in enumerate(predictions):
        logits, _ = model.output_layer(
            prediction, weight=weight, runtime_gather_output=inputs["runtime_gather_output"]
        )
        # Each depth predicts one token further ahead; the mask becomes zero where a sequence ends.
        labels, mask = (
            roll_tensor(
                tensor,
                shifts=-1,
                dims=-1,
                cp_group=model.pg_collection.cp,
                packed_seq_params=inputs.get("packed_seq_params"),
            )[0]
            for tensor in (labels, mask)
        )
        losses = mask * model.compute_language_model_loss(labels, logits)
        if model.training:
            if not hasattr(model, "mtp_sums"):
                model.mtp_sums = torch.zeros(depth, 2, device=losses.device)
            model.mtp_sums[index] += torch.stack([losses.detach().sum(), mask.sum()])
        # A sum, like the main loss: finalize_model_grads divides both by the world's count of main tokens. Divided by
        # the tokens of a microbatch or rank, it would depend on how the batch is split.
        hidden_states = MTPLossAutoScaler.apply(
            hidden_states, config.mtp_loss_scaling_factor / depth * losses
        )
    return hidden_states
