"""Megatron's multi-token prediction is that of transformers: the same gradients of the same two losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import MtpModel

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, copy_in
from tests.hf_models import DEEPSEEK, GLM4, TOLERANCE, VOCAB, Tensors, random_tokens, randomize
from tests.hf_weights import to_global, to_hf
from tests.unit.model.test_gradients_equal_transformers import our_gradients

DEPTH, WEIGHT = 2, 0.3
LAYERS = DEEPSEEK["num_hidden_layers"]
FAMILIES = {"DeepseekV3": DEEPSEEK, "Glm4Moe": GLM4}
each_family = pytest.mark.parametrize("family", FAMILIES)


def main_and_mtp(family: str) -> tuple[Any, Any]:
    settings = FAMILIES[family] | {"num_mtp_layers": DEPTH, "first_k_dense_replace": 0}
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    main = getattr(transformers, f"{family}ForCausalLM")(config)
    mtp = MtpModel(main, DEPTH)
    randomize(mtp)
    randomize(main)
    mtp.tie_with_main_model(main)
    return main, mtp


def our_model(main: Any) -> ModelConfig:
    """With a padded vocabulary: transformers has no such rows, whose probability must be 0 in both losses."""
    model = checked_model_from_hf(main.config.to_dict())
    model = model.model_copy(update={"mtp_loss_coeff": WEIGHT, "vocab_multiple": 16})
    assert model.padded_vocab_size > model.vocab_size
    return model


def named(main: Any, mtp: Any) -> dict[str, Tensor]:
    """Both models' tensors as a checkpoint names them, experts fused; the two shared tensors once."""
    tensors = dict(main.named_parameters()) | dict(main.named_buffers())
    for name, tensor in [*mtp.named_parameters(), *mtp.named_buffers()]:
        kind, _, rest = name.partition(".")
        if kind == "layers":
            depth, _, rest = rest.partition(".")
            rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            tensors[f"model.layers.{LAYERS + int(depth)}.{rest}"] = tensor
    return {name: tensor for name, tensor in tensors.items() if "inv_freq" not in name}


def gradients_of_transformers(main: Any, mtp: Any, tokens_BT: Tensor) -> Tensors:
    """Gradients of the summed losses: the next token's and, at depth k, the weighted one of the token k further on."""
    inputs_BS, labels_BS = tokens_BT[:, :-1], tokens_BT[:, 1:]
    length = inputs_BS.shape[1]
    hidden_BSD = main.model(inputs_BS).last_hidden_state
    loss = total_loss(main.lm_head(hidden_BSD), labels_BS)
    for k in range(1, DEPTH + 1):
        count = length - k
        hidden_BSD = mtp.forward_layer(
            k - 1, hidden_BSD[:, :count], torch.arange(count)[None], None, input_ids=tokens_BT[:, k : k + count]
        )
        # A sum over the positions that have a label; what divides it is the number of all positions, as in the paper.
        loss = loss + WEIGHT / DEPTH * total_loss(main.lm_head(hidden_BSD), tokens_BT[:, k + 1 :])
    loss.backward()
    return {name: t.grad if t.grad is not None else torch.zeros_like(t) for name, t in named(main, mtp).items()}


def total_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")


def gradients_of_megatron(model: ModelConfig, weights: Tensors, tokens_BT: Tensor, mesh: Mesh) -> Tensors:
    """Gradients of Megatron's loss per token, MTP loss included, as global tensors."""
    chunk = build_model(model, mesh, start(PlatformConfig()), PlatformConfig())[0]
    copy_in([chunk], weights)
    losses_BS = chunk(
        input_ids=tokens_BT[:, :-1].clone(),
        position_ids=torch.arange(tokens_BT.shape[1] - 1).expand(len(tokens_BT), -1),
        attention_mask=None,
        labels=tokens_BT[:, 1:].clone(),
        loss_mask=torch.ones(len(tokens_BT), tokens_BT.shape[1] - 1),
    )
    losses_BS.sum().backward()
    return our_gradients(chunk)


@each_family
def test_gradients_of_both_losses_equal_those_of_transformers(family: str, one_rank: Mesh) -> None:
    main, mtp = main_and_mtp(family)
    model = our_model(main)
    tokens_BT = random_tokens(length=17)
    weights = to_global({name: tensor.detach() for name, tensor in named(main, mtp).items()}, model)
    ours = gradients_of_megatron(model, weights, tokens_BT, one_rank)
    theirs = to_global(gradients_of_transformers(main, mtp, tokens_BT), model)
    for key in (key for key in theirs if not key.endswith("expert_bias")):
        error = (ours[key] - theirs[key]).norm() / theirs[key].norm()
        assert error <= 1e-5, (key, error.item())
    assert ours["output_layer.weight"].shape[0] == model.padded_vocab_size > VOCAB
    assert not ours["output_layer.weight"][VOCAB:].any(), "rows that pad the vocabulary have a gradient"


@each_family
def test_logits_are_those_of_the_main_model_and_train_no_mtp_layer(family: str, one_rank: Mesh) -> None:
    main, mtp = main_and_mtp(family)
    model, tokens_BS = our_model(main), random_tokens()
    chunk = build_model(model, one_rank, start(PlatformConfig()), PlatformConfig())[0]
    copy_in([chunk], to_global({name: tensor.detach() for name, tensor in named(main, mtp).items()}, model))
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    logits_BSV = chunk(input_ids=tokens_BS, position_ids=positions_BS, attention_mask=None)
    torch.testing.assert_close(logits_BSV[..., :VOCAB], main(tokens_BS).logits, rtol=0, atol=TOLERANCE)
    logits_BSV.sum().backward()
    assert [name for name, param in chunk.named_parameters() if param.grad is None] == [
        name for name, _ in chunk.named_parameters() if name.startswith("mtp.")
    ]


@each_family
def test_transformers_loads_exported_mtp_layers_and_lacks_nothing(family: str, tmp_path: Path) -> None:
    main, mtp = main_and_mtp(family)
    model = our_model(main)
    tensors = to_hf(to_global({name: tensor.detach() for name, tensor in named(main, mtp).items()}, model), model)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    main.config.save_pretrained(tmp_path)
    loaded = type(main).from_pretrained(tmp_path)
    # transformers looks for MTP weights only at the layers where the published models have them
    loaded._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS + k}\..*" for k in range(DEPTH)]
    again = named(loaded, MtpModel.from_pretrained(loaded))
    wanted = named(main, mtp)
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
