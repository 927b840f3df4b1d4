"""The router-shift ratio of RSPO (arXiv 2510.23027): how far routers moved between the old policy and the policy.

For a token routed to K experts in each of L layers by the old policy, it is

    gamma = exp(-1/L sum_l 1/K sum_k |log r_l(e_k) - log r_old,l(e_k)|),

where r are a router's scores before any bias or normalisation over the chosen experts: the softmax over all experts, or
their sigmoids. The pass for old logprobs records log r_old, and the update's forward pass compares its scores with it.
The comparison is the same whether or not routes are imposed in these passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.routers import routed_layers
from mcore_rl.megatron.schedule import Routing
from mcore_rl.replay.cache import MicrobatchLayout, RouteStorage
from mcore_rl.replay.witness import OnCall, RouterWatch

EXPERT_BYTES, SCORE_BYTES = 2, 4
"""Bytes of a recorded expert id (int16) and of its score (float32)."""
UNUSED = -1
"""Expert id that marks a choice dropped for lack of capacity, which is not compared."""

Samples = tuple[int, ...]
"""Samples of a microbatch, as its key: each sample of a rollout batch is in only one microbatch of a rank."""


def log_scores(router: TopKRouter, logits_tE: Tensor) -> Tensor:
    """Return the logarithm of a router's scores for all experts, float32 `[t, E]`, without gradient."""
    logits_tE = logits_tE.detach().float()
    if router.score_function == "softmax":
        return logits_tE.log_softmax(1)
    assert router.score_function == "sigmoid", router.score_function
    return nn.functional.logsigmoid(logits_tE)


def layer_shift(old_tK: Tensor, experts_tK: Tensor, scores_tE: Tensor) -> Tensor:
    """Return 1/K sum_k |log r(e_k) - log r_old(e_k)| for each token in one layer, `[t]`, from log scores for the old
    router's experts (UNUSED entries do not count), and the current router's for all experts.
    """
    is_used_tK = experts_tK != UNUSED
    moved_tK = (scores_tE.gather(1, experts_tK.long().clamp_min(0)) - old_tK).abs() * is_used_tK
    return moved_tK.sum(1) / is_used_tK.sum(1).clamp_min(1)


class RouterShift:
    """Records the old policy's router scores on a rollout batch, and computes the routers' shift in its updates. Scores
    stay on the rank that recorded them; each stage sends its sums over layers to the last stage, which computes the
    loss.
    """

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig, config: ReplayConfig) -> None:
        """Prepare an empty record. Scores are stored where routes are (`replay.store`)."""
        self._chunks, self._mesh = list(chunks), mesh
        self._layers = {chunk: routed_layers([chunk]) for chunk in chunks}
        self._num_layers, self._top_k = sum(model.moe_layers), model.moe.top_k
        self._device = next(chunks[0].parameters()).device
        self._storage = RouteStorage(config.store, self._device)
        self._blocks: dict[tuple[Samples, int], int] = {}
        """Storage block by microbatch and chunk index."""
        self._calls: dict[int, tuple[Tensor, Tensor]] = {}
        """Experts and old scores `[t, K]` of the running chunk, by layer."""
        self._running: int | None = None
        """Index of the microbatch in its forward pass; None during recomputation."""
        self._sums: dict[int, Tensor] = {}
        """Shift summed over this stage's layers, `[t]`, by microbatch, until the update ends or the sum is sent."""
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._num_taken = 0

    def forget(self) -> None:
        """Drop the scores of the rollout batch and free their memory."""
        for block in self._blocks.values():
            self._storage.drop(block)
        self._blocks.clear()

    @contextmanager
    def recording(self, layouts: Sequence[MicrobatchLayout], routing: Routing) -> Iterator[Routing]:
        """Context for a pass that records the scores of the experts its routers use. Yields its routing."""

        def on_call(layer: int, router: TopKRouter, logits: Tensor, gates: Tensor, used_tE: Tensor) -> None:
            if self._running is not None:
                used_tK = used_tE.byte().topk(self._top_k, 1)
                scores_tE = log_scores(router, logits.view(used_tE.shape))
                experts_tK = used_tK.indices.where(used_tK.values > 0, UNUSED)
                self._calls[layer] = (experts_tK, scores_tE.gather(1, used_tK.indices))

        @contextmanager
        def recorded(chunk: nn.Module, index: int) -> Iterator[None]:
            with self._forward(index), routing(chunk, index):
                yield
            calls = [self._calls.pop(layer) for layer in self._layers[chunk]]
            samples = _samples(layouts[index])
            if calls and samples:
                key = (samples, self._chunks.index(chunk))
                assert key not in self._blocks, f"the scores of samples {samples} are recorded already"
                # As bytes: the experts of all layers of the chunk, then their scores.
                experts, scores = zip(*calls, strict=True)
                parts = [torch.cat(experts, 1).to(torch.int16), torch.cat(scores, 1)]
                bytes_tw = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
                self._blocks[key] = self._storage.add(bytes_tw)

        with self._watching(on_call):
            yield recorded

    @contextmanager
    def comparing(self, layouts: Sequence[MicrobatchLayout], routing: Routing) -> Iterator[Routing]:
        """Context for an update that compares its routers' scores with the recorded scores. Yields its routing. The
        update's head calls `take` for each microbatch, in order.
        """
        mesh, self._num_taken = self._mesh, 0

        def on_call(layer: int, router: TopKRouter, logits: Tensor, gates: Tensor, used_tE: Tensor) -> None:
            if self._running is not None and layer in self._calls:
                experts_tK, old_tK = self._calls.pop(layer)
                scores_tE = log_scores(router, logits.view(used_tE.shape))
                self._sums[self._running] += layer_shift(old_tK, experts_tK, scores_tE)

        @contextmanager
        def compared(chunk: nn.Module, index: int) -> Iterator[None]:
            if index not in self._sums:
                self._sums[index] = torch.zeros(self._num_tokens(layouts[index]), device=self._device)
            self._calls = self._recorded(chunk, layouts[index])
            with self._forward(index), routing(chunk, index):
                yield
            assert not self._calls, f"no router of layers {sorted(self._calls)} was asked"
            if chunk is self._chunks[-1] and not mesh.is_last_stage:
                # The last stage finishes this microbatch later than this stage, so the message never delays it.
                shift_t = self._sums.pop(index)
                last = dist.get_global_rank(mesh.pp.group, mesh.pp.size - 1)
                self._sent.append((dist.isend(shift_t, last, tag=index), shift_t))

        with self._watching(on_call):
            yield compared
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()
        self._sums.clear()

    def take(self) -> Tensor:
        """Collective over the tensor-parallel ranks of the last stage: return gamma of the next microbatch, float32
        `[T]`, at this context-parallel rank's positions; 1 at padding.
        """
        mesh, index, self._num_taken = self._mesh, self._num_taken, self._num_taken + 1
        # Not popped: a schedule may call the head inside the last chunk's routing, which still uses the sum.
        sum_t = self._sums[index]
        for stage in range(mesh.pp.size - 1):
            part_t = torch.empty_like(sum_t)
            # Through the world's group, so that the pipeline's own messages between two ranks do not interfere.
            dist.recv(part_t, dist.get_global_rank(mesh.pp.group, stage), tag=index)
            sum_t = sum_t + part_t
        if mesh.sequence_parallel:
            # Each rank's routers see a contiguous part of the positions.
            sum_T = sum_t.new_empty(len(sum_t) * mesh.tp.size)
            dist.all_gather_into_tensor(sum_T, sum_t, group=mesh.tp.group)
        else:
            sum_T = sum_t
        return (-sum_T / self._num_layers).exp()

    @contextmanager
    def _forward(self, index: int) -> Iterator[None]:
        self._running = index
        try:
            yield
        finally:
            self._running = None

    @contextmanager
    def _watching(self, on_call: OnCall) -> Iterator[None]:
        watch = RouterWatch(lambda chunk: on_call)
        watch.install(self._chunks)
        try:
            yield
        finally:
            watch.remove()
            self._calls.clear()

    def _num_tokens(self, layout: MicrobatchLayout) -> int:
        parts = self._mesh.tp.size if self._mesh.sequence_parallel else 1
        return layout.row_length * len(layout.rows) // self._mesh.cp.size // parts

    def _recorded(self, chunk: nn.Module, layout: MicrobatchLayout) -> dict[int, tuple[Tensor, Tensor]]:
        """Return a microbatch's recorded experts and scores by layer of a chunk; empty without samples or routers."""
        samples, layers = _samples(layout), self._layers[chunk]
        if not samples or not layers:
            return {}
        block = self._blocks[samples, self._chunks.index(chunk)]
        bytes_tw = self._storage.read(block, torch.arange(self._num_tokens(layout)), self._device)
        experts_tl, scores_tl = bytes_tw.split(
            [len(layers) * self._top_k * size for size in (EXPERT_BYTES, SCORE_BYTES)], 1
        )
        shape = (len(bytes_tw), len(layers), self._top_k)
        experts_tlK = experts_tl.contiguous().view(torch.int16).view(shape)
        scores_tlK = scores_tl.contiguous().view(torch.float32).view(shape)
        pairs = zip(experts_tlK.unbind(1), scores_tlK.unbind(1), strict=True)
        return dict(zip(layers, pairs, strict=True))


def _samples(layout: MicrobatchLayout) -> Samples:
    return tuple(layout.num_tokens)
