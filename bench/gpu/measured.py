"""Steps that measure speed and memory."""

import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.device import GIB, Machine, NotRunError, replayable, set_up_again, slice_batch, slice_config, slice_model
from bench.push import Reader
from mcore_rl.cli import doctor
from mcore_rl.config.load import load_config
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.rl.rollout import NativeConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.patches.gpu_packages import has_module
from mcore_rl.metrics.performance import known_peak_tflops, measured_peak_flops
from mcore_rl.model.build import build_model
from mcore_rl.model.hf_stream import WeightStream
from mcore_rl.planning.flops import train_flops_per_token
from mcore_rl.planning.memory import Memory, memory_of_fullest_rank
from mcore_rl.planning.training import training_of
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.engines.weight_push import FileTransport, Sender, Stopwatch
from mcore_rl.train import setup
from mcore_rl.train.step import NextTokenHead, train_step
from tests.hf_models import VOCAB

COPIED_BYTES = 2**32
"""Bytes of a copy that is timed, several times what a cache holds."""
FIELD = {"stock recipe": 240, "tuned, balance forced": 299}
"""TFLOP/s that others have published for the whole of Qwen3-30B-A3B on an H100."""
VLLM = Path(".venv-vllm/bin/python")
VLLM_MEMORY = "0.3"
"""Fraction of the GPU for a server, beside which a model trains."""


def machine(on: Machine) -> str:
    """Everything that `mcore-rl doctor` finds, and what the device does at best: products in bf16, copies."""
    on.keep("doctor", doctor.examine())
    if not on.is_gpu:
        return "CPU"
    # Triton builds its launcher with them; a part of a GPU ("MIG 1g.18gb") has a part of its speed and memory.
    headers = Path(sysconfig.get_path("include"), "Python.h")
    tools = {tool: shutil.which(tool) for tool in ("gcc", "clang", "nvcc", "ninja")}
    on.keep("tools", tools | {"Python.h": headers.exists()})
    name = torch.cuda.get_device_name(on.device)
    known = known_peak_tflops(name, "bf16")
    on.keep("known_peak_tflops", known)
    on.show("name", name, "" if known else "its peak is unknown, and so is MFU")
    if not on.is_large:
        return name
    on.keep("measured_peak_flops", measured_peak_flops(on.device, torch.bfloat16))
    numbers = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=on.device)
    other = torch.empty_like(numbers)
    # Read once and written once.
    on.keep("copied_bytes_per_s", 2 * COPIED_BYTES / on.seconds(lambda: other.copy_(numbers), 10))
    peak, copied = on.figures["measured_peak_flops"] / 1e12, on.figures["copied_bytes_per_s"] / 1e12
    on.show("products in bf16", f"{peak:.0f} TFLOP/s", f"its maker's peak: {known}" if known else "")
    on.show("copies, read and written", f"{copied:.2f} TB/s")
    return f"{name}, {peak:.0f} TFLOP/s in bf16, {copied:.1f} TB/s"


def memory(on: Machine) -> str:
    """The planner's figures beside the peak of two training steps, for five configs, and beside page-locked bytes."""
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

        def two_steps(config: Any = config) -> None:
            state = set_up_again(config, platform.start(config.platform))
            for _ in range(2):
                train_step(state, slice_batch(state, rows, length), NextTokenHead())

        plan = memory_of_fullest_rank(replace(training_of(config, 1), seq_length=length)).total
        on.beside_plan(f"peak of training, {name}", on.peak_bytes(two_steps), plan)
    page_locked(on)
    ratios = [f["estimate_bytes"] / f["peak_bytes"] for f in on.figures.values() if f["peak_bytes"]]
    return f"planned / found {min(ratios):.2f} to {max(ratios):.2f}" if ratios else "no peaks without a GPU"


def page_locked(on: Machine) -> None:
    """Compare the main memory that is locked for a policy's optimizer state with the planner's figure."""
    config = rl_config(on, slice_model(on, layers=1), "rl.update.store=host")

    def locked_bytes() -> int:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"]) if on.is_gpu else 0

    before, plan = locked_bytes(), plan_of(config).host
    state = set_up_again(config, platform.start(config.platform))
    with state.residence.for_updates():  # the moments come to be in the first step
        train_step(state, slice_batch(state, 1, 64), NextTokenHead())
    found = locked_bytes() - before if on.is_gpu else None
    del state
    on.beside_plan("page-locked for the optimizer in main memory", found, plan)
    if found is not None:
        on.expect("page-locked bytes beside the planner's", abs(found / plan - 1), 0.1)


def plan_of(config: RlRunConfig) -> Memory:
    """Return the planner's memory of one rank."""
    return memory_of_fullest_rank(training_of(config, 1))


def rl_config(on: Machine, model: ModelConfig, *fields: str) -> RlRunConfig:
    """Return the config of examples/grpo_step.py with another model and further fields."""
    from examples import grpo_step as example

    config = load_config(RlRunConfig, None, [*example.SETTINGS.split(), *fields])
    settings = PlatformConfig(precision="bf16" if on.is_gpu else "fp32", layers="torch")
    return config.model_copy(update={"model": model, "platform": settings})


def slice(on: Machine) -> str:  # the step's name
    """Training speed of four layers of Qwen3-30B-A3B in bf16: ours, transformers, Megatron's local layers."""
    model = slice_model(on)
    rows, length, repeats = (8, 4096, 3) if on.is_large else (1, 64, 1)
    on.keep("rows", rows)
    on.keep("length", length)
    on.keep("field", FIELD)
    peak = known_peak_tflops(torch.cuda.get_device_name(on.device), "bf16") if on.is_gpu else None
    of_h100 = known_peak_tflops("NVIDIA H100 80GB HBM3", "bf16") or float("nan")
    marks = "; ".join(f"{mark} (MFU {mark / of_h100:.0%}) {name}" for name, mark in FIELD.items())
    ways: dict[str, Callable[[], Callable[[], Any]]] = {"ours": lambda: our_step(on, model, rows, length)}
    ways["transformers"] = lambda: transformers_step(on, model, rows, length, compiled=False)
    if has_module("transformer_engine") and on.is_gpu:
        ways["ours, TransformerEngine"] = lambda: our_step(on, model, rows, length, layers="te")
    # Its attention stores all scores: one row at a time.
    ways["Megatron local"] = lambda: our_step(on, model, 1, length, local=True)
    if on.is_gpu:
        # Last: it compiles for longer than the others take together.
        ways["transformers, compiled"] = lambda: transformers_step(on, model, rows, length, compiled=True)
    speeds: dict[str, float] = {}
    for name, make in ways.items():
        used = 1 if name == "Megatron local" else rows
        try:
            seconds = on.seconds(make(), repeats)
        except Exception as error:  # of compilers too: the other ways are measured still
            if name == "ours":
                raise
            on.fail(name, error)
        else:
            speeds[name] = tflops = used * length * train_flops_per_token(model, length) / seconds / 1e12
            speed = {"step_s": seconds, "tflops": round(tflops, 2), "tokens_per_s": used * length / seconds}
            on.keep(name, speed | ({"mfu": tflops / peak} if peak else {}))
            mfu = f"MFU {tflops / peak:.1%}" if peak else "MFU unknown"
            is_ours = name.startswith("ours")
            beside = (
                f"Qwen3-30B-A3B on H100: {marks}" if is_ours else f"ours is {speeds['ours'] / tflops:.2f} times this"
            )
            on.show(f"training, {name}", f"{tflops:.3g} TFLOP/s, {mfu}", beside)
        if on.is_gpu:
            torch.cuda.empty_cache()
    return ", ".join(f"{name} {tflops:.3g}" for name, tflops in speeds.items()) + " TFLOP/s"


def our_step(
    on: Machine, model: ModelConfig, rows: int, length: int, *, local: bool = False, layers: str = "torch"
) -> Callable[[], Any]:
    """Return a training step of ours; with `local` of a model with Megatron's own layers without TransformerEngine."""
    settings = PlatformConfig.model_validate({"precision": "bf16", "layers": layers})
    with megatron_layers() if local else nullcontext():
        state = set_up_again(slice_config(model, rows, settings), platform.start(settings))
    batch = slice_batch(state, rows, length)
    return lambda: train_step(state, batch, NextTokenHead())


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


def rl(on: Machine) -> str:
    """The rollout engine's tokens/s step by step and by CUDA graphs, and passes with and without replay (R2)."""
    from bench.replay import Bench
    from tests.generating import prompt_of, spelled

    model = slice_model(on)
    count, prompt, answer = (64, 256, 128) if on.is_large else (4, 8, 4)
    sizes = (f"rl.prompts.max_tokens={prompt}", f"rl.rollout.max_new_tokens={answer}", f"rl.engine.slots={count}")
    config = rl_config(on, model, *sizes, f"rl.rollout.prompts_per_step={count}", "rl.rollout.group_size=1")
    plan = plan_of(config)
    chunks = build_model(model, on.mesh, platform.start(config.platform), config.platform)
    prompts = [prompt_of(torch.randint(0, model.vocab_size, (prompt,)).tolist(), str(index)) for index in range(count)]
    sampling = Sampling(max_new_tokens=answer)
    rates: dict[str, float] = {}
    drawn: dict[str, list[int]] = {}
    tokens = count * answer
    # A CPU computes the steps of fixed shapes without graphs.
    # With equal shapes the kernels are equal, and so are the tokens; without fixed shapes bf16 may round otherwise.
    for name, is_fixed, by_graphs in (
        ("step by step", False, False),
        ("in fixed shapes", True, False),
        ("by graphs", True, True),
    ):
        native = NativeConfig(slots=count, cuda_graphs=by_graphs if on.is_gpu else "auto")
        engine = MegatronEngine(chunks, on.mesh, model, spelled, native, has_fixed_shapes=is_fixed)
        engine.generate(prompts[:1], Sampling(max_new_tokens=4), [[0]])  # libraries make what they make once

        def generate(engine: MegatronEngine = engine, name: str = name) -> None:
            begin = time.perf_counter()
            groups = list(engine.generate(prompts, sampling, [[index] for index in range(count)]))
            on.wait()
            drawn[name] = [token for group in groups for one in group.completions for token in one.tokens_T]
            rates[name] = len(drawn[name]) / (time.perf_counter() - begin)

        peak = on.peak_bytes(generate)
        on.keep("rollout_tokens_per_s", rates)
        on.show(f"rollout, {name}", f"{rates[name]:.0f} tokens/s", f"{count} completions of {answer} tokens")
        # The engine is alone: neither gradients nor optimizer state.
        on.beside_plan(f"peak of a rollout, {name}", peak, plan.weights + plan.rollout_cache)

    def differing(name: str) -> float:
        return 1 - sum(a == b for a, b in zip(drawn[name], drawn["by graphs"], strict=True)) / tokens

    on.expect("tokens by CUDA graphs beside the same steps without", differing("in fixed shapes"), 0.0)
    on.keep("same_tokens", 1 - differing("step by step"))
    del engine, generate, chunks
    destroy_mesh()
    bench = Bench(slice_model(on, layers=2).model_copy(update={"moe": replayable(model.moe)}))
    without, replayed = on.seconds(bench.without, 2), on.seconds(bench.ours, 2)
    del bench
    on.keep("without_replay_s", without)
    on.keep("replay_r2_s", replayed)
    on.show("passes with replay (R2)", f"{replayed:.3f} s", f"without: {without:.3f} s, {replayed / without - 1:+.1%}")
    seconds = grpo_step(on)
    return (
        f"rollout {rates['step by step']:.0f} tokens/s, by graphs {rates['by graphs']:.0f}, replay "
        f"{replayed / without - 1:+.1%} of the passes, a GRPO step {seconds:.2f} s"
    )


def grpo_step(on: Machine) -> float:
    """Return the seconds of a rollout of 128 short completions with two updates, with Qwen3's 151,936 ids, and show the
    peak of each part, and of a push of the weights, beside the planner's.
    """
    from examples import grpo_step as example

    model, ids = slice_model(on, layers=2), 151_936 if on.is_large else VOCAB
    model = model.model_copy(update={"moe": replayable(model.moe), "vocab_size": ids})
    example.CONFIG = config = rl_config(on, model, "rl.prompts.max_tokens=2")
    plan = plan_of(config).phases
    destroy_mesh()
    if on.is_gpu:
        torch.cuda.empty_cache()
    state = setup.set_up(config, platform.start(config.platform))
    seconds = on.seconds(lambda: example.update(state, *example.sample(state)), 1)
    on.keep("grpo_step", {"ids": ids, "seconds": seconds})
    on.show(f"a GRPO step with {ids:,} ids", f"{seconds:.2f} s", "128 completions, two updates")
    on.beside_plan("peak of its rollout", on.peak_bytes(lambda: example.sample(state)), plan["rollout"])
    groups = example.sample(state)
    on.beside_plan("peak of its updates", on.peak_bytes(lambda: example.update(state, *groups)), plan["update"])
    weights, served = WeightStream(state.chunks, state.mesh, model), rl_config(on, model, "rl.engine.kind=vllm")

    def push() -> None:
        sender = Sender([Reader()])  # type: ignore[list-item]  # a reader does what a server's worker does
        FileTransport(tempfile.mkdtemp(), weights).send(sender, Stopwatch())
        if not sender.living:
            raise AssertionError(f"the push failed: {sender.failed}")

    pushed = on.peak_bytes(push)
    on.beside_plan("peak of a push of its weights", pushed, plan_of(served).phases["push"])
    return seconds


def vllm_python() -> str | None:
    """Return a Python that has vLLM: the one that MCORE_RL_VLLM names, .venv-vllm's or this one; None without any."""
    if named := os.environ.get("MCORE_RL_VLLM"):
        return named
    return str(VLLM) if VLLM.exists() else sys.executable if has_module("vllm") else None


def servers(on: Machine) -> str:
    """A push of a model's weights by files to a vLLM server, its probe, and the server's tokens/s."""
    return _served(on, "mcore_files")


def slots(on: Machine) -> str:
    """The same by memory that trainer and server share: CUDA IPC, or named shared memory on a CPU."""
    return _served(on, "mcore_slots", transport="ipc", share_gpus=True)


def _served(on: Machine, backend: str, **engine: Any) -> str:
    python = vllm_python()
    if python is None:
        raise NotRunError(f"vLLM is not installed: MCORE_RL_VLLM names no Python, {VLLM} does not exist")
    # Not above: it needs what only tests of servers need.
    from tests.servers.vllm_server import MODELS, Trainer, VllmServer, generated, random_prompts

    model = slice_model(on, layers=2) if on.is_large else MODELS["qwen3_moe"]
    dtype, precision = ("bfloat16", "bf16") if on.is_gpu else ("float32", "fp32")
    arguments = ("--gpu-memory-utilization", VLLM_MEMORY) if on.is_gpu else ()
    count, prompt, answer = (64, 256, 128) if on.is_large else (4, 8, 16)
    with tempfile.TemporaryDirectory() as folder:
        server = VllmServer(python, model, Path(folder, "model"), backend=backend, dtype=dtype, arguments=arguments)
        try:
            begin = time.perf_counter()
            server.wait()
            on.show("start of a vLLM server", f"{time.perf_counter() - begin:.0f} s")
            trainer = Trainer(model, on.mesh, precision)
            trainer.randomize(seed=1)
            reports = []
            peak = on.peak_bytes(lambda: reports.append(trainer.push(server.api, **engine)))
            (report,) = reports
            if not report.living:
                raise AssertionError(f"the push failed: {dict(report.failed)}")
            seconds = sum(report.seconds.values())
            on.keep("push", {"bytes": report.num_bytes, "seconds": dict(report.seconds), "probe": report.probe})
            on.show("push with its probe", f"{report.num_bytes / GIB:.3f} GiB in {seconds:.2f} s", str(report.seconds))
            on.show("probe", f"{report.probe:.1e} nats", f"at most {report.limit.limit:.1e}")
            words = [f"rl.engine.{name}={str(value).lower()}" for name, value in engine.items()]
            plan = plan_of(rl_config(on, model, "rl.engine.kind=vllm", *words))
            on.beside_plan("peak of a push, of weights alone", peak, plan.weights + plan.pushed)
            prompts = random_prompts(count, prompt, model.vocab_size)
            begin = time.perf_counter()
            made = generated([server.api], prompts, max_new=answer, temperature=1.0, salt="bench")
            rate = sum(len(one.tokens_T) for one in made) / (time.perf_counter() - begin)
            on.keep("tokens_per_s", rate)
            on.show("rollout by the server", f"{rate:.0f} tokens/s", f"{count} completions of {answer} tokens")
        finally:
            server.close()
    return f"{report.num_bytes / GIB:.2f} GiB pushed in {seconds:.2f} s, the probe is {report.probe:.1e} nats"
