"""Gradients of attention over chosen keys are those of transformers, in fp64; nothing trains an indexer."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, copy_in
from tests.double import TORCH, doubled, in_double
from tests.hf_models import VOCAB, Tensors, oracle, random_tokens
from tests.hf_weights import to_global
from tests.parallel.parity import largest, relative_errors
from tests.unit.model.test_delta_nets import eager, our_gradients


def tensors_of(model: Any, *, gradients: bool = False) -> Tensors:
    """Parameters and biases of the choice of experts, or their gradients, zeros where there is none, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    found = {name: tensor for name, tensor in named if "inv_freq" not in name}
    if not gradients:
        return {name: tensor.detach().clone() for name, tensor in found.items()}
    return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in found.items()}


@pytest.mark.parametrize("case", ["deepseek_v32", "glm_moe_dsa-shared"])
def test_gradients_are_those_of_transformers(case: str, one_rank: Mesh) -> None:
    model = oracle(case).ours
    tokens_BS = random_tokens(length=150)
    labels_B = tokens_BS.roll(-1, 1).flatten()
    with in_double():
        wanted = eager(oracle(case).model)
        cross_entropy(wanted(tokens_BS).logits.flatten(0, 1), labels_B, reduction="sum").backward()
        chunk = doubled(build_model(model, one_rank, start(TORCH), TORCH)[0])
        copy_in([chunk], to_global(tensors_of(wanted), model))
        positions_BS = torch.arange(150).expand_as(tokens_BS)
        logits = chunk(input_ids=tokens_BS, position_ids=positions_BS, attention_mask=None)[..., :VOCAB]
        cross_entropy(logits.flatten(0, 1), labels_B, reduction="sum").backward()
        of_indexers = [p for name, p in chunk.named_parameters() if ".indexer." in name]
        assert of_indexers and all(not p.requires_grad and p.grad is None for p in of_indexers)
        found = {key: g for key, g in our_gradients(chunk).items() if not key.endswith("expert_bias")}
    theirs = to_global(tensors_of(wanted, gradients=True), model)
    errors = relative_errors(found, {key: theirs[key] for key in found})
    assert max(errors.values()) <= 1e-6, largest(errors)
