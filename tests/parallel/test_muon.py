"""Muon on every kind of mesh, against its formula in float64; its checkpoints, and steps that it skips.

python -m tests.parallel.test_muon          prints the table of docs/algorithms.md
"""

import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import MuonConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.model.build import copy_in, unwrap
from mcore_rl.train.step import NextTokenHead, train_step
from tests.parallel import checkpointing
from tests.parallel.checkpointing import SMALL, SMALL_DEEPSEEK, assert_killed, refusal, run
from tests.parallel.parity import (
    MESHES,
    STEPS,
    Tensors,
    assembled,
    batch,
    distance,
    largest,
    owned,
    random_weights,
    relative_errors,
    set_up_plain,
    whole_gradients,
)
from tests.parallel.parity import config_of as config_of_steps
from tests.parallel.test_checkpoint_resume import killed_in_step_three
from tests.ranks import run_ranks
from tests.tiny_models import TINY, shallow

pytest.importorskip("emerging_optimizers", reason="Muon needs Python 3.12, Megatron-Core 0.19 and emerging-optimizers")

QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
"""Coefficients of the five steps, of https://leloykun.github.io/ponder/muon-opt-coeffs."""
MATRICES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "down_proj", "up_proj")
"""Layers whose weights are Muon's, in the models of these tests."""
LR, DECAY, CLIP = 1e-3, 0.01, 0.3
"""Settings of `parity.config_of`."""


def muon(config: PretrainConfig, **fields: Any) -> PretrainConfig:
    """The config with Muon."""
    optim = config.optim.model_copy(update={"kind": "muon", "muon": MuonConfig(**fields)})
    return config.model_copy(update={"optim": optim})


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz, written out for one matrix in float64."""
    x = matrix / matrix.norm()
    if is_tall := len(x) > len(x.T):
        x = x.T
    for a, b, c in QUINTIC:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


def scaled(matrix: Tensor, factor: float) -> Tensor:
    return factor * math.sqrt(max(matrix.shape)) * orthogonal(matrix)


def direction(model: ModelConfig, key: str, update: Tensor, factor: float) -> Tensor:
    """Muon's direction of a weight `[layers, ..., m, n]` of a checkpoint; those of dense models' first layers are
    `[m, n]`.
    """
    if update.dim() > 2:
        return torch.stack([direction(model, key, part, factor) for part in update])
    if not key.endswith("linear_qkv.weight"):
        return scaled(update, factor)
    heads = model.num_heads // model.num_kv_heads
    # The rows of each key/value head: those of its queries, then of its key, then of its value.
    groups = update.view(model.num_kv_heads, heads + 2, model.head_dim, -1)
    parts = [scaled(part.flatten(0, 2), factor).view_as(part) for part in groups.split([heads, 1, 1], 1)]
    return torch.cat(parts, 1).view_as(update)


class Formula:
    """Muon and AdamW in float64, from the gradients that the ranks have."""

    def __init__(self, config: PretrainConfig, weights: Tensors) -> None:
        self.config = config
        # Experts' biases of DeepSeek's kind are not trained by gradients.
        self.weights = {key: value.double() for key, value in weights.items() if not key.endswith("expert_bias")}
        self.means = {key: torch.zeros_like(value) for key, value in self.weights.items()}
        self.squares = {key: torch.zeros_like(value) for key, value in self.weights.items()}

    def step(self, count: int, gradients: Tensors) -> float:
        """Take step `count` = 1, 2, ... and return the norm of the gradients."""
        norm = math.sqrt(sum(float(gradients[key].double().pow(2).sum()) for key in self.weights))
        for key in self.weights:
            self._update(key, min(1.0, CLIP / norm) * gradients[key].double(), count)
        return norm

    def _update(self, key: str, gradient: Tensor, count: int) -> None:
        settings, is_bias = self.config.optim.muon, key.rpartition(".")[2].startswith("bias")
        weight, mean = self.weights[key], self.means[key]
        is_vector = is_bias or "norm" in key or "softmax_offset" in key
        weight *= 1 if is_vector else 1 - LR * DECAY
        if any(f"{layer}.weight" in key for layer in MATRICES) or (settings.router and "router.weight" in key):
            mean.lerp_(gradient, 1 - settings.momentum)
            ahead = gradient + settings.momentum * (mean - gradient) if settings.nesterov else mean
            weight -= LR * direction(self.config.model, key, ahead, settings.extra_scale_factor)
            return
        square = self.squares[key]
        mean.lerp_(gradient, 0.1)
        square.lerp_(gradient**2, 0.001)
        weight -= LR * (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)).sqrt() + 1e-8)


def recorded_steps(config: PretrainConfig, initial: Tensors) -> list[dict[str, Any]]:
    """On a rank: its pieces of the gradients and of the weights of each step."""
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    records = []
    for step in range(STEPS):
        with whole_gradients(state) as gradients:
            report = train_step(state, batch(state, step), NextTokenHead())
        records.append({"gradients": gradients, "weights": owned(state), "norm": report.grad_norm})
    return records


def steps_of(config: PretrainConfig, initial: Tensors) -> list[dict[str, Any]]:
    """Gradients, weights and norm of each step of a mesh, as global tensors."""
    ranks = run_ranks(recorded_steps, config.mesh.smallest_world, config, initial)
    return [
        {name: assembled([record[name] for record in records]) for name in ("gradients", "weights")}
        | {"norm": records[0]["norm"]}
        for records in zip(*ranks, strict=True)
    ]


def assert_by_formula(config: PretrainConfig, initial: Tensors, rounding: float = 0.0) -> list[dict[str, Any]]:
    """Take the steps of a config, and compare each with the formula's step on the same gradients, to a thousandth of a
    step of Adam's and the `rounding` of weights.
    """
    formula, steps = Formula(config, initial), steps_of(config, initial)
    for count, step in enumerate(steps, start=1):
        assert step["norm"] == pytest.approx(formula.step(count, step["gradients"]), rel=1e-5)
        errors = {
            key: (distance(step["weights"][key], value).abs() - rounding * value.abs()).max().item()
            for key, value in formula.weights.items()
        }
        assert max(errors.values()) <= LR / 1000, (count, largest(errors))
    return steps


CASES = [("qwen3_moe", mesh) for mesh in ("tp2", "ep2", "pp2", "dp2", "tp2-ep2", "tp2-etp2", "cp2", "pp2-vpp2")]
CASES += [("deepseek_v3", mesh) for mesh in ("tp2", "tp2-ep2", "pp2")] + [("gpt_oss", "tp2-ep2")]
OVERLAPPED = MeshConfig(dp=2, overlap_grad_reduce=True)


@cache
def on_one_rank(model: ModelConfig) -> tuple[Tensors, list[dict[str, Any]]]:
    """The random weights of a model, and the steps of a single rank from them."""
    config = muon(config_of_steps(model, MeshConfig()))
    initial = random_weights(config)
    return initial, steps_of(config, initial)


@pytest.mark.matrix("qwen3_moe-pp2", "qwen3_moe-dp2", "deepseek_v3-tp2-ep2")
@pytest.mark.parametrize(("family", "mesh"), CASES, ids=[f"{family}-{mesh}" for family, mesh in CASES])
def test_muon_is_its_formula_in_float64_on_every_mesh(family: str, mesh: str) -> None:
    """Gradients are compared with one rank's too, because Muon's step does not depend on the size of a gradient."""
    on_mesh = OVERLAPPED if mesh == "dp2" else MESHES[mesh]
    initial, reference = on_one_rank(shallow(TINY[family], on_mesh))
    ours = assert_by_formula(muon(config_of_steps(shallow(TINY[family], on_mesh), on_mesh)), initial)
    for one, other in zip(ours, reference, strict=True):
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
        worst = relative_errors(one["gradients"], other["gradients"])
        assert max(worst.values()) <= 2e-5, largest(worst)


@pytest.mark.parametrize(
    "fields", [{"nesterov": False, "router": True}, {"momentum": 0.8, "extra_scale_factor": 1.0}], ids=["mean", "size"]
)
def test_fields_of_muon_are_those_of_its_formula(fields: dict[str, Any]) -> None:
    config = muon(config_of_steps(SMALL, MeshConfig()), **fields)
    assert_by_formula(config, random_weights(config))


def test_in_bf16_the_weights_are_those_of_fp32_copies() -> None:
    """Gradients are summed in fp32; a weight of the model is the rounded copy."""
    config = muon(config_of_steps(SMALL, MESHES["tp2-ep2"], PlatformConfig(layers="torch", precision="bf16")))
    single = muon(config_of_steps(SMALL, MeshConfig(), config.platform))
    assert_by_formula(config, random_weights(single), rounding=2**-8)


def not_finite(config: PretrainConfig) -> list[tuple[bool, bool]]:
    """On a rank: whether each of two steps was skipped and changed a weight, where rank 1's first gradient is not
    finite in one of Muon's matrices.
    """
    state, found = set_up_plain(config), []
    finalize = unwrap(state.chunks[0]).config.finalize_model_grads_func

    def spoil(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        if state.mesh.world.rank == 1 and state.progress.step == 0:
            next(p for n, p in state.chunks[0].named_parameters() if "linear_fc1" in n).main_grad[0, 0] = math.inf

    unwrap(state.chunks[0]).config.finalize_model_grads_func = spoil
    for step in range(2):
        before = [param.detach().clone() for param in state.chunks[0].parameters()]
        report = train_step(state, batch(state, step), NextTokenHead())
        after = list(state.chunks[0].parameters())
        is_same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        found.append((report.skipped, not is_same))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(precision: Any) -> None:
    config = muon(config_of_steps(SMALL, MESHES["ep2"], PlatformConfig(layers="torch", precision=precision)))
    assert run_ranks(not_finite, 2, config) == [[(True, False), (False, True)]] * 2


def config_of(run_dir: Path, model: ModelConfig, mesh: MeshConfig, precision: Any = "fp32", **options: Any) -> Any:
    """A config of a run with checkpoints and Muon."""
    return muon(checkpointing.config_of(run_dir, model, mesh, precision, **options))


@pytest.mark.matrix("fp32-tp2-ep2")
@pytest.mark.parametrize(
    ("model", "mesh", "precision"),
    [
        (SMALL, MeshConfig(tp=2, ep=2), "fp32"),
        (SMALL_DEEPSEEK, MeshConfig(ep=2, dp=2, overlap_grad_reduce=True), "bf16"),
        (SMALL_DEEPSEEK, MeshConfig(pp=2), "fp32"),
        (SMALL_DEEPSEEK, MeshConfig(pp=2), "bf16"),
    ],
    ids=["fp32-tp2-ep2", "bf16-ep2-overlap", "fp32-stage-without-experts", "bf16-stage-without-experts"],
)
def test_a_run_that_was_killed_resumes_bit_equal(
    model: ModelConfig, mesh: MeshConfig, precision: str, tmp_path: Path
) -> None:
    whole = run(config_of(tmp_path / "whole", model, mesh, precision), until=5)
    config = config_of(tmp_path / "killed", model, mesh, precision)
    assert_killed(killed_in_step_three, 2, config)
    parts = [run(config, until=end, save_at=[end]) for end in (4, 5)]
    assert parts[0].source == tmp_path / "killed/checkpoints/iter_0000002"
    assert parts[0].losses | parts[1].losses == {step: whole.losses[step] for step in (3, 4, 5)}


@pytest.mark.matrix("fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_alike_on_another_mesh(precision: Any, tmp_path: Path) -> None:
    """Bit-equal is only the same mesh; in bf16 the losses' sums have another order too."""
    stayed = run(config_of(tmp_path / "stayed", SMALL, MeshConfig(tp=2, ep=2), precision), until=5, save_at=[2])
    for name, mesh in {"1": MeshConfig(), "pp2": MeshConfig(pp=2), "dp2": MeshConfig(dp=2)}.items():
        options = {"load": str(tmp_path / "stayed")}
        moved = run(config_of(tmp_path / name, SMALL, mesh, precision, **options), until=5)
        within = 1e-6 if precision == "fp32" else 2e-3
        assert moved.losses == pytest.approx({step: stayed.losses[step] for step in (3, 4, 5)}, rel=within), name


def test_a_state_of_the_other_optimizer_is_refused_and_its_weights_are_taken(tmp_path: Path) -> None:
    adam, ours = (
        make(tmp_path / name, SMALL, MeshConfig())
        for make, name in [(checkpointing.config_of, "adam"), (config_of, "muon")]
    )
    for config, other in [(adam, config_of), (ours, checkpointing.config_of)]:
        run(config, until=1, save_at=[1])
        path = str(Path(config.run_dir) / "checkpoints/iter_0000001")
        resumed = other(Path(config.run_dir), SMALL, MeshConfig())
        (message,) = run_ranks(refusal, 1, resumed)
        assert "another optimizer for this weight" in message and "checkpoint.load_optimizer=false" in message, message
        anew = other(
            tmp_path / f"from {Path(config.run_dir).name}", SMALL, MeshConfig(), load=path, load_optimizer=False
        )
        assert list(run(anew, until=1).losses) == [1]


def print_table() -> None:
    """Print how far each mesh is from one rank and from the formula, after three steps of the tiny Qwen3-MoE."""
    initial, reference = on_one_rank(TINY["qwen3_moe"])
    last = reference[-1]["weights"]
    sys.stdout.write(
        f"largest move of a weight: {max(distance(last[key], initial[key]).abs().max() for key in last):.1e}\n"
    )
    for name in ("1", "tp2", "ep2", "pp2", "dp2", "cp2", "tp2-ep2", "tp2-etp2", "pp2-vpp2", "tp2-pp2"):
        config = muon(config_of_steps(TINY["qwen3_moe"], MESHES[name]))
        formula, steps = Formula(config, initial), steps_of(config, initial)
        for count, step in enumerate(steps, start=1):
            formula.step(count, step["gradients"])
        ours = steps[-1]["weights"]
        gradients = max(
            max(relative_errors(one["gradients"], other["gradients"]).values())
            for one, other in zip(steps, reference, strict=True)
        )
        norms = max(abs(one["norm"] / other["norm"] - 1) for one, other in zip(steps, reference, strict=True))
        weights = max(distance(ours[key], last[key]).abs().max() for key in last)
        exact = max(distance(ours[key], value).abs().max() for key, value in formula.weights.items())
        sys.stdout.write(f"| {name} | {weights:.1e} | {exact:.1e} | {gradients:.1e} | {norms:.1e} |\n")


if __name__ == "__main__":
    print_table()
