"""The settings by which the same weights compute something else are those by which their logits differ."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.checks.model import model_violations
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.data.batch import Microbatch
from mcore_rl.families.same_model import model_changes
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.model.build import build_model
from mcore_rl.model.inputs import localize
from tests.parallel.parity import LogitsHead
from tests.ranks import run_ranks
from tests.tiny_models import TINY, shallow

LENGTH = 40
OTHERS: dict[str, tuple[Any, ...]] = {
    "norm_eps": (1e-2,),
    "sliding_window": (3, None),
    "head_dim": (32,),
    "num_kv_heads": (2,),
    "ffn_hidden_size": (72,),
    "qkv_bias": ("off",),
    "qk_norm": ("on", "off"),
    "rope.theta": (300.0,),
    "rope.fraction": (0.5, 1.0),
    "rope.scaling": ("none", "llama3", "yarn"),
    "rope.factor": (4.0, 16.0),
    "rope.original_length": (8,),
    "rope.truncate": (True, False),
    "rope.beta_fast": (8.0,),
    "rope.beta_slow": (0.2,),
    "rope.mscale": (0.5,),
    "rope.mscale_all_dim": (0.7,),
    "mla.norm_eps": (1e-2,),
    "mla.q_lora_rank": (24,),
    "moe.top_k": (1, 3),
    "moe.ffn_hidden_size": (40,),
    "moe.normalize_top_k": (True, False),
    "moe.num_groups": (None, 1, 2),
    "moe.top_groups": (1, 4),
    "moe.routed_scaling": (1.0, 3.0),
    "moe.shared_ffn_hidden_size": (32, 64),
    # Settings of training, and those that the names of the tensors show.
    "attention_dropout": (0.5,),
    "hidden_dropout": (0.5,),
    "init_std": (1.0,),
    "max_position": (64,),
    "mtp_loss_coeff": (0.5,),
    "moe.balance": ("none",),
    "moe.aux_loss_coeff": (0.5,),
    "moe.z_loss_coeff": (0.5,),
    "moe.expert_bias_rate": (0.5,),
    "moe.dispatcher": ("allgather",),
}
"""Other values of each setting; what a family refuses, and what gives tensors of another shape, is left out."""
STRETCHED = {"scaling": "yarn", "factor": 8.0, "original_length": 16}


def with_setting(model: ModelConfig, key: str, value: Any) -> ModelConfig:
    tables = model.model_dump(mode="json")
    *section, name = key.split(".")
    (tables[section[0]] if section else tables)[name] = value
    return ModelConfig.model_validate(tables)


def model_of(name: str) -> ModelConfig:
    model = shallow(TINY[name.removesuffix(" yarn").removesuffix(" llama3")])
    # Weights so large that every setting is seen in the logits.
    model = model.model_copy(update={"init_std": 0.3})
    if name.endswith("llama3"):
        rope = {"scaling": "llama3", "factor": 8.0, "original_length": 8192, "theta": 500_000.0}
        model = model.model_copy(update={"rope": model.rope.model_copy(update=rope)})
    if name.endswith("yarn"):
        model = model.model_copy(update={"rope": model.rope.model_copy(update=STRETCHED)})
    return model


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3 yarn", "gpt_oss", "llama llama3"]
)
def test_a_setting_is_reported_exactly_where_it_changes_what_the_weights_compute(name: str) -> None:
    seen = run_ranks(compared, 1, model_of(name))[0]
    assert {key for key, _, _ in seen} >= {"norm_eps", "rope.theta", "init_std"}
    assert [(key, value) for key, value, differs in seen if differs and not reported(name, key, value)] == []
    needless = {key for key, value, _ in seen if reported(name, key, value)} - {
        key for key, _, differs in seen if differs
    }
    # YaRN's range of wavelengths is rounded, or limited: on the 4 of these heads most of its ends are the same.
    assert needless <= {f"rope.{end}" for end in ("original_length", "beta_fast", "beta_slow", "truncate")}


def reported(name: str, key: str, value: Any) -> bool:
    """Whether the comparison names this setting, and no other."""
    model = model_of(name)
    changes = model_changes(model.model_dump(mode="json"), with_setting(model, key, value))
    assert [change.key for change in changes] in ([], [f"model.{key}"])
    return bool(changes)


def compared(model: ModelConfig) -> list[tuple[str, Any, bool]]:
    """On a rank: settings with other values, and whether the same weights then have other logits."""
    start(PlatformConfig(layers="torch"))
    mesh = build_mesh(MeshConfig())
    chunks = built(model, mesh)
    weights = {name: tensor for name, tensor in chunks[0].state_dict().items() if isinstance(tensor, Tensor)}
    before, seen = logits(chunks, mesh), []
    for key, values in OTHERS.items():
        for value in values:
            other = with_setting(model, key, value)
            if other == model or list(model_violations(other)):
                continue
            others = built(other, mesh)
            theirs = {name: t for name, t in others[0].state_dict().items() if isinstance(t, Tensor)}
            if {name: t.shape for name, t in theirs.items()} == {name: t.shape for name, t in weights.items()}:
                others[0].load_state_dict(weights, strict=False)
                seen.append((key, value, not torch.equal(before, logits(others, mesh))))
    return seen


def built(model: ModelConfig, mesh: Mesh) -> list[nn.Module]:
    settings = PlatformConfig(layers="torch")
    seed_ranks(1)
    return build_model(model, mesh, start(settings), settings)


def logits(chunks: list[nn.Module], mesh: Mesh) -> Tensor:
    tokens_BS = torch.randint(120, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    microbatch = Microbatch(
        tokens_BS=tokens_BS,
        labels_BS=tokens_BS,
        loss_mask_BS=torch.ones(1, LENGTH),
        position_ids_BS=torch.arange(LENGTH)[None],
    )
    chunks[0].eval()
    with torch.no_grad():
        local = [localize(microbatch, mesh.cp, torch.device("cpu"))]
        return run_pass(chunks, local, LogitsHead(mesh), backward=False)[0]["logits"]
