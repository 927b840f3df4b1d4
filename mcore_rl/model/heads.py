"""The scalar head: a number for every position instead of logits, for reward models and critics.

A model with `model.head` = "score" ends in a single row of weights instead of a row for each token id. At the last
token of a sequence the number is a reward (arXiv 2203.02155), at every token a value (arXiv 1707.06347).
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from mcore_rl.megatron.mesh import layer_groups
from mcore_rl.storage.checkpoint import SCORE_SHIFT, SCORE_WEIGHT

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
    """Collective over the context-parallel ranks: return the hidden states `[s, B, D]`, whose backward pass adds the
    gradients of the MTP losses; in training `model.mtp_sums` `[depth, 2]` accumulates loss and token count.
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
        logits, _ = model.output_layer(prediction, weight=weight, runtime_gather_output=inputs["runtime_gather_output"])
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
        hidden_states = MTPLossAutoScaler.apply(hidden_states, config.mtp_loss_scaling_factor / depth * losses)
    return hidden_states


class ScoreLayer(nn.Module):
    """Scores `weight @ hidden - shift` in fp32, replicated over tensor-parallel ranks, zero at first."""

    shift: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.tp_group = layer_groups("tp").tp
        self.sequence_parallel = config.sequence_parallel
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank has the gradient of its own positions: Megatron sums it if marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.register_buffer("shift", torch.zeros(1, dtype=torch.float32, device=device))

    def forward(self, hidden_SBD: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Collective over the tensor-parallel ranks: return fp32 scores `[S, B, 1]` of `[s, B, D]`, and no bias."""
        scores_SB1 = nn.functional.linear(hidden_SBD.float(), self.weight.float()) - self.shift
        if self.sequence_parallel:
            # Every rank computes the whole loss, so its own positions' part of the gradient is already complete.
            scores_SB1 = gather_from_sequence_parallel_region(
                scores_SB1, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return scores_SB1, None

    def _apply(self, *args: Any, **kwargs: Any) -> "ScoreLayer":
        # A model in bf16 also converts its buffers, and the mean of the rewards would be 0 to only three digits.
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.shift = self.shift.float()
        return self

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the tensors under their checkpoint keys, as replicas on all ranks of the stage."""
        assert metadata is not None
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return {
            prefix + name: make_sharded_tensor_for_checkpoint(tensor, key, sharded_offsets, **groups)
            for name, tensor, key in (("weight", self.weight, SCORE_WEIGHT), ("shift", self.shift, SCORE_SHIFT))
        }


class ScoreModel(GPTModel):
    """Megatron's model, returning scores `[B, S, 1]` in fp32 instead of logits over the vocabulary."""

    def __init__(self, config: TransformerConfig, *args: Any, vocab_size: int, **kwargs: Any) -> None:
        assert not config.mtp_num_layers, "an MTP layer predicts tokens"
        pre_process, post_process = kwargs["pre_process"], kwargs["post_process"]
        # Megatron builds its output layer before ours replaces it. Tied to an embedding on the same rank, it has no
        # weight; on other ranks it gets a single row per rank, as no embedding there needs the vocabulary.
        if post_process and not pre_process:
            vocab_size = config.tensor_model_parallel_size
        kwargs["share_embeddings_and_output_weights"] = pre_process and post_process
        super().__init__(config, *args, vocab_size=vocab_size, **kwargs)

    def setup_embeddings_and_output_layer(self) -> None:
        """Replace the output layer by the head, and untie the embedding from it."""
        self.share_embeddings_and_output_weights = False
        if self.post_process:
            self.output_layer = ScoreLayer(self.config)
        super().setup_embeddings_and_output_layer()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return weights and buffers as shards; loading a head of another shape is refused."""
        state: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        for tensor in state.values():
            if getattr(tensor, "key", None) == SCORE_WEIGHT:
                tensor.allow_shape_mismatch = False
        return state
