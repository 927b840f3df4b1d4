"""Steps that compare numbers of the device with those of a CPU, of transformers, or of one rank."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bench.gpu.__main__ import run_step
from bench.gpu.device import (
    STEPS,
    Machine,
    NotRunError,
    five_steps,
    relative,
    set_up_again,
    slice_batch,
    slice_config,
    slice_model,
)
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.megatron import platform
from mcore_rl.megatron.kernels import Bounds, attend_packed, has_kernel, kernel_takes
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh
from mcore_rl.megatron.patches.gpu_packages import has_module
from mcore_rl.model.build import build_model, copy_in, local_shards
from mcore_rl.model.inputs import localize
from mcore_rl.model.layers.experts import HAS_GROUPED_MM
from mcore_rl.train.step import NextTokenHead, train_step
from tests.hf_models import CASES, VOCAB, oracle, random_tokens
from tests.hf_weights import to_global
from tests.parallel import parity
from tests.tiny_models import TINY

REFERENCE_S = 60.0
"""Seconds for the CPU's half of a comparison."""
LOSS_TOLERANCE = 1e-5
"""Relative difference of losses in fp32 between a GPU and a CPU: other orders of summation, no TF32."""
LOGIT_TOLERANCE = 1e-4
"""Largest difference of a logit in fp32 from transformers on the CPU, where logits are of the size of 1."""
BF16_TOLERANCE = 2e-2
"""Relative difference of losses between bf16 and fp32 over five steps."""
PACKED_CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window 7": {"window": 7},
    "sinks": {"has_sinks": True},
    "sinks, window 7": {"has_sinks": True, "window": 7},
    "keys before the queries": {"keys_before": 24},
}
FAMILY_CASES = [case for case in CASES if "-" not in case]


def training(on: Machine) -> str:
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
    return f"fp32 differs by {exact:.1e}, bf16 by {rounded:.1e}"


def reference(on: Machine) -> str:
    """The CPU's half of `training`."""
    on.keep("fp32", five_steps(on, "fp32"))
    return ""


def families(on: Machine) -> str:
    """Every family's logits beside transformers'."""
    for case in FAMILY_CASES:
        try:
            on.keep(case, logit_difference(on, case))
            on.expect(f"logits of {case}", on.figures[case], LOGIT_TOLERANCE)
        except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError) as error:
            on.fail(f"logits of {case}", error)
    differences = {case: value for case, value in on.figures.items() if isinstance(value, float)}
    worst = max(differences, key=differences.__getitem__, default="none")
    return f"{len(differences)} families, {worst} differs most: {differences.get(worst, 0.0):.1e}"


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


def kernels(on: Machine) -> str:
    """Which attention kernel torch takes for each kind of layer, and grouped products at awkward sizes."""
    on.keep("grouped", {})
    for sizes in ([0, 0, 5, 3], [16, 1, 0, 7], [8, 8, 8, 8]):
        difference = grouped_difference(on, sizes)
        on.expect_if_run(f"grouped products of {sizes} rows", difference, 1e-2)
        on.keep("grouped", on.figures["grouped"] | {str(sizes): difference})
    on.keep("packed", {})
    for name, changes in PACKED_CASES.items():
        difference = packed_difference(on, **changes)
        on.expect_if_run(f"packed sequences in one call, {name}", difference, 2e-2)
        on.keep("packed", on.figures["packed"] | {name: difference})
    on.keep("attention", {})
    for name, call in attention_calls(on).items():
        chosen = attention_kernels(on, call)
        on.keep("attention", on.figures["attention"] | {name: chosen})
        on.show(f"attention of {name}", ", ".join(chosen), "not math" if on.is_gpu else "")
        if on.is_gpu and any("math" in kind for kind in chosen):
            on.wrong.append(f"attention of {name} falls back to separate products: {chosen}")
    kinds = sorted({kind for kinds in on.figures["attention"].values() for kind in kinds})
    return f"attention by {', '.join(kinds)}"


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


def packed_difference(
    on: Machine, window: int | None = None, has_sinks: bool = False, keys_before: int = 0
) -> float | None:
    """Return how far one call for packed sequences in bf16, and its gradients, are from a call for each in fp32 on the
    CPU; None where there is no kernel.

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
        return None
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


def grouped_difference(on: Machine, sizes: list[int]) -> float | None:
    """Return how far the grouped products in bf16, and their gradients, are from one product for each expert; None
    where torch has none.
    """
    if not HAS_GROUPED_MM:
        return None
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


def conversion(on: Machine) -> str:
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
    on.keep("families", FAMILY_CASES)
    on.show("weights on to the device and back", f"{len(FAMILY_CASES)} families bit for bit", "every bit")
    return f"{len(FAMILY_CASES)} families bit for bit"


def extras(on: Machine) -> str:
    """Training in fp8 and with TransformerEngine's layers, where it can be imported."""
    on.show("DeepEP", "importable" if has_module("deep_ep") else "not importable", "not measured: it needs ranks")
    if not (on.is_gpu and has_module("transformer_engine")):
        raise NotRunError("TransformerEngine cannot be imported" if on.is_gpu else "TransformerEngine needs a GPU")
    settings = PlatformConfig(precision="bf16", layers="te", fp8="hybrid")
    state = set_up_again(slice_config(slice_model(on), 2, settings), platform.start(settings))
    batch = slice_batch(state, 2, 2048)
    on.keep("fp8", {"step_s": on.seconds(lambda: train_step(state, batch, NextTokenHead()), 2)})
    on.show("a step in fp8 of 2 rows of 2,048 tokens", f"{on.figures['fp8']['step_s']:.3f} s")
    theirs, tokens_BS = oracle("qwen3_moe"), random_tokens()
    losses = [five_steps(on, "bf16", layers)["losses"] for layers in ("te", "torch")]
    on.keep("te", {"losses": losses[0], "losses of torch layers": losses[1]})
    on.expect("losses of TransformerEngine beside torch layers'", max(relative(*losses)), BF16_TOLERANCE)
    destroy_mesh()
    here = replace(on, mesh=build_mesh(MeshConfig()))
    weights = to_global(theirs.tensors, theirs.ours)
    outputs = [logits(here, theirs.ours, weights, tokens_BS, layers, "bf16").float() for layers in ("te", "torch")]  # type: ignore[arg-type]
    difference = float((outputs[0] - outputs[1]).abs().max())
    on.expect("logits of TransformerEngine beside torch layers'", difference, 10 * BF16_TOLERANCE)
    return "fp8 trains, and TransformerEngine's layers compute what torch's do"


ON_RANKS = {"num_key_value_heads": 2, "num_hidden_layers": 4}
"""Sizes that two ranks divide in every way."""


def ranks(on: Machine) -> str:
    """The five steps on two ranks as TP2, CP2, EP2 and PP2, equal to those of one; on one GPU both are on it, where
    NCCL allows that.
    """
    on.keep("1", five_steps(on, "fp32", **ON_RANKS))
    platform.stop()
    meshes = ("tp", "cp", "ep", "pp")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launched, "-m", "bench.gpu.steps", "rank", "--folder", folder, "--meshes", *meshes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for mesh in meshes:
            if (answer := Path(folder, mesh)).exists():
                on.keep(f"{mesh}2", json.loads(answer.read_text()))
                apart = max(relative(on.figures[f"{mesh}2"]["losses"], on.figures["1"]["losses"]))
                on.expect(f"losses on {mesh}2 beside one rank's", apart, LOSS_TOLERANCE)
    if done.returncode and on.is_gpu and "Duplicate GPU" in done.stderr:
        raise NotRunError("there is one GPU, and NCCL takes no two ranks on it")
    if done.returncode:
        sys.stderr.write(done.stderr)
        error = next((line for line in done.stderr.splitlines() if "Error: " in line), f"status {done.returncode}")
        raise AssertionError(f"after {', '.join(on.figures)}: {error}")
    return f"{', '.join(name for name in on.figures if name != '1')} equal one rank"


def rank(meshes: Sequence[str], folder: Path) -> None:
    """Be one of two ranks of `ranks`: write the losses of each mesh to a file of its name."""
    theirs, settings = oracle("qwen3_moe", **ON_RANKS), PlatformConfig(layers="torch", precision="fp32")
    for mesh in meshes:
        config = parity.config_of(theirs.ours, MeshConfig.model_validate({mesh: 2}), settings)
        state = set_up_again(config, platform.start(settings))
        copy_in(state.chunks, to_global(theirs.tensors, theirs.ours))
        state.optimizer.reload_model_params()
        reports = [train_step(state, parity.batch(state, step), NextTokenHead()) for step in range(STEPS)]
        if state.platform.rank == 0:
            (folder / mesh).write_text(json.dumps({"losses": [report.loss for report in reports]}))
    platform.stop()
