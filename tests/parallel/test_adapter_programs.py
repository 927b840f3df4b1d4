"""Low-rank adapters in preference optimisation and reinforcement learning, on every mesh as on one rank."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.dpo import DPOConfig, DPOSection
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.model.build import unwrap
from mcore_rl.rl.models.reference import Reference
from mcore_rl.storage.checkpoint import reference_to
from mcore_rl.storage.checkpoints.weights import save_weights
from tests.parallel import test_preferences, test_rl_updates
from tests.parallel.parity import Tensors, batch, random_weights
from tests.parallel.plain import set_up_plain
from tests.parallel.preference_steps import dpo_steps
from tests.parallel.rl_steps import moved_parameters, updates
from tests.ranks import run_ranks
from tests.sections import loss_config

LORA = LoraConfig(rank=4, alpha=8.0)
MESHES = {
    "tp2-etp2": MeshConfig(tp=2, etp=2),
    "ep2-overlapped": MeshConfig(ep=2, dp=2, overlap_grad_reduce=True, overlap_param_gather=True),
    "pp2-vpp2": MeshConfig(pp=2, vpp=2),
    "cp2": MeshConfig(cp=2),
}
CHANGES: list[dict[str, Any]] = [{"kind": "grpo", "kl_coeff": 0.1}, {"kind": "gspo"}]


def weights(config: RunConfig, seed: int) -> Tensors:
    """Weights of the same base with random adapters."""
    initial = random_weights(config.model_copy(update={"mesh": MeshConfig()}))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in initial.items():
        if name.endswith((".adapter.A", ".adapter.B")):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return initial


def dpo_config(mesh: str) -> DPOConfig:
    config = test_preferences.config_of(MESHES.get(mesh, MeshConfig()))
    return config.model_copy(update={"lora": LORA})


@cache
def dpo_reports(mesh: str) -> list[Any]:
    config = dpo_config(mesh)
    work = (config, weights(config, 1), weights(config, 2), [DPOSection()])
    return run_ranks(dpo_steps, config.mesh.smallest_world, *work)


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_on_preferences_do_not_depend_on_the_mesh(mesh: str) -> None:
    ((expected, (steps,)),) = dpo_reports("one")
    for logprobs, (found,) in dpo_reports(mesh):
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=0)
        for ours, theirs in zip(found, steps, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6, abs=4e-6)


def rl_config(mesh: str) -> RlRunConfig:
    config = test_rl_updates.config_of("qwen3_moe", MESHES.get(mesh, MeshConfig()), replay="r2")
    return config.model_copy(update={"lora": LORA})


@cache
def rl_reports(mesh: str, folder: Path) -> list[list[dict[str, float]]]:
    config = rl_config(mesh)
    work = (config, weights(config, 1), weights(config, 2), folder / mesh, CHANGES)
    ranks = run_ranks(updates, config.mesh.smallest_world, *work)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize("mesh", MESHES)
def test_updates_under_replayed_routes_do_not_depend_on_the_mesh(mesh: str, folder: Path) -> None:
    for ours, theirs in zip(rl_reports(mesh, folder), rl_reports("one", folder), strict=True):
        for update, expected in zip(ours, theirs, strict=True):
            for name, value in expected.items():
                allowed = 4 * 2**-21 if name.startswith("max/") else 1e-6
                assert update[name] == pytest.approx(value, rel=2e-6, abs=allowed), name


@pytest.mark.parametrize(
    ("kind", "mesh"), [("grpo", "one"), ("gspo", "one"), ("ppo", "one"), ("grpo", "ep2-overlapped")]
)
def test_updates_of_a_policy_move_its_adapters_alone(kind: str, mesh: str) -> None:
    """Neither routers nor the biases on the choice of experts."""
    on = MESHES.get(mesh, MeshConfig())
    config = test_rl_updates.config_of("deepseek_v3-shallow", on, replay="r2")
    rl = config.rl.model_copy(update={"loss": loss_config(kind=kind)})
    adapted = config.model_copy(update={"lora": LORA, "rl": rl})
    for moved in run_ranks(moved_parameters, on.smallest_world, adapted):
        assert {name for name, has_moved in moved.items() if has_moved} == {
            name for name in moved if ".adapter." in name
        }
        assert any("expert_bias" in name for name in moved)


def references(config: RlRunConfig, folder: Path) -> dict[str, Any]:
    """On a rank: logits of a policy's beginning, of it after a change, and of both kinds of references of it then."""
    state = set_up_plain(config)
    chunk = unwrap(state.chunks[0]).eval()
    inputs = batch(state, 0)[0].model_inputs(with_labels=False)
    base = save_weights(state.chunks, state.mesh, config.model, folder / "base")
    kinds = {
        name: Reference(
            state.chunks,
            state.mesh,
            config.model,
            folder / name,
            folder / "checkpoints",
            shares_base=name != "whole",
            base=reference_to(base) if name == "saved-alone" else {},
        )
        for name in ("whole", "shared", "saved-alone")
    }
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["begin"] = chunk(**inputs)
        for reference in kinds.values():
            reference.set(0)
        for name, param in chunk.named_parameters():
            if name.endswith("adapter.B"):
                param.normal_(std=0.1)
        found["changed"] = chunk(**inputs)
        for name, reference in kinds.items():
            with reference.installed():
                found[name] = chunk(**inputs)
            reference.resume(3)
            with reference.installed():
                found[f"{name} resumed"] = chunk(**inputs)
        found["again"] = chunk(**inputs)
    found["bytes"] = [kinds[name].waiting_bytes.host for name in ("whole", "shared")]
    found["saved"] = [
        sum(file.stat().st_size for file in (folder / name).rglob("*.distcp")) for name in kinds
    ]
    found["trained"] = sum(param.nbytes for param in chunk.parameters() if param.requires_grad)
    return found


def test_a_reference_that_shares_the_base_is_its_adapters_alone(tmp_path: Path) -> None:
    """New ones, which change nothing: it is the base bit for bit, also in a run that resumes."""
    (found,) = run_ranks(references, 1, rl_config("one"), tmp_path)
    for name in ("whole", "shared", "saved-alone"):
        assert torch.equal(found[name], found["begin"]), name
        assert torch.equal(found[f"{name} resumed"], found["begin"]), name
    assert torch.equal(found["again"], found["changed"])
    assert (found["changed"] - found["begin"]).abs().max() > 0.05
    assert found["bytes"][1] == found["trained"] < found["bytes"][0] / 5
    whole, shared, alone = found["saved"]
    assert alone < whole / 2 and whole == shared
