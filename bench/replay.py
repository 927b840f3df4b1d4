"""The cost of routing replay beside an RL step without it, and beside caching int64 in Megatron's RouterReplay.

    python -m bench.replay                 all models, bytes of the shape of Qwen3-30B-A3B; results/replay.json

A step is a pass for old logprobs and an update's forward and backward pass over the same packed rows, fp32, one
thread. Ours records in the first and imposes in the second: routes in a byte, checksums, accounts, and the comparison
with the live choice. RouterReplay records and imposes too, checks and compares nothing; its indices are kept as it
gives them, int64. R3 takes routes as an engine returns them, checks and exchanges them, and imposes them in both
passes. The four, and a second step without replay that shows the noise, take turns in an order that rotates; figures
are CPU time of this process: the median over the rounds of the difference to the step without replay of the same
round, with the interval that holds the true median with 95 % probability (order statistics).
`attributed` is the CPU time inside the tape and its hooks, without the top-k that routers compute anyway: less noisy
than a difference of steps.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; a thread each on a shared machine

import torch
from torch import Tensor, nn

from bench.clock import Clock, Peaks, circumstances, circumstances_line, contention, write_results
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.megatron.schedule import Routing, free_routing, run_pass
from mcore_rl.metrics.metrics import reduced
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.replay import router_hooks as route_hooks
from mcore_rl.replay.cache import MicrobatchLayout, RouteStorage, RoutingCache, SampleSpan
from mcore_rl.replay.from_rollouts import RolloutRoutes, cache_rollout_routes
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.replay.witness import SampledTokens, Witness
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead

RESULTS = Path(__file__).parent / "results" / "replay.json"
MODELS = {
    "tiny: 4 layers, hidden 128, 4 of 16": ModelConfig(
        num_layers=4,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        moe=MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=64, balance="none", aux_loss_coeff=0.0),
    ),
    "small: 8 layers, hidden 256, 4 of 16": ModelConfig(
        num_layers=8, moe=MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=256, balance="none", aux_loss_coeff=0.0)
    ),
    "fine-grained: 4 layers, hidden 512, 8 of 128": ModelConfig(
        num_layers=4,
        hidden_size=512,
        moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=128, balance="none", aux_loss_coeff=0.0),
    ),
}
OWN = "the router's own choice, which it makes without replay too"
ROW, ROWS, SAMPLES_A_ROW = 1024, 4, 8
BIG_LAYERS, BIG_TOP_K, BIG_EXPERTS, BIG_TOKENS = 48, 8, 128, 16384


class Bench:
    """A model, a batch, and three ways to make a step of them."""

    def __init__(self, model: ModelConfig) -> None:
        config = PretrainConfig(model=model)
        self.state: TrainState = set_up(config, start(config.platform))
        self.layouts = [layout(row) for row in range(ROWS)]
        generator = torch.Generator().manual_seed(0)
        self.microbatches = [packed_row(model.vocab_size, generator, self.state) for _ in self.layouts]
        self.cache = RoutingCache(self.state.chunks, model, ReplayConfig(kind="r2"))
        self.rollout_cache = RoutingCache(self.state.chunks, model, ReplayConfig(kind="r3"))
        self.generated: dict[int, RolloutRoutes] = {}
        self.version = 0
        self.int64_bytes = self.our_bytes = 0

    @torch.no_grad()
    def old_pass(self, routing: Routing) -> None:
        """Logprobs of the old policy."""
        run_pass(self.state.chunks, self.microbatches, NextTokenHead(), backward=False, routing=routing)

    def update_pass(self, routing: Routing) -> None:
        """Forward and backward of an update; its optimizer step is left out."""
        for chunk in self.state.chunks:
            chunk.zero_grad_buffer()
        run_pass(self.state.chunks, self.microbatches, NextTokenHead(), backward=True, routing=routing)

    def without(self) -> None:
        """No replay."""
        self.old_pass(free_routing)
        self.update_pass(free_routing)

    def ours(self) -> None:
        """Record, impose."""
        self.version += 1
        arguments = (self.state.chunks, self.state.mesh, self.layouts, self.cache, self.version)
        with RoutingTape(*arguments) as tape:
            self.old_pass(tape.record())
            tape.finish()
        self.our_bytes = self.cache.num_bytes
        if not self.generated:
            self.generated = self.as_an_engine_returns_them()
        with RoutingTape(*arguments) as tape:
            self.update_pass(tape.impose())
            metrics = reduced(tape.finish())
        assert metrics["routes/changed_fraction"] < 1e-3
        self.cache.drop(self.version)

    def as_an_engine_returns_them(self) -> dict[int, RolloutRoutes]:
        """The recorded routes of each sample, with its tokens."""
        found = {}
        for one, microbatch in zip(self.layouts, self.microbatches, strict=True):
            begin = 0
            for span in one.spans:
                tokens = microbatch.tokens_Bs[0, begin : begin + span.num_positions]
                entry = self.cache.sample(self.version, span.sample)
                codes = self.cache.codes(entry, torch.arange(span.num_positions))
                found[span.sample] = RolloutRoutes(tokens.clone(), codes.clone())
                begin += span.num_positions
        return found

    def r3(self) -> None:
        """Check and exchange an engine's routes, impose them in both passes."""
        self.version += 1
        cache_rollout_routes(self.rollout_cache, self.version, self.generated, self.layouts, self.state.mesh)
        arguments = (self.state.chunks, self.state.mesh, self.layouts, self.rollout_cache, self.version)
        for run in (self.old_pass, self.update_pass):
            with RoutingTape(*arguments) as tape:
                run(tape.impose())
                tape.finish()
        self.rollout_cache.drop(self.version)

    def bytes_of_groups(self) -> dict[str, float]:
        """Bytes a token that R3 keeps where the samples of a row are completions of one prompt of half their length."""
        prompt = ROW // SAMPLES_A_ROW // 2
        found = {}
        for name, in_groups in (("each sample alone", False), ("prompts once a group", True)):
            generated = {}
            for sample, routes in self.generated.items():
                group = sample // SAMPLES_A_ROW
                first = self.generated[group * SAMPLES_A_ROW]
                halves = [
                    torch.cat([a[:prompt], b[prompt:]])
                    for a, b in ((first.tokens_T, routes.tokens_T), (first.experts_TLK, routes.experts_TLK))
                ]
                generated[sample] = RolloutRoutes(halves[0], halves[1], group if in_groups else None)
            arguments = (self.rollout_cache, self.version + 1, generated, self.layouts, self.state.mesh)
            cache_rollout_routes(*arguments)
            found[name] = self.rollout_cache.num_bytes / (ROW * ROWS)
            self.rollout_cache.drop(self.version + 1)
        return found

    def int64(self) -> None:
        """Replay with Megatron's RouterReplay, chunk by chunk and microbatch by microbatch."""
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        replays = []
        for _, router in replayed_routers(self.state.chunks[0]):
            router.router_replay = RouterReplay()
            replays.append(router.router_replay)
        held: list[list[Tensor]] = []

        @contextmanager
        def record(chunk: nn.Module, index: int) -> Iterator[None]:
            for replay in replays:
                replay.set_router_replay_action(RouterReplayAction.RECORD)
            yield
            held.append([replay.get_recorded_indices().clone() for replay in replays])

        @contextmanager
        def impose(chunk: nn.Module, index: int) -> Iterator[None]:
            for replay, target in zip(replays, held[index], strict=True):
                replay.set_target_indices(target)
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            yield
            for replay in replays:
                replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

        self.old_pass(record)
        self.int64_bytes = sum(target.nbytes for targets in held for target in targets)
        self.update_pass(impose)
        for _, router in replayed_routers(self.state.chunks[0]):
            router.router_replay = None
        RouterReplay.clear_global_router_replay_instances()


def layout(row: int) -> MicrobatchLayout:
    """Eight samples of different lengths, nothing left over."""
    lengths = [ROW // SAMPLES_A_ROW + step for step in range(-4, 5) if step]
    spans = [SampleSpan(row * SAMPLES_A_ROW + place, length, length) for place, length in enumerate(lengths)]
    return MicrobatchLayout((tuple(spans),), row_length=ROW, packed=True)


def packed_row(vocab_size: int, generator: torch.Generator, state: TrainState) -> LocalMicrobatch:
    """A row of random tokens in the spans of `layout`."""
    lengths = [span.num_positions for span in layout(0).spans]
    tokens = torch.randint(0, vocab_size, (1, ROW + 1), generator=generator)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return localize(
        Microbatch(
            tokens_BS=tokens[:, :-1],
            labels_BS=tokens[:, 1:],
            loss_mask_BS=torch.ones(1, ROW),
            position_ids_BS=torch.cat([torch.arange(length) for length in lengths])[None],
            packed=PackedSpans(cu_seqlens=bounds, max_length=max(lengths)),
        ),
        state.mesh.cp,
        state.platform.device,
    )


class Attribution:
    """CPU seconds inside the tape's own functions; a function called by another counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stack: list[float] = []

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its own time counted under `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._stack.append(0.0)
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.process_time() - begun
                inner = self._stack.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + took - inner
                if self._stack:
                    self._stack[-1] += took

        return call

    @contextmanager
    def attributing(self) -> Iterator[None]:
        """Inside, the parts of the tape are timed."""
        places: Sequence[tuple[Any, str, str]] = (
            (RoutingTape, "__init__", "lay_out"),
            (RoutingTape, "_in_chunk", "read"),
            (Witness, "_prepared", "lay_out"),
            (Witness, "_on_input", "witness"),
            (Witness, "_used_checksums", "witness"),
            (Witness, "_add_derivative", "witness"),
            (SampledTokens, "add", "witness"),
            (SampledTokens, "_compare", "witness"),
            (RoutingTape, "_sample_checksums", "finish"),
            (RoutingTape, "_add_checksums", "check_and_compare"),
            (RoutingTape, "_add_changes", "check_and_compare"),
            (RoutingTape, "_token_hashes", "check_and_compare"),
            (RoutingTape, "_add_recorded", "store"),
            (RoutingTape, "finish", "finish"),
            (RoutingCache, "add_recorded", "store"),
            (route_hooks.RouterHook, "get_replay_topk", "routers"),
        )
        originals = [getattr(owner, name) for owner, name, _ in places]
        for owner, name, label in places:
            setattr(owner, name, self.wrapped(label, getattr(owner, name)))
        asked = route_hooks.RouterHook.get_replay_topk

        def asking(*arguments: Any, default_compute_topk: Any = None) -> Any:
            *head, choose = arguments if default_compute_topk is None else (*arguments, default_compute_topk)
            return asked(*head, self.wrapped(OWN, choose))

        route_hooks.RouterHook.get_replay_topk = asking  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            for (owner, name, _), original in zip(places, originals, strict=True):
                setattr(owner, name, original)


def measured(model: ModelConfig, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    bench = Bench(model)
    ways = {"without": bench.without, "again": bench.without, "ours": bench.ours, "r3": bench.r3, "int64": bench.int64}
    clocks = {name: Clock() for name in ways}
    for way in ways.values():
        way()
    order, peaks = list(ways), Peaks()
    for _ in range(rounds):
        peaks.measure()
        for name in order:
            with clocks[name]:
                ways[name]()
        order.append(order.pop(0))
    attribution = Attribution()
    with attribution.attributing():
        for _ in range(rounds):
            bench.ours()
    tokens = ROW * ROWS
    parts = {name: seconds / rounds for name, seconds in attribution.seconds.items() if name != OWN}
    step_s = clocks["without"].median_s
    row = {
        "step_ms": 1e3 * step_s,
        "percent_of_a_step": {
            name: [round(100 * seconds / step_s, 2) for seconds in difference(clocks[name], clocks["without"])]
            for name in ("again", "ours", "r3", "int64")
        },
        "attributed_ms": {name: round(1e3 * seconds, 3) for name, seconds in sorted(parts.items())},
        "attributed_fraction": round(sum(parts.values()) / step_s, 4),
        "bytes_per_token": {"ours": bench.our_bytes / tokens, "int64": bench.int64_bytes / tokens},
        "bytes_per_token_of_8_completions_a_prompt": bench.bytes_of_groups(),
        "tokens": tokens,
    }
    row = {name: round(x, 2) if isinstance(x, float) and x > 1 else x for name, x in row.items()}
    return row | circumstances(contention(list(clocks.values())), peaks)


def difference(clock: Clock, base: Clock) -> tuple[float, float, float]:
    """Return the median of the differences of the same round, and the ends of its 95 % interval."""
    pairs = sorted(mine - theirs for mine, theirs in zip(clock.cpu_s, base.cpu_s, strict=True))
    rank = median_interval_rank(len(pairs))
    return median(pairs), pairs[rank], pairs[-1 - rank]


def median_interval_rank(count: int) -> int:
    """Return the index of the order statistic that, with the one as far from the end, has the median of the
    distribution between them with a probability of at least 95 %; 0 where there are too few for that.
    """
    below, rank = 0.0, 0
    for index in range(count // 2):
        below += math.comb(count, index) / 2**count
        if 2 * below > 0.05:
            break
        rank = index
    return rank


def big_shape() -> dict[str, Any]:
    """48 layers, 8 of 128: bytes a token, and CPU milliseconds a thousand tokens to store and to read."""
    device = torch.device("cpu")
    scores = torch.rand(BIG_TOKENS // 16, BIG_LAYERS, BIG_EXPERTS)
    codes = scores.topk(BIG_TOP_K).indices.to(torch.uint8).repeat(16, 1, 1)
    order = torch.randperm(BIG_TOKENS)
    blocks = RouteStorage("device", device)
    store, read = Clock(), Clock()
    for _ in range(5):
        with store:
            number = blocks.add(codes[order])
        with read:
            blocks.read(number, order, device)
        held = blocks.num_bytes
        blocks.drop(number)
    rows = {"bytes": _times(held, store, read)}
    wide, store, read = codes.long(), Clock(), Clock()
    for _ in range(5):
        with store:
            kept = wide[order].clone()
        with read:
            kept[order].clone()
    rows["int64"] = _times(kept.nbytes, store, read)
    return rows


def _times(held: int, store: Clock, read: Clock) -> dict[str, float]:
    scale = 1e3 / (BIG_TOKENS / 1000)
    return {
        "bytes_per_token": held / BIG_TOKENS,
        "store_ms_per_1000_tokens": round(store.median_s * scale, 3),
        "read_ms_per_1000_tokens": round(read.median_s * scale, 3),
    }


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of which the median is taken")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    from mcore_rl.megatron.mesh import destroy_mesh

    rows = {}
    for name, model in MODELS.items():
        rows[name] = measured(model, rounds)
        destroy_mesh()
        print(f"{name}: {json.dumps(rows[name])}\n{circumstances_line(rows[name])}", flush=True)
    shape = big_shape()
    print(f"Qwen3-30B-A3B: {json.dumps(shape)}")
    write_results(RESULTS, {"rows": rows, "qwen3_30b_a3b": shape})


if __name__ == "__main__":
    main()
