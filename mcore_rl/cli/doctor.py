"""`mcore-rl doctor`: the machine's equipment for training, and the cost of missing parts."""

import argparse
import json
import os
import platform
import resource
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl import __version__
from mcore_rl.checks import cluster as nodes
from mcore_rl.cli.node_check import shared_memory_faults
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.config.speed import SpeedFlags, run_flags
from mcore_rl.megatron.kernels import KERNEL, has_kernel
from mcore_rl.megatron.patches.gpu_packages import GpuPackages, has_module
from mcore_rl.megatron.patches.table import FOUND, INSTALLED
from mcore_rl.megatron.platform import adam_package, compiled_layers, variables_of_device
from mcore_rl.model.layers.experts import HAS_GROUPED_MM
from mcore_rl.model.transformer_config import PERMUTE_KERNELS, ROUTER_KERNELS, has_kernels, machine_here
from mcore_rl.storage.files import write_atomically
from mcore_rl.workers.launcher import environment_variable, rank_of_launcher, world_size_of_launcher

GIB = 2**30
FAULTY = 1
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("torch megatron-core transformers transformer-engine apex triton deep-ep isal safetensors numpy").split()
OPEN_FILES = 4096
"""Number of open files that a rank with many checkpoint shards, sockets and data files needs."""


def main(args: argparse.Namespace) -> int:
    """Print the findings, with --nodes of all nodes on the first; return 0, or FAULTY if something is broken."""
    found = examine()
    if not args.nodes:
        text = json.dumps(found, indent=1) if args.json else "\n".join(lines_of(found))
        sys.stdout.write(f"{text}\n")
        return FAULTY if found["faults"] else 0
    # Slurm's name for a node, used in its other messages, may differ from the host's name.
    nodes.answer(args.nodes, environment_variable("SLURMD_NODENAME") or socket.gethostname(), found)
    if rank_of_launcher():
        return 0
    num_nodes = world_size_of_launcher()
    answers = nodes.answers(args.nodes, num_nodes)
    lines_of_host = {host: list(lines_of(dict(findings))) for host, findings in answers.items()}
    report = nodes.report(answers, lines_of_host, num_nodes)
    write_atomically(args.nodes / nodes.REPORT, "\n".join(report) + "\n")
    sys.stdout.write("\n".join(report) + "\n")
    return FAULTY if report[-1] == nodes.FAULTY else 0


def examine() -> dict[str, Any]:
    """Return the findings by topic, for JSON: a CPU is timed and its file compiled, a GPU multiplies a small matrix."""
    return {
        "versions": dict(versions()),
        "devices": devices(),
        "layers": "te" if FOUND.has_te else "torch",
        "adam": adam_package(),
        "kernels": kernels(),
        "cpu": cpu_layers(),
        "speed": asdict(speed()),
        "communication": communication(),
        "limits": limits(),
        "patches": [
            {"symbol": patch.symbol, "cause": patch.cause, "reason": patch.reason, "until": patch.until}
            for patch in INSTALLED
        ],
        "missing": [{"what": what, "costs": costs} for what, costs in missing(FOUND, kernels())],
        "faults": [*faults(FOUND), *shared_memory_faults(max(1, len(devices())))],
    }


def versions() -> Iterator[tuple[str, str]]:
    """Yield the versions of this package, of Python, and of the installed packages that training uses."""
    yield "mcore_rl", __version__
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        yield "CUDA of torch", torch.version.cuda
    if NVIDIA_DRIVER.exists():
        yield "NVIDIA driver", NVIDIA_DRIVER.read_text().splitlines()[0].strip()


def devices() -> list[dict[str, Any]]:
    """Return every GPU's name, compute capability, memory and free memory; empty without a GPU."""
    if not FOUND.has_cuda:
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        found.append(
            {
                "name": torch.cuda.get_device_name(index),
                "capability": capability,
                "memory_gib": round(total / GIB, 1),
                "free_gib": round(free / GIB, 1),
            }
        )
    return found


def kernels() -> dict[str, bool]:
    """Return, for each fused kernel that the layers can use, whether it is available."""
    te = FOUND.has_te
    return {
        "grouped products of experts (torch)": HAS_GROUPED_MM,
        f"attention of packed sequences in one call ({KERNEL})": has_kernel(),
        "permutation of tokens (TransformerEngine)": te and has_kernels(*PERMUTE_KERNELS),
        "router (TransformerEngine)": te and has_kernels(*ROUTER_KERNELS),
        "cross entropy (TransformerEngine)": te,
        "weight gradients added in place (apex)": te and has_module("fused_weight_gradient_mlp_cuda"),
        "DeepEP dispatcher": FOUND.has_cuda and has_module("deep_ep"),
    }


def cpu_layers() -> dict[str, str]:
    """Return the compiled layers' build, or "" and why there is none; empty on a GPU. It uses one thread."""
    if FOUND.has_cuda:
        return {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        build, reason = compiled_layers(PlatformConfig())
    finally:
        torch.set_num_threads(threads)
    if build and threads > 1:
        reason = f"a run of one rank has {threads} threads here and takes torch's layers: OMP_NUM_THREADS=1"
    return {"build": build, "reason": reason}


def speed() -> SpeedFlags:
    """Return the speed flags on this machine, for pretraining a bf16 model with experts on several ranks."""
    device = torch.device("cuda", 0) if FOUND.has_cuda else torch.device("cpu")
    machine = machine_here(device, has_te_layers=FOUND.has_te, world_size=2)
    settings = PlatformConfig(precision="bf16", fp8="hybrid" if FOUND.has_te else "none")
    model = ModelConfig(family="qwen3_moe", moe=MoEConfig(num_experts=2, top_k=1, ffn_hidden_size=1))
    return run_flags(PretrainConfig(platform=settings, model=model), machine)


def communication() -> dict[str, Any]:
    """Return the communication library and its version."""
    if not FOUND.has_cuda:
        return {"library": "gloo", "version": torch.__version__}
    if not dist.is_nccl_available():
        return {"library": "none", "version": ""}
    nccl: Any = torch.cuda.nccl.version()
    return {"library": "NCCL", "version": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)}


def limits() -> dict[str, Any]:
    """Return the machine's cores and memory, the process's limits, and environment variables of allocators."""
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "open_files": soft_files,
        "variables": variables_of_device(),
    }


def missing(found: GpuPackages, there: dict[str, bool]) -> Iterator[tuple[str, str]]:
    """Yield a sentence for each missing part with its cost, in the terms of the log and the config."""
    if not found.has_cuda:
        yield "a GPU", "all runs on the CPU, by gloo: right numbers, for tests and small models"
        return
    if not found.has_te:
        yield (
            "TransformerEngine",
            "no fp8 (platform.fp8); norms, router and permutation of tokens are separate kernels, and with ep > 1 "
            "the host waits for the GPU once in every layer of experts; this package's layers in its place, the same "
            "checkpoints",
        )
    if not found.has_te and not found.has_apex:
        yield ("a fused Adam (TransformerEngine or apex)", "torch's fused kernel in its place, with the same state")
    if not there["DeepEP dispatcher"]:
        yield (
            "deep_ep",
            'model.moe.dispatcher="deepep" is refused; tokens travel by NCCL\'s all-to-all, slower across nodes',
        )
    if not there["grouped products of experts (torch)"]:
        yield (
            "grouped_mm of torch",
            "experts are computed one after another, and the host waits for their counts: torch >= 2.10 has it",
        )


def faults(found: GpuPackages) -> Iterator[str]:
    """Yield a sentence for each installed component that is unusable."""
    if NVIDIA_DRIVER.exists() and not found.has_cuda:
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs"
        yield (
            f"there is an NVIDIA driver, but torch {torch.__version__} ({build}) sees no GPU. Install the build of "
            "torch for the driver's CUDA, or look at CUDA_VISIBLE_DEVICES."
        )
    if found.has_cuda:
        for package, reason in found.unusable.items():
            yield (
                f"{package} is installed, but cannot be used: {reason}. Install a build for this torch, or remove it."
            )
        for index in range(torch.cuda.device_count()):
            ones = torch.ones(256, 256, device=torch.device("cuda", index))
            if not bool((ones @ ones == 256).all()):
                yield f"GPU {index} multiplies matrices of ones to something else than 256."
        if communication()["library"] == "none":
            yield "torch has no NCCL: ranks on GPUs cannot talk to each other. Install another build of torch."
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(OPEN_FILES, 1024):
        yield f"a process may open {soft} files only, {OPEN_FILES} are wanted: ulimit -n {min(hard, OPEN_FILES)}"


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """Yield the report's lines as text."""
    yield "versions   " + ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    for index, device in enumerate(found["devices"]):
        yield (
            f"GPU {index}      {device['name']}, capability {device['capability']}, {device['free_gib']} of "
            f"{device['memory_gib']} GiB free"
        )
    if not found["devices"]:
        yield "device     CPU"
    layers = "TransformerEngine's" if found["layers"] == "te" else "this package's, in torch"
    yield f"layers     {layers}; Adam of {found['adam']}"
    yield f"ranks      {found['communication']['library']} {found['communication']['version']}"
    limits_ = found["limits"]
    variables = "".join(f", {name}={value}" for name, value in limits_["variables"].items())
    yield (
        f"limits     {limits_['cores']} cores, {limits_['memory_gib']} GiB, {limits_['open_files']} open files"
        f"{variables}"
    )
    yield "kernels"
    for name, is_there in found["kernels"].items():
        yield f"  {'yes' if is_there else 'no ':<4} {name}"
    if cpu := found["cpu"]:
        compiled = f"compiled layers, build {cpu['build']}" if cpu["build"] else "no compiled layers"
        yield f"CPU        {compiled}" + (f" ({cpu['reason']})" if cpu["reason"] else "")
    yield f"auto       {SpeedFlags(**found['speed']).describe()} (bf16, experts, several ranks)"
    causes = Counter(patch["cause"] for patch in found["patches"])
    yield "patches    " + ", ".join(f"{count} for {cause}" for cause, count in causes.items())
    for entry in found["missing"]:
        yield f"missing    {entry['what']}: {entry['costs']}"
    for fault in found["faults"]:
        yield f"FAULT      {fault}"
    yield nodes.FAULTY if found["faults"] else nodes.SOUND
