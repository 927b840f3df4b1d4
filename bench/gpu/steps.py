"""The steps of `python -m bench.gpu`; each returns a line and figures, and raises where something is wrong.

python -m bench.gpu.steps training --device cpu     one of them, in this process
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bench.gpu.__main__ import RESULT, run_step
from mcore_rl.cli import doctor
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.rl.rollout import NativeConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig, TrainConfig
from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.megatron import platform
from mcore_rl.megatron.kernels import Bounds, attend_packed, has_kernel, kernel_takes
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.patches.found import has_module
from mcore_rl.metrics.performance import known_peak_tflops, measured_peak_flops
from mcore_rl.model.build import build_model, copy_in, local_shards
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.model.layers.experts import HAS_GROUPED_MM
from mcore_rl.planning.flops import train_flops_per_token
from mcore_rl.planning.memory import memory_of_fullest_rank
from mcore_rl.planning.training import training_of
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.train import setup
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead, train_step
from tests.hf_models import CASES, VOCAB, oracle, random_tokens
from tests.hf_weights import to_global
from tests.parallel import parity
from tests.tiny_models import TINY

GIB = 2**30
COPIED_BYTES = 2**32
"""Bytes of a copy that is timed, several times what a cache holds."""
STEPS = 5
REFERENCE_S = 60.0
"""Seconds for the CPU's half of a comparison."""
LOSS_TOLERANCE = 1e-5
"""Relative difference of losses in fp32 between a GPU and a CPU: other orders of summation, no TF32."""
LOGIT_TOLERANCE = 1e-4
"""Largest difference of a logit in fp32 from transformers on the CPU, where logits are of the size of 1."""
BF16_TOLERANCE = 2e-2
"""Relative difference of losses between bf16 and fp32 over five steps."""
FIELD = {"Qwen3-30B-A3B on H100, stock recipe": 240, "Qwen3-30B-A3B on H100, tuned, balance forced": 299}
"""TFLOP/s that others have published for the whole model, beside which the speed of `slice` is shown."""
PACKED_CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window 7": {"window": 7},
    "sinks": {"has_sinks": True},
    "sinks, window 7": {"has_sinks": True, "window": 7},
    "keys before the queries": {"keys_before": 24},
}
FAMILY_CASES = [case for case in CASES if "-" not in case]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A line for people and figures for JSON."""

    summary: str
    figures: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device, and the sizes that suit it."""

    is_gpu: bool
    mesh: Mesh
    is_large: bool = False
    """Whether shapes are those of a measurement, rather than of a rehearsal."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What the step has found so far."""
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

    def keep(self, name: str, figure: Any) -> None:
        """Print the figures so far, with this one: they stay when the step fails after it, or takes too long."""
        self.figures[name] = figure
        print_result("", self.figures)

    def expect(self, what: str, difference: float, tolerance: float) -> None:
        """Let the step fail, at its end, unless the difference is within the tolerance."""
        if not difference <= tolerance:
            self.wrong.append(f"{what}: differ by {difference:.2e}, at most {tolerance:.0e} is allowed")

    def wait(self) -> None:
        """Wait until the device has done all that it was asked for."""
        if self.is_gpu:
            torch.cuda.synchronize()


def machine(on: Machine) -> Outcome:
    """Everything that `mcore-rl doctor` finds, and what the device does at best: products in bf16, copies."""
    on.keep("doctor", doctor.examine())
    if not on.is_gpu:
        return Outcome(summary="CPU", figures=on.figures)
    # Triton builds its launcher with them; a part of a GPU ("MIG 1g.18gb") has a part of its speed and memory.
    headers = Path(sysconfig.get_path("include"), "Python.h")
    tools = {tool: shutil.which(tool) for tool in ("gcc", "clang", "nvcc", "ninja")}
    on.keep("tools", tools | {"Python.h": headers.exists()})
    name = torch.cuda.get_device_name(on.device)
    on.keep("known_peak_tflops", known_peak_tflops(name, "bf16"))
    if not on.is_large:
        return Outcome(summary=name, figures=on.figures)
    on.keep("measured_peak_flops", measured_peak_flops(on.device, torch.bfloat16))
    numbers = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=on.device)
    other = torch.empty_like(numbers)
    # Read once and written once.
    on.keep("copied_bytes_per_s", 2 * COPIED_BYTES / on.seconds(lambda: other.copy_(numbers), 10))
    peak, copied = on.figures["measured_peak_flops"] / 1e12, on.figures["copied_bytes_per_s"] / 1e12
    return Outcome(summary=f"{name}, {peak:.0f} TFLOP/s in bf16, {copied:.1f} TB/s", figures=on.figures)


def training(on: Machine) -> Outcome:
    """Five Adam steps on this device and on the CPU: fp32 equal, bf16 near."""
    for name in ("fp32", "bf16"):
        on.keep(name, five_steps(on, name))
    figures = on.figures
    reference = figures["fp32"]
    if on.is_gpu:
        on_cpu = run_step("reference", "cpu", REFERENCE_S, within=True)
        if on_cpu["status"] != "ok":
            raise AssertionError(f"the same steps on the CPU failed: {on_cpu['summary']}")
        reference = on_cpu["figures"]["fp32"]
        on.keep("cpu", reference)
    exact = max(relative(figures["fp32"]["losses"], reference["losses"]))
    rounded = max(relative(figures["bf16"]["losses"], reference["losses"]))
    norms = max(relative(figures["fp32"]["grad_norms"], reference["grad_norms"]))
    on.expect("fp32 losses beside the CPU's", exact, LOSS_TOLERANCE)
    on.expect("fp32 gradient norms beside the CPU's", norms, 10 * LOSS_TOLERANCE)
    on.expect("bf16 losses beside fp32", rounded, BF16_TOLERANCE)
    return Outcome(summary=f"fp32 differs by {exact:.1e}, bf16 by {rounded:.1e}", figures=figures)


def reference(on: Machine) -> Outcome:
    """The CPU's half of `training`."""
    return Outcome(summary="", figures={"fp32": five_steps(on, "fp32")})


def five_steps(on: Machine, precision: str, layers: str = "torch") -> dict[str, Any]:
    """Return losses and gradient norms of five Adam steps from the weights that transformers' model has."""
    theirs = oracle("qwen3_moe")
    settings = PlatformConfig.model_validate({"precision": precision, "layers": layers})
    state = set_up_again(parity.config_of(theirs.ours, MeshConfig(), settings), platform.start(settings))
    copy_in(state.chunks, to_global(theirs.tensors, theirs.ours))
    state.optimizer.reload_model_params()
    reports = [train_step(state, parity.batch(state, step), NextTokenHead()) for step in range(STEPS)]
    return {"losses": [r.loss for r in reports], "grad_norms": [r.grad_norm for r in reports]}


def families(on: Machine) -> Outcome:
    """Every family's logits beside transformers'."""
    for case in FAMILY_CASES:
        try:
            on.keep(case, logit_difference(on, case))
        except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError) as error:
            on.keep(case, f"{type(error).__name__}: {error}"[:500])
            on.wrong.append(f"{case} failed: {type(error).__name__}: {error}"[:300])
    differences = {case: value for case, value in on.figures.items() if isinstance(value, float)}
    for case, difference in differences.items():
        on.expect(f"logits of {case}", difference, LOGIT_TOLERANCE)
    worst = max(differences, key=differences.__getitem__, default="none")
    return Outcome(
        summary=f"{len(differences)} families, {worst} differs most: {differences.get(worst, 0.0):.1e}",
        figures=on.figures,
    )


def logit_difference(on: Machine, case: str) -> float:
    """Return the largest difference between our logits on the device and those of transformers on the CPU."""
    theirs, tokens_BS = oracle(case), random_tokens()
    ours = logits(on, theirs.ours, to_global(theirs.tensors, theirs.ours), tokens_BS)
    return float((ours.cpu() - theirs.logits(tokens_BS)).abs().max())


def logits(
    on: Machine,
    model: ModelConfig,
    weights: dict[str, Tensor],
    tokens_BS: Tensor,
    layers: Literal["torch", "te"] = "torch",
    precision: Literal["bf16", "fp32"] = "fp32",
) -> Tensor:
    """Return our logits `[B, S, V]`."""
    settings = PlatformConfig(layers=layers, precision=precision)
    chunk = build_model(model, on.mesh, platform.start(settings), settings)[0].eval()
    copy_in([chunk], weights)
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS).to(on.device)
    with torch.no_grad():
        logits_BSV: Tensor = chunk(input_ids=tokens_BS.to(on.device), position_ids=positions_BS, attention_mask=None)
    return logits_BSV[..., :VOCAB]


def kernels(on: Machine) -> Outcome:
    """Which attention kernel torch takes for each kind of layer, and grouped products at awkward sizes."""
    on.keep("grouped", {})
    for sizes in ([0, 0, 5, 3], [16, 1, 0, 7], [8, 8, 8, 8]):
        difference = grouped_difference(on, sizes)
        on.expect(f"grouped products of {sizes} rows", difference, 1e-2)
        on.keep("grouped", on.figures["grouped"] | {str(sizes): difference})
    on.keep("packed", {})
    for name, changes in PACKED_CASES.items():
        difference = packed_difference(on, **changes)
        on.expect(f"packed sequences in one call, {name}", difference, 2e-2)
        on.keep("packed", on.figures["packed"] | {name: difference})
    on.keep("attention", {})
    for name, call in attention_calls(on).items():
        chosen = attention_kernels(on, call)
        on.keep("attention", on.figures["attention"] | {name: chosen})
        if on.is_gpu and any("math" in kind for kind in chosen):
            on.wrong.append(f"attention of {name} falls back to separate products: {chosen}")
    kinds = sorted({kind for kinds in on.figures["attention"].values() for kind in kinds})
    return Outcome(summary=f"attention by {', '.join(kinds)}", figures=on.figures)


def attention_calls(on: Machine) -> dict[str, Callable[[], Any]]:
    """Return a forward and backward pass of the attention of each kind, in bf16."""
    length = 1024 if on.is_large else 64
    kinds = {
        "grouped queries": ("qwen3_moe", False),
        "grouped queries, packed": ("qwen3_moe", True),
        "latent": ("deepseek_v3", False),
        "latent, packed": ("deepseek_v3", True),
        "sinks and windows": ("gpt_oss", False),
    }
    return {
        name: lambda family=family, packed=packed: one_backward(on, family, packed, length)  # type: ignore[misc]
        for name, (family, packed) in kinds.items()
    }


def one_backward(on: Machine, family: str, packed: bool, length: int) -> None:
    """Train one step of a tiny model in bf16, on rows of `length` or on packed sequences."""
    settings = PlatformConfig(precision="bf16", layers="torch")
    model = TINY[family].model_copy(update={"max_position": 2 * length})
    state = set_up_again(PretrainConfig(model=model, platform=settings), platform.start(settings))
    tokens = torch.randint(0, model.vocab_size, (1, length + 1))
    bounds = torch.tensor([0, length // 4, length // 2 + 8, length], dtype=torch.int32)
    spans = bounds.diff().tolist()
    positions = torch.cat([torch.arange(span) for span in spans]) if packed else torch.arange(length)
    batch = Microbatch(
        tokens_BS=tokens[:, :-1],
        labels_BS=tokens[:, 1:],
        loss_mask_BS=torch.ones(1, length),
        position_ids_BS=positions[None],
        packed=PackedSpans(cu_seqlens=bounds, max_length=max(spans)) if packed else None,
    )
    report = train_step(state, [localize(batch, state.mesh.cp, on.device)], NextTokenHead())
    assert not report.skipped and report.loss == report.loss


def attention_kernels(on: Machine, call: Callable[[], Any]) -> list[str]:
    """Return the names of torch's attention operators in `call`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        on.wait()
    names = {event.key for event in profile.key_averages()}
    found = {name.removeprefix("aten::_scaled_dot_product_") for name in names if "_scaled_dot_product_" in name}
    return sorted(name for name in found if not name.endswith("backward"))


def packed_difference(on: Machine, window: int | None = None, has_sinks: bool = False, keys_before: int = 0) -> float:
    """Return how far one call for packed sequences in bf16, and its gradients, are from a call for each in fp32 on the
    CPU; 0 where there is no kernel.

    Args:
        on: The machine.
        window: Positions that a query sees to its left.
        has_sinks: Whether heads have sinks.
        keys_before: Number of keys of each sequence before its first query, as context-parallel ranks have them.
    """
    lengths, generator = (64, 1, 200, 39), torch.Generator().manual_seed(0)
    of_keys = [length + keys_before for length in lengths]
    counts = sum(lengths), sum(of_keys), sum(of_keys)
    shapes = [(count, *shape) for count, shape in zip(counts, ((8, 64), (2, 64), (2, 48)), strict=True)]
    # What bf16 holds exactly.
    exact = [torch.randn(*shape, generator=generator).bfloat16().float() for shape in (*shapes, (8,))]
    placed = [one.to(on.device, torch.bfloat16).requires_grad_() for one in exact]
    exact = [one.requires_grad_() for one in exact]
    bounds, key_bounds = (
        Bounds(torch.tensor((0, *sizes)).cumsum(0).to(on.device, torch.int32), max(sizes))
        for sizes in (lengths, of_keys)
    )
    query, key, value, sinks = placed
    if not (has_kernel() and kernel_takes(query, value.shape[-1])):
        return 0.0
    found = attend_packed(
        query,
        key,
        value,
        bounds,
        64**-0.5,
        window,
        key_bounds=key_bounds if keys_before else None,
        sinks_N=sinks if has_sinks else None,
    )
    outputs, (query, key, value, sinks) = [], exact
    for heads in zip(query.split(lengths), key.split(of_keys), value.split(of_keys), strict=True):
        q_NSD, k_NTD, v_NTD = (one.transpose(0, 1) for one in heads)
        k_NTD, v_NTD = (one.repeat_interleave(len(q_NSD) // len(one), 0) for one in (k_NTD, v_NTD))
        behind = torch.arange(q_NSD.shape[1])[:, None] + keys_before - torch.arange(k_NTD.shape[1])
        is_hidden = (behind < 0) | (behind > (k_NTD.shape[1] if window is None else window))
        scores = (q_NSD @ k_NTD.transpose(1, 2) * 64**-0.5).masked_fill(is_hidden, float("-inf"))
        if has_sinks:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        outputs.append((scores.softmax(-1)[..., : k_NTD.shape[1]] @ v_NTD).transpose(0, 1))
    wanted = torch.cat(outputs)
    pull = torch.randn(wanted.shape, generator=generator).bfloat16()
    learned = 4 if has_sinks else 3
    gradients = torch.autograd.grad(found, placed[:learned], pull.to(found))
    of_exact = torch.autograd.grad(wanted, exact[:learned], pull.float())
    pairs = [(found.detach(), wanted.detach()), *zip(gradients, of_exact, strict=True)]
    return max(float((a.float().cpu() - b).abs().max() / b.abs().max()) for a, b in pairs)


def grouped_difference(on: Machine, sizes: list[int]) -> float:
    """Return how far the grouped products in bf16, and their gradients, are from one product for each expert."""
    if not HAS_GROUPED_MM:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes), 32, generator=generator).to(on.device, torch.bfloat16).requires_grad_()
    weights = torch.randn(len(sizes), 48, 32, generator=generator).to(on.device, torch.bfloat16)
    weights.requires_grad_()
    ends = torch.tensor(sizes).cumsum(0).to(on.device, torch.int32)
    product = torch.nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = zip(rows.split(sizes), weights.unbind(0), strict=True)
    wanted = torch.cat([part @ weight.t() for part, weight in parts])
    ones = torch.ones_like(product)
    found = torch.autograd.grad(product, (rows, weights), ones)
    exact = torch.autograd.grad(wanted, (rows, weights), ones)
    pairs = [(product, wanted), *zip(found, exact, strict=True)]
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def memory(on: Machine) -> Outcome:
    """The estimate of memory beside the peak of two steps, for five configs."""
    base = slice_model(on, layers=2)
    dense = base.model_copy(update={"family": "qwen3", "moe": MoEConfig()})
    cases = {
        "experts, fp32": (base, {"precision": "fp32"}),
        "experts, bf16": (base, {"precision": "bf16"}),
        "experts, bf16, selective": (base, {"precision": "bf16", "recompute": "selective"}),
        "experts, bf16, full": (base, {"precision": "bf16", "recompute": "full"}),
        "dense, bf16": (dense, {"precision": "bf16"}),
    }
    length, rows = (2048, 2) if on.is_large else (64, 2)
    for name, (model, settings) in cases.items():
        config = slice_config(model, rows, PlatformConfig.model_validate(settings | {"layers": "torch"}))
        estimate = memory_of_fullest_rank(replace(training_of(config, 1), seq_length=length)).total
        peak = None
        if on.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        state = set_up_again(config, platform.start(config.platform))
        for _ in range(2):
            train_step(state, slice_batch(state, rows, length), NextTokenHead())
        if on.is_gpu:
            peak = torch.cuda.max_memory_allocated()
        on.keep(name, {"estimate_bytes": estimate, "peak_bytes": peak})
        del state
    ratios = [f["estimate_bytes"] / f["peak_bytes"] for f in on.figures.values() if f["peak_bytes"]]
    text = f"estimate / peak {min(ratios):.2f} to {max(ratios):.2f}" if ratios else "no peaks without a GPU"
    return Outcome(summary=text, figures=on.figures)


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


def slice(on: Machine) -> Outcome:  # the step's name
    """Training speed of four layers of Qwen3-30B-A3B in bf16: ours, transformers, Megatron's local layers."""
    model = slice_model(on)
    rows, length, repeats = (8, 4096, 3) if on.is_large else (1, 64, 1)
    on.keep("rows", rows)
    on.keep("length", length)
    on.keep("field", FIELD)
    peak = known_peak_tflops(torch.cuda.get_device_name(on.device), "bf16") if on.is_gpu else None
    ways: dict[str, Callable[[], Callable[[], Any]]] = {"ours": lambda: our_step(on, model, rows, length)}
    ways["transformers"] = lambda: transformers_step(on, model, rows, length, compiled=False)
    if has_module("transformer_engine") and on.is_gpu:
        ways["ours, TransformerEngine"] = lambda: our_step(on, model, rows, length, layers="te")
    # Its attention stores all scores: one row at a time.
    ways["Megatron local"] = lambda: our_step(on, model, 1, length, local=True)
    if on.is_gpu:
        # Last: it compiles for longer than the others take together.
        ways["transformers, compiled"] = lambda: transformers_step(on, model, rows, length, compiled=True)
    for name, make in ways.items():
        used = 1 if name == "Megatron local" else rows
        try:
            seconds = on.seconds(make(), repeats)
        except Exception as error:  # of compilers too: the other ways are measured still
            if name == "ours":
                raise
            on.keep(name, {"error": f"{type(error).__name__}: {error}"[:500]})
            on.wrong.append(f"{name} failed: {type(error).__name__}: {error}"[:300])
            if on.is_gpu:
                torch.cuda.empty_cache()
            continue
        tflops = used * length * train_flops_per_token(model, length) / seconds / 1e12
        speed = {"step_s": seconds, "tflops": round(tflops, 2), "tokens_per_s": used * length / seconds}
        on.keep(name, speed | ({"mfu": tflops / peak} if peak else {}))
        if on.is_gpu:
            torch.cuda.empty_cache()
    speeds = {
        name: found["tflops"] for name, found in on.figures.items() if isinstance(found, dict) and "tflops" in found
    }
    unit = "TFLOP/s" if on.is_gpu else "TFLOP/s (a rehearsal: no measurement)"
    return Outcome(
        summary=", ".join(f"{name} {tflops}" for name, tflops in speeds.items()) + f" {unit}", figures=on.figures
    )


def our_step(
    on: Machine, model: ModelConfig, rows: int, length: int, *, local: bool = False, layers: str = "torch"
) -> Callable[[], Any]:
    """Return a training step of ours; with `local` of a model with Megatron's own layers without TransformerEngine."""
    settings = PlatformConfig.model_validate({"precision": "bf16", "layers": layers})
    with megatron_layers() if local else as_they_are():
        state = set_up_again(slice_config(model, rows, settings), platform.start(settings))
    batch = slice_batch(state, rows, length)
    return lambda: train_step(state, batch, NextTokenHead())


@contextmanager
def as_they_are() -> Iterator[None]:
    """Change nothing."""
    yield


@contextmanager
def megatron_layers() -> Iterator[None]:
    """Build models with Megatron's local spec inside the context."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from mcore_rl.model import build

    def local_spec(config: Any, *, vp_stage: int | None) -> Any:
        config.normalization, config.moe_grouped_gemm = "RMSNorm", False
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)

    original = build.block_spec
    build.block_spec = local_spec
    try:
        yield
    finally:
        build.block_spec = original


def transformers_step(on: Machine, model: ModelConfig, rows: int, length: int, *, compiled: bool) -> Callable[[], Any]:
    """Return a training step of transformers' Qwen3-MoE of the same sizes, with grouped products and fused AdamW."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_experts=model.moe.num_experts,
        num_experts_per_tok=model.moe.top_k,
        moe_intermediate_size=model.moe.ffn_hidden_size,
        norm_topk_prob=True,
        max_position_embeddings=model.max_position,
        output_router_logits=False,
        use_cache=False,
    )
    theirs = Qwen3MoeForCausalLM(config).to(on.device, torch.bfloat16)
    theirs.set_experts_implementation("grouped_mm")
    forward: Any = torch.compile(theirs) if compiled else theirs
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, model.vocab_size, (rows, length), device=on.device)

    def step() -> None:
        forward(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def rl(on: Machine) -> Outcome:
    """The rollout engine's tokens/s step by step and by CUDA graphs, and passes with and without replay (R2)."""
    from bench.replay import Bench
    from tests.generating import prompt_of, spelled

    model = slice_model(on)
    settings = PlatformConfig(precision="bf16" if on.is_gpu else "fp32", layers="torch")
    chunks = build_model(model, on.mesh, platform.start(settings), settings)
    count, prompt, answer = (64, 256, 128) if on.is_large else (4, 8, 4)
    prompts = [prompt_of(torch.randint(0, model.vocab_size, (prompt,)).tolist(), str(index)) for index in range(count)]
    sampling = Sampling(max_new_tokens=answer)
    rates, drawn = {}, {}
    # A CPU computes the steps of fixed shapes without graphs.
    # With equal shapes the kernels are equal, and so are the tokens; without fixed shapes bf16 may round otherwise.
    for name, is_fixed, by_graphs in (
        ("step by step", False, False),
        ("in fixed shapes", True, False),
        ("by graphs", True, True),
    ):
        config = NativeConfig(slots=count, cuda_graphs=by_graphs if on.is_gpu else "auto")
        engine = MegatronEngine(chunks, on.mesh, model, spelled, config, has_fixed_shapes=is_fixed)
        engine.generate(prompts[:1], Sampling(max_new_tokens=4), [[0]])  # libraries make what they make once
        begin = time.perf_counter()
        groups = list(engine.generate(prompts, sampling, [[index] for index in range(count)]))
        on.wait()
        seconds = time.perf_counter() - begin
        drawn[name] = [token for group in groups for one in group.completions for token in one.tokens_T]
        rates[name] = len(drawn[name]) / seconds
        on.keep("rollout_tokens_per_s", rates)
    tokens = count * answer

    def differing(name: str) -> float:
        return 1 - sum(a == b for a, b in zip(drawn[name], drawn["by graphs"], strict=True)) / tokens

    on.expect("tokens by CUDA graphs beside the same steps without", differing("in fixed shapes"), 0.0)
    if on.is_gpu:
        on.keep("rollout_peak_bytes", torch.cuda.max_memory_allocated())
    del engine, chunks
    destroy_mesh()
    bench = Bench(slice_model(on, layers=2).model_copy(update={"moe": replayable(model.moe)}))
    without, replayed = on.seconds(bench.without, 2), on.seconds(bench.ours, 2)
    del bench
    step = grpo_step(on)
    figures = {
        "rollout_tokens_per_s": rates,
        "same_tokens": 1 - differing("step by step"),
        "rollout_tokens": tokens,
        "prompt_tokens": count * prompt,
        "without_replay_s": without,
        "replay_r2_s": replayed,
        "grpo_step": step,
    }
    return Outcome(
        summary=f"rollout {rates['step by step']:.0f} tokens/s, by graphs {rates['by graphs']:.0f}, replay "
        f"{replayed / without - 1:+.1%} of the passes, a GRPO step of {step['ids']:,} ids {step['seconds']:.2f} s",
        figures=figures,
    )


def grpo_step(on: Machine) -> dict[str, Any]:
    """Return seconds and memory of a rollout of 128 short completions with two updates, with Qwen3's 151,936 ids."""
    from examples import grpo_step as example

    model, ids = slice_model(on, layers=2), 151_936 if on.is_large else VOCAB
    model = model.model_copy(update={"moe": replayable(model.moe), "vocab_size": ids})
    settings = PlatformConfig(precision="bf16" if on.is_gpu else "fp32", layers="torch")
    example.CONFIG = example.CONFIG.model_copy(update={"model": model, "platform": settings})
    destroy_mesh()
    if on.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    state = setup.set_up(example.CONFIG, platform.start(settings))
    seconds = on.seconds(lambda: example.update(state, *example.sample(state)), 1)
    estimate = memory_of_fullest_rank(training_of(example.CONFIG, 1)).total
    peak = torch.cuda.max_memory_allocated() if on.is_gpu else None
    return {"ids": ids, "seconds": seconds, "estimate_bytes": estimate, "peak_bytes": peak}


def replayable(moe: MoEConfig) -> MoEConfig:
    """Return the experts without the loss of balance, which replay refuses."""
    return moe.model_copy(update={"balance": "none", "aux_loss_coeff": 0.0})


def conversion(on: Machine) -> Outcome:
    """Weights of transformers on to the device and back, bit for bit, for every family."""
    for case in FAMILY_CASES:
        theirs = oracle(case)
        weights = to_global(theirs.tensors, theirs.ours)
        settings = PlatformConfig(layers="torch", precision="fp32")
        chunks = build_model(theirs.ours, on.mesh, platform.start(settings), settings)
        copy_in(chunks, weights)
        for shard in local_shards(chunks):
            if not torch.equal(shard.data.cpu(), weights[shard.key][shard.where]):
                raise AssertionError(f"{case}: {shard.key} came back with other bits")
    return Outcome(summary=f"{len(FAMILY_CASES)} families bit for bit", figures={"families": FAMILY_CASES})


def extras(on: Machine) -> Outcome:
    """Training in fp8 and DeepEP's dispatcher, where they can be imported."""
    figures: dict[str, Any] = {}
    if on.is_gpu and has_module("transformer_engine"):
        settings = PlatformConfig(precision="bf16", layers="te", fp8="hybrid")
        state = set_up_again(slice_config(slice_model(on), 2, settings), platform.start(settings))
        batch = slice_batch(state, 2, 2048)
        figures["fp8"] = {"step_s": on.seconds(lambda: train_step(state, batch, NextTokenHead()), 2)}
        theirs, tokens_BS = oracle("qwen3_moe"), random_tokens()
        losses = [five_steps(on, "bf16", layers)["losses"] for layers in ("te", "torch")]
        figures["te"] = {"losses": losses[0], "losses of torch layers": losses[1]}
        on.expect("losses of TransformerEngine beside torch layers'", max(relative(*losses)), BF16_TOLERANCE)
        destroy_mesh()
        here = replace(on, mesh=build_mesh(MeshConfig()))
        weights = to_global(theirs.tensors, theirs.ours)
        outputs = [logits(here, theirs.ours, weights, tokens_BS, layers, "bf16").float() for layers in ("te", "torch")]  # type: ignore[arg-type]
        figures["te"]["logits"] = float((outputs[0] - outputs[1]).abs().max())
        on.expect("logits of TransformerEngine beside torch layers'", figures["te"]["logits"], 10 * BF16_TOLERANCE)
    else:
        figures["fp8"] = figures["te"] = "TransformerEngine cannot be imported, or there is no GPU"
    figures["page_locked"] = page_locked(on)
    figures["deepep"] = (
        "importable; it needs ranks: run with 2 to 8 GPUs" if has_module("deep_ep") else "deep_ep cannot be imported"
    )
    return Outcome(summary=str(figures), figures=figures)


def page_locked(on: Machine) -> dict[str, int]:
    """Return the bytes that wait in main memory, and those that torch's allocator has locked for them."""
    from mcore_rl.train.offload import StoredBytes

    stored = StoredBytes(17 * 2 ** (27 if on.is_large else 20), "host", on.device)  # 2.1 GiB; in one piece it takes 4
    locked = int(torch.cuda.host_memory_stats()["allocated_bytes.peak"]) if on.is_gpu else stored.num_bytes
    on.expect("page-locked bytes beyond those that wait", locked / stored.num_bytes - 1, 0.1)
    return {"waiting_bytes": stored.num_bytes, "locked_bytes": locked}


def ranks(on: Machine) -> Outcome:
    """The five steps on two ranks as TP2, CP2, EP2 and PP2, equal to those of one; on one GPU both are on it, where
    NCCL allows that.
    """
    alone = five_steps(on, "fp32")
    platform.stop()
    figures: dict[str, Any] = {"1": alone}
    for mesh in ("tp", "cp", "ep", "pp") if on.is_gpu else ("cp", "ep"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder, "losses.json")
            command += ["-m", "bench.gpu.steps", "rank", "--mesh", mesh, "--answer", str(answer)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode and on.is_gpu and "Duplicate GPU" in done.stderr:
                return Outcome(
                    summary="one GPU, and NCCL takes no two ranks on it: nothing to compare", figures=figures
                )
            if done.returncode:
                raise AssertionError(f"{mesh}2 failed: {done.stderr[-2000:]}")
            figures[f"{mesh}2"] = json.loads(answer.read_text())
        worst = max(relative(figures[f"{mesh}2"]["losses"], alone["losses"]))
        on.expect(f"losses on {mesh}2 beside one rank's", worst, LOSS_TOLERANCE)
    return Outcome(summary=f"{', '.join(name for name in figures if name != '1')} equal one rank", figures=figures)


def rank(mesh: str, answer: Path) -> None:
    """Be one of two ranks of `ranks`."""
    theirs, settings = oracle("qwen3_moe"), PlatformConfig(layers="torch", precision="fp32")
    config = parity.config_of(theirs.ours, MeshConfig.model_validate({mesh: 2}), settings)
    state = set_up_again(config, platform.start(settings))
    copy_in(state.chunks, to_global(theirs.tensors, theirs.ours))
    state.optimizer.reload_model_params()
    reports = [train_step(state, parity.batch(state, step), NextTokenHead()) for step in range(STEPS)]
    if state.platform.rank == 0:
        answer.write_text(json.dumps({"losses": [report.loss for report in reports]}))
    platform.stop()


def set_up_again(config: PretrainConfig, started: platform.Platform) -> TrainState:
    """Return a new training on this rank, in place of the one before."""
    destroy_mesh()
    return setup.set_up(config, started)


def relative(found: list[float], wanted: list[float]) -> list[float]:
    """Return the relative differences."""
    return [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]


def print_result(summary: str, figures: dict[str, Any]) -> None:
    """Print what `run_step` reads: the last line of its kind counts."""
    result = {"summary": summary, "figures": figures, "versions": dict(doctor.versions())}
    sys.stdout.write(f"{RESULT}{json.dumps(result)}\n")
    sys.stdout.flush()


ALL: dict[str, Callable[[Machine], Outcome]] = {
    function.__name__: function
    for function in (
        machine, training, reference, families, kernels, memory, slice, rl, conversion, extras, ranks,
    )
}  # fmt: skip
NEEDS_MESH = {"families", "rl", "conversion"}


def main() -> None:
    """Run one step and print its result in a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=[*ALL, "rank"])
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--mesh", default="tp")
    parser.add_argument("--answer", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    os.environ.setdefault("RANK", "0")  # one rank, unless a launcher says otherwise
    os.environ.setdefault("WORLD_SIZE", "1")
    if args.step == "rank":
        rank(args.mesh, args.answer)
        return
    is_gpu = args.device == "cuda"
    if is_gpu != torch.cuda.is_available():
        raise SystemExit(f"--device {args.device}, but torch sees {'no' if is_gpu else 'a'} GPU")
    mesh: Any = None
    if args.step in NEEDS_MESH:
        platform.start(PlatformConfig(layers="torch"))
        mesh = build_mesh(MeshConfig())
        seed_ranks(1)
    on = Machine(is_gpu=is_gpu, mesh=mesh, is_large=is_gpu)
    outcome = ALL[args.step](on)
    platform.stop()
    print_result(outcome.summary, outcome.figures)
    if on.wrong:
        raise SystemExit("; ".join(on.wrong))


if __name__ == "__main__":
    main()
