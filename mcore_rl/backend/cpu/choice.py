"""The choice of a CPU's kernels, by measuring where the config says "auto".

On Intel MKL is as fast as oneDNN and needs no copies of the operands of a weight's gradient, and torch's attention is
2.5 times as fast as ours; on AMD's Zen 5 MKL leaves half of the processor unused. No name of a processor says so for
the next one, and a few milliseconds of each do.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mcore_rl.backend.cpu import compiled_attention
from mcore_rl.backend.cpu.attention import causal_attention
from mcore_rl.backend.cpu.compiled import BuildError, build_id, library
from mcore_rl.backend.cpu.kernels import HAS_ONEDNN, Attention, CpuKernels, Half, Products, Rounded, using
from mcore_rl.backend.cpu.products import add_weight_gradient, product
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import ConfigError

CLEARLY = 1.25
"""How many times as fast as the usual way another must be: runs on one machine then choose the same way."""
ROUNDS = 8
"""Number of times that each is measured."""
ROWS, WIDTH, HEADS, GROUPS, HEAD_WIDTH = 256, 256, 2, 1, 64
"""Sizes that are measured: an expert's rows and matrix, and one sequence of ROWS positions."""
FP32 = "fp32"
"""Name of products that are not rounded, beside those that are."""
Name = TypeVar("Name", Products, Attention, Rounded, Half, str)


def choose(config: PlatformConfig, world_size: int) -> tuple[CpuKernels, str]:
    """Collective over the world: return the kernels of all ranks and a sentence about them; rank 0 measures.

    The compiled file is built where no rank of this user has done so, and used where all ranks have the same build.

    Raises:
        ConfigError: The config names a library or a compiled file that a rank does not have.
    """
    if config.products == "onednn" and not HAS_ONEDNN:
        raise ConfigError(
            'platform.products="onednn", and this torch was built without oneDNN. Use "auto" or "mkl".'
        )
    compiled, reason = _compiled(config, world_size)
    box: list[tuple[CpuKernels, str] | None] = [None]
    if world_size == 1 or dist.get_rank() == 0:
        threads = torch.get_num_threads()
        asked = (
            *(config.precision, config.products, config.attention),
            *(compiled, config.batch_invariant, threads),
        )
        known = measurements()
        if asked not in known:
            known[asked] = _measured(config, compiled)
        box = [known[asked]]
    if world_size > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    assert box[0] is not None
    kernels, measured = box[0]
    return kernels, kernels.describe() + (f" ({reason})" if reason else "") + measured


@functools.cache
def measurements() -> dict[tuple[object, ...], tuple[CpuKernels, str]]:
    """Return what this process has measured, by what it was asked, to be added to: it measures once, and processes that
    are forked from it need not.
    """
    return {}


def _compiled(config: PlatformConfig, world_size: int) -> tuple[str, str]:
    """Collective over the world: return the build that all ranks have, or "none" and the reason."""
    build, reason = _build(config)
    builds = [(build, reason)]
    if world_size > 1:
        builds = [("", "")] * world_size
        dist.all_gather_object(builds, (build, reason))
    for rank, (of_rank, why) in enumerate(builds):
        if of_rank != builds[0][0]:
            why = why or f"rank {rank} has another processor, compiler or version than rank 0"
            build, reason = "none", f"rank {rank}: {why}" if world_size > 1 else why
            break
    else:
        reason = builds[0][1]
    if build == "none" and config.compiled is True:
        raise ConfigError(f'platform.compiled=true, and it cannot be: {reason}. Use "auto" or false.')
    if build == "none" and config.attention == "compiled":
        raise ConfigError(
            f'platform.attention="compiled", and it cannot be: {reason}. Use "auto", "sdpa" or "blocks".'
        )
    return build, reason


def _build(config: PlatformConfig) -> tuple[str, str]:
    if config.compiled is False:
        return "none", ""
    if config.batch_invariant:
        return "none", "platform.batch_invariant=true needs products in tiles"
    if config.compiled == "auto" and torch.get_num_threads() > 1:
        return "none", f"they compute with one thread, and this rank has {torch.get_num_threads()}"
    try:
        library()
        return build_id(), ""
    except BuildError as error:
        return "none", str(error)


def _measured(config: PlatformConfig, compiled: str) -> tuple[CpuKernels, str]:
    products, attention = config.products, config.attention
    rounded: Rounded = "torch"
    half: Half = "fp32" if config.precision == "bf16" else "none"
    note = ""
    times: list[tuple[str, float]] = []
    # Random numbers of the run are not drawn for this.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        if products == "auto":
            of_products = _least_s({name: _layer(CpuKernels(name)) for name in _products_here()})
            products = fastest(of_products, "mkl")
            times += of_products.items()
        # Numbers of tensors in bf16 are rounded already, and a run of these expects no more digits of the others.
        may_round = config.products == "auto" and config.precision == "bf16" and compiled != "none"
        if products == "bf16" or may_round:
            here = _rounded_here(compiled)
            ways = {f"bf16 {way}": _layer(CpuKernels("bf16", "sdpa", compiled, way)) for way in here}
            unrounded = CpuKernels("mkl" if products == "bf16" else products)
            of_ways = _least_s(ways | {FP32: _layer(unrounded)})
            fastest_way = fastest({way: of_ways[f"bf16 {way}"] for way in here}, here[-1])
            saves_time = fastest({way: of_ways[way] for way in (f"bf16 {fastest_way}", FP32)}, FP32) != FP32
            if products == "bf16" and not saves_time:
                note = "; products of bf16 save no time on this processor"
            if products == "bf16" or saves_time:
                products, rounded = "bf16", fastest_way
            times += of_ways.items()
        if attention == "auto":
            candidates: dict[Attention, Callable[[], None]] = {"sdpa": _attending(_sdpa)}
            if compiled != "none":
                candidates["compiled"] = _attending(compiled_attention.causal_attention)
            if products != "bf16":  # Its products would be rounded.
                candidates["blocks"] = _attending(causal_attention)
            with using(CpuKernels(products, "blocks", compiled)):
                of_attention = _least_s(candidates)
            attention = fastest_attention(of_attention)
            times += of_attention.items()
    kernels = CpuKernels(products, attention, compiled, rounded, half)
    measured = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times)
    return kernels, f"; measured: {measured}{note}" if times else ""


def _products_here() -> tuple[Products, ...]:
    return ("mkl", "onednn") if HAS_ONEDNN else ("mkl",)


def _rounded_here(compiled: str) -> tuple[Rounded, ...]:
    """Return the ways to multiply rounded operands, the usual one last."""
    if compiled == "none" or not library().rounds_operands:
        return ("mkl", "torch")
    has_both = library().multiplies_bf16 and library().sgemm is not None
    # Intel's processors without AMX have the instruction and multiply by it half as fast as in fp32.
    return ("torch", "mkl", "compiled_fp32", "compiled") if has_both else ("torch", "mkl", "compiled")


def fastest(times: Mapping[Name, float], usual: Name) -> Name:
    """Return the name with the least seconds, or the usual one where that is not clearly faster."""
    best = min(times, key=lambda name: times[name])
    return best if times[best] * CLEARLY <= times[usual] else usual


def fastest_attention(times: Mapping[Attention, float]) -> Attention:
    """Return torch's attention, or the compiled or own one that is clearly faster; of these two the compiled one, which
    the own one must beat clearly too.
    """
    usual: Attention = "sdpa"
    if "compiled" in times:
        usual = fastest({name: times[name] for name in ("sdpa", "compiled")}, usual)
    return fastest(times, usual)


def _layer(kernels: CpuKernels) -> Callable[[], None]:
    """Return a linear layer, forwards and backwards, by one library."""
    rows, weight = (torch.randn(size, WIDTH) for size in (ROWS, WIDTH))
    total = torch.zeros(WIDTH, WIDTH)

    def work() -> None:
        with using(kernels):
            output = product(rows, weight)
            product(output, weight.t())
            add_weight_gradient(total, output, rows)

    return work


def _attending(attention: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Callable[[], None]:
    """Return causal attention of one sequence, forwards and backwards."""
    query = torch.randn(ROWS, 1, HEADS, HEAD_WIDTH, requires_grad=True)
    key, value = (torch.randn(ROWS, 1, GROUPS, HEAD_WIDTH, requires_grad=True) for _ in range(2))

    def work() -> None:
        mixed = attention(query, key, value, HEAD_WIDTH**-0.5)
        torch.autograd.grad(mixed.square().sum(), (query, key, value))

    return work


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def _least_s(candidates: Mapping[Name, Callable[[], None]]) -> dict[Name, float]:
    """Return the CPU seconds of each in its fastest round.

    They take turns: what else runs on a machine slows down neither in all rounds, and never only one of them.
    """
    least = dict.fromkeys(candidates, float("inf"))
    for index in range(ROUNDS + 1):
        for name, work in candidates.items():
            start_s = time.thread_time()
            work()
            if index:  # In the first round kernels are compiled.
                least[name] = min(least[name], time.thread_time() - start_s)
    return least
