"""Weight decay, the learning-rate schedule and Adam, against closed forms."""

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import MuonConfig, OptimConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.megatron.patches.standins import FusedAdam
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model
from mcore_rl.train.optimizer import build_optimizer, build_schedule, by_muon, decays
from tests.ranks import run_ranks
from tests.tiny_models import TINY


class Groups:
    """As much of an optimizer as a schedule reads."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0, "wd_mult": 1.0}]


def rates(config: OptimConfig, steps: int) -> list[float]:
    """The learning rate of each step."""
    groups = Groups()
    schedule = build_schedule(config, groups, steps)
    found = []
    for _ in range(steps):
        found.append(groups.param_groups[0]["lr"])
        schedule.step(1)
    return found


def test_cosine_after_a_linear_warm_up() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4, schedule="cosine")
    expected = [0.25, 0.5, 0.75]
    expected += [0.1 + 0.9 * (1 + math.cos(math.pi * step / 17)) / 2 for step in range(17)]
    assert rates(config, 20) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "after"),
    [("constant", [1.0] * 6), ("linear", [1 - 0.9 * step / 6 for step in range(6)]), ("wsd", [1, 1, 1, 1, 0.7, 0.4])],
)
@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 5])
def test_step_t_of_a_warm_up_over_w_has_t_over_w_of_the_rate(schedule, after, warmup_steps):
    """The last step of the warm-up is the first of the decay; without a warm-up that is the first of the run."""
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=warmup_steps, schedule=schedule, wsd_decay_steps=3)
    expected = [(step + 1) / warmup_steps for step in range(warmup_steps - 1)] + after
    assert rates(config, len(expected)) == pytest.approx(expected)


def test_a_resumed_warm_up_goes_on_where_it_was() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4, schedule="constant")
    saved = build_schedule(config, Groups(), 9)
    saved.step(2)
    groups = Groups()
    schedule = build_schedule(config, groups, 9)
    schedule.load_state_dict(saved.state_dict())
    assert groups.param_groups[0]["lr"] == pytest.approx(0.75)


def test_wsd_is_constant_and_then_falls() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.0, schedule="wsd", wsd_decay_steps=5)
    expected = [1.0] * 15 + [1.0 - step / 5 for step in range(5)]
    assert rates(config, 20) == pytest.approx(expected)


def test_constant_is_constant() -> None:
    assert rates(OptimConfig(lr=0.5, schedule="constant"), 7) == pytest.approx([0.5] * 7)


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", (4, 4), True),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", (2, 4, 4), True),
        ("decoder.layers.0.pre_mlp_layernorm.weight", (4,), False),
        ("decoder.layers.0.self_attention.linear_qkv.bias", (4,), False),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias", (2, 4), False),
        ("decoder.layers.0.mlp.experts.linear_fc2.bias1", (4,), False),
        ("decoder.layers.0.mlp.router.bias", (2,), False),
        ("decoder.layers.0.self_attention.q_layernorm.weight", (4,), False),
        ("embedding.word_embeddings.weight", (4, 4), True),
    ],
)
def test_matrices_decay_and_vectors_do_not(name: str, shape: tuple[int, ...], decayed: bool) -> None:
    assert decays(OptimConfig(), torch.empty(shape), name) is decayed


def test_embeddings_and_query_norms_decay_as_asked() -> None:
    config = OptimConfig(decay_embeddings=False, decay_qk_norms=True)
    assert not decays(config, torch.empty(4, 4), "module.output_layer.weight")
    assert decays(config, torch.empty(4), "decoder.layers.0.self_attention.k_layernorm.weight")


def parameters_by_optimizer() -> dict[str, dict[str, list[str]]]:
    """On a rank: for each family's model the parameters of Muon and of Adam, all layers' as one."""
    tables: dict[str, dict[str, list[str]]] = {}
    models = TINY | {"deepseek_v3, mtp_layers=1": TINY["deepseek_v3"].model_copy(update={"mtp_layers": 1})}
    models["qwen3_moe, head=score"] = TINY["qwen3_moe"].model_copy(update={"head": "score"})
    settings = PlatformConfig(layers="torch", precision="fp32")
    platform, mesh = start(settings), build_mesh(MeshConfig())
    seed_ranks(1)
    for family, model in models.items():
        (chunk,) = build_model(model, mesh, platform, settings)
        found: dict[str, set[str]] = {"muon": set(), "adam": set()}
        for name, param in chunk.named_parameters():
            # Megatron-Core 0.16 and 0.19 have two names for a layer of multi-token prediction.
            plain = re.sub(r"\.\d+\.", ".*.", re.sub("(transformer|mtp_model)_layer", "layer", name))
            if param.requires_grad:
                found["muon" if by_muon(OptimConfig(kind="muon"), param, name) else "adam"].add(plain)
        tables[family] = {kind: sorted(names) for kind, names in found.items()}
    return tables


@pytest.mark.full
def test_every_familys_parameters_have_the_optimizer_that_people_last_read() -> None:
    """After a change that is meant: RENEW_GOLDEN=1 python -m pytest tests/unit/train/test_optimizer.py."""
    golden = Path(__file__).parents[2] / "golden/optimizers.json"
    (tables,) = run_ranks(parameters_by_optimizer, 1)
    if os.environ.get("RENEW_GOLDEN"):
        golden.write_text(json.dumps(tables, indent=1) + "\n")
    assert tables == json.loads(golden.read_text())


def test_the_routers_matrices_can_be_muons_and_experts_biases_cannot() -> None:
    config = OptimConfig(kind="muon", muon=MuonConfig(router=True))
    assert by_muon(config, torch.empty(8, 4), "decoder.layers.0.mlp.router.weight")
    assert not by_muon(config, torch.empty(8), "decoder.layers.0.mlp.router.bias")
    assert not by_muon(config, torch.empty(2, 4), "decoder.layers.0.mlp.experts.linear_fc1.bias")


def test_adam_equals_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = nn.Parameter(torch.randn(7, 3, generator=generator))
    theirs = nn.Parameter(ours.detach().clone())
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    adam, oracle = FusedAdam([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(5):
        ours.grad = torch.randn(7, 3, generator=generator)
        theirs.grad = ours.grad.clone()
        adam.step()
        oracle.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    assert set(adam.state[ours]) == {"exp_avg", "exp_avg_sq"}
    assert adam.param_groups[0]["step"] == 5


def rounded_adamw(weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """The bf16 weight after steps of AdamW in fp32 (arXiv 1711.05101) whose moments wait in bf16 between steps."""
    main, mean, squares = weight.float(), torch.zeros(weight.shape), torch.zeros(weight.shape)
    for step, gradient in enumerate(gradients, start=1):
        grad = gradient.float()
        mean, squares = 0.9 * mean + 0.1 * grad, 0.95 * squares + 0.05 * grad**2
        change = (mean / (1 - 0.9**step)) / ((squares / (1 - 0.95**step)).sqrt() + 1e-8)
        main = main * (1 - 1e-2 * 0.1) - 1e-2 * change
        mean, squares = mean.bfloat16().float(), squares.bfloat16().float()
    return main


def test_adam_with_moments_in_bf16_equals_the_formula_and_goes_on_alike_after_a_load() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 3, generator=generator).bfloat16()
    gradients = [torch.randn(7, 3, generator=generator).bfloat16() for _ in range(6)]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    settings |= {"master_weights": True, "use_decoupled_grad": True}
    settings |= {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    whole, parts = (nn.Parameter(weight.clone()) for _ in range(2))
    adam, first = FusedAdam([whole], **settings), FusedAdam([parts], **settings)
    for step, gradient in enumerate(gradients):
        if step == 3:
            second = FusedAdam([parts], **settings)
            second.load_state_dict(first.state_dict())
            first = second
        for param, optimizer in ((whole, adam), (parts, first)):
            param.decoupled_grad = gradient
            optimizer.step()
    states = adam.state[whole]
    assert {name: state.dtype for name, state in states.items()} == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "master_param": torch.float32,
    }
    torch.testing.assert_close(states["master_param"], rounded_adamw(weight, gradients), rtol=0, atol=1e-6)
    assert torch.equal(whole, states["master_param"].bfloat16()) and torch.equal(whole, parts)
    assert all(torch.equal(states[name], first.state[parts][name]) for name in states)


def test_moments_in_bf16_are_refused_where_megatron_has_an_adam_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with apex, whose Adam has fp32 moments only."""
    monkeypatch.setattr("megatron.core.optimizer.Adam", torch.optim.AdamW)
    settings = SimpleNamespace(overlap_param_gather=False)
    chunks: Any = [SimpleNamespace(ddp_config=settings)]
    platform: Any = SimpleNamespace(dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="and Megatron has that of torch"):
        build_optimizer(OptimConfig(exp_avg_dtype="bf16"), platform, chunks)


def test_adam_counts_steps_in_a_group_without_parameters() -> None:
    adam = FusedAdam([{"params": []}, {"params": [nn.Parameter(torch.ones(1))]}])
    adam.step()
    assert [group["step"] for group in adam.param_groups] == [1, 1]
