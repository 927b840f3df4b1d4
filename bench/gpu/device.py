"""The device of a step, what the step finds on it, and the small trainings that several steps make."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu.__main__ import RESULT
from mcore_rl.cli import doctor
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig, TrainConfig
from mcore_rl.data.batch import Microbatch
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import Mesh, destroy_mesh
from mcore_rl.model.build import copy_in
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.train import setup
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead, train_step
from tests.hf_models import oracle
from tests.hf_weights import to_global
from tests.parallel import parity
from tests.tiny_models import TINY

GIB = 2**30
STEPS = 5


class NotRunError(Exception):
    """Raised by a step that cannot run here, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device, and the sizes that suit it."""

    is_gpu: bool
    mesh: Mesh
    is_large: bool = False
    """Whether shapes are those of a measurement, rather than of a rehearsal."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The figures that the step has found so far."""
    table: list[tuple[str, str, str]] = field(default_factory=list)
    """Rows of the table for people: a figure's name, the figure, and what to hold it against."""
    wrong: list[str] = field(default_factory=list)
    """Comparisons that were beyond their tolerance."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """Return the mean wall seconds of `work`, after one call that warms up."""
        work()
        self.wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - begin) / repeats

    def peak_bytes(self, work: Callable[[], Any]) -> int | None:
        """Return the largest number of bytes of the device in use during `work`; None without a GPU."""
        if not self.is_gpu:
            work()
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated()

    def keep(self, name: str, figure: Any) -> None:
        """Print the figures so far, with this one: they stay when the step fails after it, or takes too long."""
        self.figures[name] = figure
        self.print_result()

    def show(self, name: str, figure: str, beside: str = "") -> None:
        """Add a row to the table."""
        self.table.append((name, figure, beside))
        self.print_result()

    def beside_plan(self, name: str, found_bytes: int | None, plan_bytes: int) -> None:
        """Show and keep a number of bytes, None where nothing could measure it, beside the planner's."""
        found = "no measurement" if found_bytes is None else f"{found_bytes / GIB:.3f} GiB"
        ratio = f", {plan_bytes / found_bytes:.2f} times as much" if found_bytes else ""
        self.figures[name] = {"estimate_bytes": plan_bytes, "peak_bytes": found_bytes}
        self.show(name, found, f"planned {plan_bytes / GIB:.3f} GiB{ratio}")

    def expect(self, what: str, difference: float, tolerance: float) -> None:
        """Let the step fail, at its end, unless the difference is within the tolerance."""
        self.show(what, f"differ by {difference:.1e}", f"at most {tolerance:.0e}")
        if not difference <= tolerance:
            self.wrong.append(f"{what}: differ by {difference:.2e}, at most {tolerance:.0e} is allowed")

    def expect_if_run(self, what: str, difference: float | None, tolerance: float) -> None:
        """Expect a difference, or show that there was nothing to compare, as torch has no such kernel here."""
        if difference is None:
            self.show(what, "not run", "torch has no kernel for it here")
        else:
            self.expect(what, difference, tolerance)

    def fail(self, what: str, error: Exception) -> None:
        """Let the step fail, at its end, by an error after which the rest can still be done."""
        text = f"{type(error).__name__}: {error}"
        self.figures[what] = {"error": text[:500]}
        self.show(what, "failed", text[:100])
        self.wrong.append(f"{what} failed: {text}"[:300])

    def wait(self) -> None:
        """Wait until the device has done all that it was asked for."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def print_result(self, summary: str = "", *, is_not_run: bool = False) -> None:
        """Print what `run_step` reads: the last line of its kind counts."""
        result = {"summary": summary, "figures": self.figures, "table": self.table, "is_not_run": is_not_run}
        sys.stdout.write(f"{RESULT}{json.dumps(result | {'versions': VERSIONS})}\n")
        sys.stdout.flush()


VERSIONS = dict(doctor.versions())


def five_steps(on: Machine, precision: str, layers: str = "torch", **sizes: int) -> dict[str, Any]:
    """Return losses and gradient norms of five Adam steps from the weights that transformers' model of `sizes` has."""
    theirs = oracle("qwen3_moe", **sizes)
    settings = PlatformConfig.model_validate({"precision": precision, "layers": layers})
    state = set_up_again(parity.config_of(theirs.ours, MeshConfig(), settings), platform.start(settings))
    copy_in(state.chunks, to_global(theirs.tensors, theirs.ours))
    state.optimizer.reload_model_params()
    reports = [train_step(state, parity.batch(state, step), NextTokenHead()) for step in range(STEPS)]
    return {"losses": [r.loss for r in reports], "grad_norms": [r.grad_norm for r in reports]}


def slice_model(on: Machine, layers: int = 4) -> ModelConfig:
    """Return layers of Qwen3-30B-A3B's shape; small ones in a rehearsal."""
    if on.is_large:
        moe = MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768, aux_loss_coeff=1e-3)
        return ModelConfig(
            family="qwen3_moe",
            num_layers=layers,
            hidden_size=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            vocab_size=32768,
            max_position=8192,
            moe=moe,
        )
    moe = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32, aux_loss_coeff=1e-3)
    return TINY["qwen3_moe"].model_copy(update={"num_layers": layers, "moe": moe})


def slice_config(model: ModelConfig, rows: int, settings: PlatformConfig) -> PretrainConfig:
    """Return the config of a run on rows of one micro-batch."""
    return PretrainConfig(
        model=model,
        platform=settings,
        optim=OptimConfig(lr=1e-4, schedule="constant"),
        train=TrainConfig(global_batch=rows, micro_batch=rows),
    )


def slice_batch(state: TrainState, rows: int, length: int) -> list[LocalMicrobatch]:
    """Return a micro-batch of random tokens, on the device."""
    tokens = torch.randint(0, state.config.model.vocab_size, (rows, length + 1))
    batch = Microbatch(
        tokens_BS=tokens[:, :-1],
        labels_BS=tokens[:, 1:],
        loss_mask_BS=torch.ones(rows, length),
        position_ids_BS=torch.arange(length).expand(rows, -1),
    )
    return [localize(batch, state.mesh.cp, state.platform.device)]


def set_up_again(config: PretrainConfig, started: platform.Platform) -> TrainState:
    """Return a new training on this rank, in place of the one before."""
    destroy_mesh()
    return setup.set_up(config, started)


def replayable(moe: MoEConfig) -> MoEConfig:
    """Return the experts without the loss of balance, which replay refuses."""
    return moe.model_copy(update={"balance": "none", "aux_loss_coeff": 0.0})


def relative(found: list[float], wanted: list[float]) -> list[float]:
    """Return the relative differences."""
    return [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
