"""Low-rank adapters train on every mesh as on one rank, over a base that stays as it is.

Low-rank adapters in preference optimisation and reinforcement learning, on every mesh as on one rank.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig, Target
from mcore_rl.config.preferences import DPOConfig, DPOSection
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig, RunConfig
from mcore_rl.megatron.platform import start
from mcore_rl.model import adapters
from mcore_rl.model.build import build_model, copy_in, unwrap
from mcore_rl.model.layers import adapters as layers
from mcore_rl.rl.models.reference import Reference
from mcore_rl.storage.checkpoint import reference_to
from mcore_rl.storage.checkpoints.write import save_weights
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead, train_step
from tests.parallel import test_preferences, test_rl_updates
from tests.parallel.parity import (
    LENGTH,
    MESHES,
    ROWS,
    STEPS,
    Outcome,
    Tensors,
    assembled,
    assert_equal_training,
    batch,
    config_of,
    fresh_weights,
    owned,
    random_weights,
    run,
    set_up_plain,
)
from tests.parallel.rl_steps import moved_parameters, updates
from tests.parallel.test_preferences import dpo_steps
from tests.ranks import run_ranks
from tests.sections import loss_config
from tests.tiny_models import TINY, shallow

LORA = LoraConfig(rank=4, alpha=8.0)
PROGRAM_MESHES = ("tp2-etp2", "ep2-overlapped", "pp2-vpp2", "cp2")
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
    config = test_preferences.config_of(MESHES[mesh])
    return config.model_copy(update={"lora": LORA})


@cache
def dpo_reports(mesh: str) -> list[Any]:
    config = dpo_config(mesh)
    work = (config, weights(config, 1), weights(config, 2), [DPOSection()])
    return run_ranks(dpo_steps, config.mesh.smallest_world, *work)


@pytest.mark.full
@pytest.mark.parametrize("mesh", PROGRAM_MESHES)
def test_steps_on_preferences_do_not_depend_on_the_mesh(mesh: str) -> None:
    ((expected, (steps,)),) = dpo_reports("1")
    for logprobs, (found,) in dpo_reports(mesh):
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=0)
        for ours, theirs in zip(found, steps, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6, abs=4e-6)


def rl_config(mesh: str) -> RlRunConfig:
    config = test_rl_updates.config_of("qwen3_moe", MESHES[mesh], replay="r2")
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


@pytest.mark.full
@pytest.mark.parametrize("mesh", PROGRAM_MESHES)
def test_updates_under_replayed_routes_do_not_depend_on_the_mesh(mesh: str, folder: Path) -> None:
    for ours, theirs in zip(rl_reports(mesh, folder), rl_reports("1", folder), strict=True):
        for update, expected in zip(ours, theirs, strict=True):
            for name, value in expected.items():
                allowed = 4 * 2**-21 if name.startswith("max/") else 1e-6
                assert update[name] == pytest.approx(value, rel=2e-6, abs=allowed), name


@pytest.mark.matrix("grpo-ep2-overlapped")
@pytest.mark.parametrize(("kind", "mesh"), [("grpo", "1"), ("gspo", "1"), ("ppo", "1"), ("grpo", "ep2-overlapped")])
def test_updates_of_a_policy_move_its_adapters_alone(kind: str, mesh: str) -> None:
    """Neither routers nor the biases on the choice of experts."""
    on = MESHES[mesh]
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
    found["saved"] = [sum(file.stat().st_size for file in (folder / name).rglob("*.distcp")) for name in kinds]
    found["trained"] = sum(param.nbytes for param in chunk.parameters() if param.requires_grad)
    return found


@pytest.mark.full
def test_a_reference_that_shares_the_base_is_its_adapters_alone(tmp_path: Path) -> None:
    """New ones, which change nothing: it is the base bit for bit, also in a run that resumes."""
    (found,) = run_ranks(references, 1, rl_config("1"), tmp_path)
    for name in ("whole", "shared", "saved-alone"):
        assert torch.equal(found[name], found["begin"]), name
        assert torch.equal(found[f"{name} resumed"], found["begin"]), name
    assert torch.equal(found["again"], found["changed"])
    assert (found["changed"] - found["begin"]).abs().max() > 0.05
    assert found["bytes"][1] == found["trained"] < found["bytes"][0] / 5
    whole, shared, alone = found["saved"]
    assert alone < whole / 2 and whole == shared


FUSED, SPLIT = LoraConfig(rank=4, alpha=8.0), LoraConfig(rank=4, alpha=8.0, expert_gate_up="split")
EVERY_AXIS = (
    *("tp2", "pp2", "pp2-vpp2", "ep2", "tp2-ep2", "tp2-etp2", "etp2", "tp2-etp2-ep2", "cp2", "dp2", "tp2-dp2"),
    *("tp2-pp2-vpp2", "dp2-overlapped", "tp2-dp2-overlapped", "ep2-overlapped", "pp2-vpp2-dp2-overlapped"),
)
CASES = [
    *(("qwen3_moe", mesh) for mesh in EVERY_AXIS),
    *(("deepseek_v3", mesh) for mesh in ("tp2", "tp2-ep2", "tp2-etp2", "pp2-vpp2", "ep2", "cp2")),
    *(("qwen2_moe", "tp2-ep2"), ("gpt_oss", "tp2-ep2"), ("llama", "tp2"), ("llama", "tp2-nosp")),
]


def lora_of(model: str) -> LoraConfig:
    return SPLIT if model in ("deepseek_v3", "gpt_oss") else FUSED


@cache
def single_rank(model: ModelConfig, lora: LoraConfig) -> tuple[Tensors, Outcome]:
    """Weights with random adapters, B too, and the three steps on one rank from them."""
    config = config_of(model, MeshConfig(), lora=lora)
    initial = random_weights(config)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in initial.items():
        if name.endswith((".adapter.A", ".adapter.B")):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return initial, run(config, 1, initial)


def assert_trains_as_one_rank(
    name: str,
    mesh: MeshConfig,
    platform: PlatformConfig | None = None,
    sabotage: Callable[[TrainState], None] | None = None,
    targets: tuple[Target, ...] | Literal["auto"] = "auto",
) -> None:
    model, lora = shallow(TINY[name], mesh), lora_of(name).model_copy(update={"targets": targets})
    initial, reference = single_rank(model, lora)
    config = config_of(model, mesh, platform, lora)
    outcome = run(config, mesh.smallest_world, initial, sabotage)
    assert_equal_training(outcome, reference)
    trained = {key for key, tensor in outcome.weights.items() if not torch.equal(tensor, initial[key])}
    assert trained == {key for key in initial if ".adapter." in key}


@pytest.mark.matrix("deepseek_v3-tp2-ep2")
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_three_steps_do_not_depend_on_the_mesh(model: str, mesh: str) -> None:
    assert_trains_as_one_rank(model, MESHES[mesh])


RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "moe": {"recompute": "selective", "recompute_modules": ("moe",)},
}
TARGETS: dict[str, tuple[Target, ...] | Literal["auto"]] = {
    "all": "auto",
    "attention": ("attention",),
    "experts": ("experts",),
}


@pytest.mark.full
@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("targets", TARGETS)
def test_recomputing_activations_changes_nothing(targets: str, recompute: str) -> None:
    """Torch gives no gradient to what is recomputed from inputs without one, as a frozen embedding's output."""
    platform = PlatformConfig(layers="torch", **RECOMPUTED[recompute])
    assert_trains_as_one_rank("qwen3_moe", MESHES["tp2-etp2"], platform, targets=TARGETS[targets])


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["1", "tp2-etp2"])
def test_adapters_train_in_16_bits(mesh: str) -> None:
    """The rank of experts, 2, is not one that torch's grouped products take in bf16. A few tokens go to other experts
    than in fp32.
    """
    model = shallow(TINY["qwen3_moe"])
    initial, reference = single_rank(model, SPLIT)
    on = MESHES[mesh]
    config = config_of(model, on, PlatformConfig(layers="torch", precision="bf16"), SPLIT)
    outcome = run(config, on.smallest_world, {key: tensor.clone() for key, tensor in initial.items()})
    assert outcome.losses == pytest.approx(reference.losses, rel=5e-3)
    assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=5e-2)


def compiled_steps(config: PretrainConfig, initial: Tensors) -> tuple[list[float], Tensors]:
    """On a rank: losses of the steps with the layers that are compiled for CPUs, and the weights after them."""
    state = set_up(config, start(config.platform))
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    reports = [train_step(state, batch(state, step, LENGTH, ROWS), NextTokenHead()) for step in range(STEPS)]
    return [report.loss for report in reports], assembled([owned(state)])


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_compiled_layers_train_adapters_alike(model: str) -> None:
    shape, lora = shallow(TINY[model]), lora_of(model)
    initial, reference = single_rank(shape, lora)
    config = config_of(shape, MeshConfig(), PlatformConfig(layers="cpu"), lora)
    losses, weights = run_ranks(compiled_steps, 1, config, initial)[0]
    assert losses == pytest.approx(reference.losses, rel=1e-6)
    assert max((weights[key] - tensor).abs().max() for key, tensor in reference.weights.items()) <= 3e-5


def kept_of_weights_size(config: PretrainConfig) -> int:
    """On a rank: number of tensors that a step keeps for its backward pass with the shape of all experts' weights."""
    state = set_up(config, start(config.platform))
    weights = {param.data_ptr(): param.shape for chunk in state.chunks for param in chunk.parameters()}
    shapes = {shape for shape in weights.values() if len(shape) == 3}
    copies = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal copies
        copies += tensor.shape in shapes and tensor.data_ptr() not in weights
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train_step(state, batch(state, 0, LENGTH, ROWS), NextTokenHead())
    return copies


@pytest.mark.full
@pytest.mark.parametrize("layers", ["torch", "cpu"])
def test_no_sum_of_weights_and_adapters_is_kept(layers: Literal["torch", "cpu"]) -> None:
    """The plan of memory has the weights once."""
    platform = PlatformConfig(layers=layers)
    config = config_of(shallow(TINY["qwen3_moe"]), MeshConfig(), platform, FUSED)
    assert run_ranks(kept_of_weights_size, 1, config) == [0]


def unmark_a(state: TrainState) -> None:
    """The fault of an A that does not say that its gradient is partial under sequence parallelism."""
    for chunk in state.chunks:
        for name, param in chunk.named_parameters():
            if name.endswith("adapter.A"):
                param.sequence_parallel = False


def count_copies(state: TrainState) -> None:
    """The fault of a norm that counts what expert-tensor ranks hold alike once for each."""
    for optimizer in state.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for param in group["params"]:
                param.shared = False


def without_sum(layer: type, state: TrainState) -> None:
    """The fault of a layer whose backward pass does not sum over the ranks."""
    plain = layer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        copy = layers.copy_to_tensor_model_parallel_region
        layers.copy_to_tensor_model_parallel_region = lambda tensor, group: tensor
        try:
            return plain(self, *args, **kwargs)
        finally:
            layers.copy_to_tensor_model_parallel_region = copy

    layer.forward = forward


def read_without_call(state: TrainState) -> None:
    """The fault of parameters that are read before Megatron has gathered them."""
    layers.Adapter.__call__ = lambda self: (self.A, self.B)  # type: ignore[method-assign,assignment]


def move_biases(state: TrainState) -> None:
    """The fault of expert biases that follow the load, over frozen routers."""
    for chunk in state.chunks:
        unwrap(chunk).config.moe_router_bias_update_rate = 1e-3


MUTANTS: dict[str, tuple[str, str, Callable[[TrainState], None]]] = {
    "unmarked": ("qwen3_moe", "tp2", unmark_a),
    "counted": ("qwen3_moe", "tp2-etp2", count_copies),
    "no-sum-over-etp": ("qwen3_moe", "tp2-etp2", partial(without_sum, layers.AdaptedStackedLinear)),
    "no-copy": ("llama", "tp2-nosp", partial(without_sum, layers.AdaptedColumnLinear)),
    "moved-biases": ("deepseek_v3", "ep2", move_biases),
    "not-called": ("qwen3_moe", "dp2-overlapped", read_without_call),
}


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_fails_the_comparison(mutant: str) -> None:
    model, mesh, sabotage = MUTANTS[mutant]
    with pytest.raises(AssertionError, match=r"gradients differ|^\(\[|expert_bias"):
        assert_trains_as_one_rank(model, MESHES[mesh], sabotage=sabotage)


def described(config: PretrainConfig) -> str:
    return adapters.describe_adapters(set_up_plain(config).chunks)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2-etp2", "pp2-vpp2", "ep2"])
def test_matrices_and_parameters_are_counted_over_the_world(mesh: str) -> None:
    model = TINY["qwen3_moe"]
    lines = run_ranks(described, 2, config_of(model, MESHES[mesh], lora=FUSED))
    hidden, inner, experts, layers = model.hidden_size, model.moe.ffn_hidden_size, 8, model.num_layers
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 4 * (3 * hidden + queries + 2 * keys + queries + hidden) * layers
    routed = experts * 2 * (hidden + 2 * inner + inner + hidden) * layers
    assert lines[0] == lines[1]
    assert lines[0].startswith(
        f"adapters: 8 matrices of attention with {attention:,} parameters, 64 matrices of experts with "
        f"{routed:,} parameters; the base has "
    )


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2-etp2", "pp2-vpp2", "ep2", "dp2-overlapped"])
def test_new_adapters_are_the_same_on_every_mesh_and_change_nothing(mesh: str) -> None:
    """The base's random weights depend on the mesh, those of adapters on their names alone."""
    model = TINY["qwen3_moe"]
    config = config_of(model, MeshConfig(), lora=FUSED)
    expected = random_weights(config)
    found = assembled(run_ranks(fresh_weights, 2, config.model_copy(update={"mesh": MESHES[mesh]})))
    names = [name for name in expected if ".adapter." in name]
    assert len(names) == 8
    for name in names:
        assert torch.equal(found[name], expected[name])
        inputs = expected[name].shape[-1]
        spread = expected[name].std().item() * (3 * inputs) ** 0.5
        # Uniform numbers within +-1/sqrt(inputs) have a standard deviation of 1/sqrt(3 * inputs).
        assert spread == (0.0 if name.endswith("B") else pytest.approx(1.0, abs=0.05))


def base_and_off(config: PretrainConfig) -> list[Tensor]:
    """On a rank: logits without adapters, with new ones, with trained ones, and with these off."""
    state = set_up_plain(config)
    chunk = unwrap(state.chunks[0]).eval()
    inputs = batch(state, 0)[0].model_inputs(with_labels=False)
    plain = build_model(config.model, state.mesh, state.platform, config.platform)
    copy_in(plain, assembled([owned(state)]))
    with torch.no_grad():
        logits = [unwrap(plain[0]).eval()(**inputs), chunk(**inputs)]
        for adapter in adapters.adapters_in(state.chunks):
            adapter.B.normal_(std=0.1)
        logits.append(chunk(**inputs))
        with adapters.adapters_off(state.chunks):
            logits.append(chunk(**inputs))
    return logits


@pytest.mark.matrix("deepseek_v3")
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_new_adapters_and_adapters_that_are_off_leave_the_base_bit_for_bit(model: str) -> None:
    base, new, trained, off = run_ranks(base_and_off, 1, config_of(shallow(TINY[model]), MeshConfig(), lora=FUSED))[0]
    assert torch.equal(base, new) and torch.equal(base, off)
    assert (trained - base).abs().max() > 0.1


def merge_loss_of(config: PretrainConfig, initial: Tensors) -> float:
    """On a rank: the part of the adapters that rounding to bf16 loses."""
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    return adapters.merge_loss(state.chunks, torch.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["ep2", "tp2"])
def test_what_merging_loses_does_not_depend_on_the_mesh(mesh: str) -> None:
    """Small adapters of experts lose more than those of attention. With ep2 each rank has all of the latter and half of
    the former; with tp2 each has all of the first projections of latent attention, and half of the rest.
    """
    model, lora = shallow(TINY["deepseek_v3"]), lora_of("deepseek_v3")
    initial = {key: tensor.clone() for key, tensor in single_rank(model, lora)[0].items()}
    for key, tensor in initial.items():
        if key.endswith(".experts.linear_fc1.adapter.B"):
            tensor.mul_(1e-3)
    alone, *ranks = (
        loss
        for on in (MeshConfig(), MESHES[mesh])
        for loss in run_ranks(merge_loss_of, on.smallest_world, config_of(model, on, lora=lora), initial)
    )
    assert alone > 1e-3
    assert ranks == pytest.approx([alone] * 2, rel=1e-4)
