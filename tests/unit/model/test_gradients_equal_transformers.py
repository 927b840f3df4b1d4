"""Gradients of models with gated delta nets, and over chosen keys, are those of transformers, in fp64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from mcore_rl.config.model import ModelConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, copy_in, local_shards
from tests.double import TORCH, doubled, in_double
from tests.hf_models import VOCAB, Tensors, oracle, random_tokens
from tests.hf_weights import to_global
from tests.parallel.parity import largest, relative_errors

WEIGHT = 0.3


def without_balance(model: ModelConfig, **changes: object) -> ModelConfig:
    """transformers' loss has none for these models."""
    moe = model.moe.model_copy(update={"balance": "none", "aux_loss_coeff": 0.0})
    return model.model_copy(update={"moe": moe, **changes})


def eager(model: nn.Module) -> Any:
    """A copy in fp64, whose experts are a loop."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    return model


def named(model: nn.Module, *, gradients: bool = False) -> Tensors:
    """Parameters and biases of the choice of experts, or their gradients, zeros without one, by name; a tied output
    once.
    """
    tensors = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if "inv_freq" not in name}
    if not gradients:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in tensors.items()}


def our_gradients(chunk: nn.Module) -> Tensors:
    found: Tensors = {}
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    for shard in local_shards([chunk]):
        found.setdefault(shard.key, torch.zeros(shard.global_shape).double())[shard.where] = shard.data
    return found


@pytest.mark.matrix("deepseek_v32", "glm_moe_dsa-shared")
@pytest.mark.parametrize(
    "case", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "deepseek_v32", "glm_moe_dsa-shared"]
)
def test_gradients_are_those_of_transformers(case: str, one_rank: Mesh) -> None:
    model = without_balance(oracle(case).ours)
    tokens_BS = random_tokens(length=150)
    labels_B = tokens_BS.roll(-1, 1).flatten()
    with in_double():
        wanted = eager(oracle(case).model)
        cross_entropy(wanted(tokens_BS).logits.flatten(0, 1), labels_B, reduction="sum").backward()
        chunk = doubled(build_model(model, one_rank, start(TORCH), TORCH)[0])
        copy_in([chunk], to_global(named(wanted), model))
        positions_BS = torch.arange(150).expand_as(tokens_BS)
        logits = chunk(input_ids=tokens_BS, position_ids=positions_BS, attention_mask=None)[..., :VOCAB]
        cross_entropy(logits.flatten(0, 1), labels_B, reduction="sum").backward()
        of_indexers = [p for name, p in chunk.named_parameters() if ".indexer." in name]
        assert all(not p.requires_grad and p.grad is None for p in of_indexers)
        assert bool(of_indexers) == ("indexed" in model.mixers)
        found = {key: g for key, g in our_gradients(chunk).items() if not key.endswith("expert_bias")}
    theirs = to_global(named(wanted, gradients=True), model)
    errors = relative_errors(found, {key: theirs[key] for key in found})
    assert max(errors.values()) <= 1e-6, largest(errors)


def mtp_of(config: Any) -> nn.ModuleDict:
    """transformers ignores the MTP layer's tensors: here it is put together of transformers' parts."""
    config = copy.deepcopy(config)
    config.layer_types, config._experts_implementation = ["full_attention"], "eager"
    width = config.hidden_size
    parts: dict[str, nn.Module] = {
        name: theirs.Qwen3NextRMSNorm(width, eps=config.rms_norm_eps)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    parts["layers"] = nn.ModuleList([theirs.Qwen3NextDecoderLayer(config, 0)])
    parts["fc"] = nn.Linear(2 * width, width, bias=False)
    mtp = nn.ModuleDict(parts)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in mtp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return mtp.double()


def loss_with_mtp(main: Any, mtp: Any, inputs_BS: Tensor, labels_BS: Tensor) -> Tensor:
    """The sum of the next tokens' losses, and the weighted one of the tokens after these."""
    hidden = main.model(inputs_BS).last_hidden_state
    loss = cross_entropy(main.lm_head(hidden).flatten(0, 1), labels_BS.flatten(), reduction="sum")
    ahead = main.model.embed_tokens(inputs_BS[:, 1:])
    both = [mtp["pre_fc_norm_embedding"](ahead), mtp["pre_fc_norm_hidden"](hidden[:, :-1])]
    mixed, length = mtp["fc"](torch.cat(both, -1)), inputs_BS.shape[1] - 1
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    angles = main.model.rotary_emb(mixed, torch.arange(length)[None])
    mixed = mtp["layers"][0](mixed, position_embeddings=angles, attention_mask=mask)
    mixed = mtp["norm"](mixed[0] if isinstance(mixed, tuple) else mixed)
    further = cross_entropy(main.lm_head(mixed).flatten(0, 1), labels_BS[:, 1:].flatten(), reduction="sum")
    return loss + WEIGHT * further


def test_gradients_of_the_mtp_layer_are_those_of_transformers_parts(one_rank: Mesh) -> None:
    model = without_balance(oracle("qwen3_next").ours, mtp_layers=1, mtp_loss_coeff=WEIGHT)
    tokens_BT = random_tokens(length=65)
    inputs_BS, labels_BS = tokens_BT[:, :-1], tokens_BT[:, 1:]
    with in_double():
        main, mtp = eager(oracle("qwen3_next").model), mtp_of(oracle("qwen3_next").model.config)
        loss_with_mtp(main, mtp, inputs_BS, labels_BS).backward()
        whole = nn.ModuleDict({"main": main, "mtp": mtp})
        names = {name: name.removeprefix("main.") for name, _ in whole.named_parameters()}
        chunk = doubled(build_model(model, one_rank, start(TORCH), TORCH)[0])
        weights = {names[name]: tensor for name, tensor in named(whole).items()}
        copy_in([chunk], to_global(weights, model))
        chunk(
            input_ids=inputs_BS.clone(),
            position_ids=torch.arange(64).expand_as(inputs_BS),
            attention_mask=None,
            labels=labels_BS.clone(),
            loss_mask=torch.ones(2, 64),
        ).sum().backward()
    gradients = {names[name]: tensor for name, tensor in named(whole, gradients=True).items()}
    errors = relative_errors(our_gradients(chunk), to_global(gradients, model))
    assert max(errors.values()) <= 1e-6, largest(errors)
