"""Decoding steps of the training modules: from tokens of many completions to logits and routes, or as CUDA graphs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor, nn

from mcore_rl.errors import EngineError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.routers import replayed_routers
from mcore_rl.model.build import unwrap
from mcore_rl.model.layers.attention import SDPAttention
from mcore_rl.model.layers.cache import LayerCache, StepTokens
from mcore_rl.model.layers.moe import MoELayer
from mcore_rl.rl.engines.native.scheduler import Copy
from mcore_rl.rl.types import BYTE_EXPERTS


class Decoder:
    """This rank's chunks with a cache per layer, of the layer's kind. The last slot is scratch space, never read.

    Attention caches keys and values `[slots + 1, S, G, D]`, latent attention the keys and values expanded from its
    latents, and a gated delta net its state.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], mesh: Mesh, num_slots: int, max_tokens: int, *, with_routes: bool
    ) -> None:
        self._models = [unwrap(chunk) for chunk in chunks]
        self._mesh, self._config = mesh, self._models[0].config
        weight = next(self._models[0].parameters())
        self._dtype, self.device = weight.dtype, weight.device
        self._attentions = [[layer.self_attention for layer in model.decoder.layers] for model in self._models]
        # Rotary embeddings of all positions below `max_tokens`, not split over context parallelism.
        is_latent = self._config.multi_latent_attention
        self._tables: list[Any] = []
        for model in self._models:
            rotary = model.decoder.layers[0].self_attention.rotary_pos_emb if is_latent else model.rotary_pos_emb
            table = rotary(max_tokens, packed_seq=True)
            self._tables.append(table if is_latent or not isinstance(table, tuple) else table[0])
        shape = (num_slots + 1, max_tokens)
        self._caches = [[self._new_cache(a, shape) for a in attentions] for attentions in self._attentions]
        found = [router for chunk in chunks for _, router in replayed_routers(chunk)]
        self._routers: list[nn.Module] = [*found] if with_routes else []
        routes = (*shape, len(self._routers), self._config.moe_router_topk)
        few = (self._config.num_moe_experts or 0) <= BYTE_EXPERTS
        self._routes = torch.zeros(routes, dtype=torch.uint8 if few else torch.int16, device=self.device)

    @property
    def token_multiple(self) -> int:
        """The number of tokens of each step must be a multiple of this number."""
        return self._mesh.tp.size if self._mesh.sequence_parallel else 1

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy the contents of slots, in order."""
        for source, targets, length in copied_runs(copies):
            for caches in self._caches:
                for cache in caches:
                    cache.copy(source, targets, length)
            self._routes[targets, :length] = self._routes[source, :length]

    def routes(self, slot: int, length: int) -> Tensor:
        """Return the experts `[length, l, K]` of a slot's positions, in descending order of gate, on the CPU."""
        return self._routes[slot, :length].to("cpu", copy=True)

    @torch.no_grad()
    def step(self, tokens: StepTokens, drawing_B: Tensor) -> Tensor | None:
        """Collective over the ranks of this replica, and of replicas that share its experts: compute a step.

        Args:
            tokens: the step's tokens.
            drawing_B: indices of the tokens to draw from.

        Returns:
            Logits `[B, v]` of the drawing tokens on the last stage; None on all other stages, or without such tokens.
        """
        recorded: list[Tensor] = []  # each router's choices `[t, K]`, in order of layers

        def record(router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            gates_TE, routed_TE = output
            chosen_TE = gates_TE.float().masked_fill(~routed_TE, -1.0)
            recorded.append(chosen_TE.topk(router.topk).indices.to(self._routes.dtype))

        hidden = None
        with ExitStack() as hooks:
            for router in self._routers:
                hooks.callback(router.register_forward_hook(record).remove)
            for index in range(len(self._models)):
                hidden = self._chunk(index, tokens)
        if recorded:
            self._routes[tokens.slots_T, tokens.positions_T] = self._whole(torch.stack(recorded, 1))
        if not self._mesh.is_last_stage or hidden is None or not len(drawing_B):
            return None
        model = self._models[-1]
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        logits: Tensor = model.output_layer.product(hidden[drawing_B, 0], weight)
        return logits

    def _chunk(self, index: int, tokens: StepTokens) -> Tensor | None:
        """Return the chunk's output for the tokens; None if it was sent to the next stage."""
        model, table, pp = self._models[index], self._tables[index], self._mesh.pp
        is_latent = self._config.multi_latent_attention
        hidden = None
        if model.pre_process:
            hidden = model.embedding(input_ids=tokens.ids_T[None], position_ids=tokens.positions_T[None])
        else:
            rows = len(tokens.ids_T) // self.token_multiple
            received = torch.empty(rows, 1, self._config.hidden_size, dtype=self._dtype, device=self.device)
            dist.recv(received, group=pp.group, group_src=(pp.rank - 1) % pp.size)
            model.decoder.set_input_tensor(received)
        caches = self._caches[index]
        for cache in caches:
            cache.step = tokens
        with _attending_over(self._attentions[index], caches, table if is_latent else None):
            hidden = model.decoder(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=None if is_latent else _rotary_rows(table, tokens.positions_T),
            )
        if model.post_process:
            return self._whole(hidden)
        dist.send(hidden.contiguous(), group=pp.group, group_dst=(pp.rank + 1) % pp.size)
        return None

    def _whole(self, rows: Tensor) -> Tensor:
        """Collective over tensor parallelism: gather the rows of all tokens, which sequence parallelism splits."""
        if not self._mesh.sequence_parallel:
            return rows
        whole: Tensor = gather_from_sequence_parallel_region(rows.contiguous(), group=self._mesh.tp.group)
        return whole

    def _new_cache(self, attention: Any, shape: tuple[int, int]) -> LayerCache:
        core = _cached_part(attention)
        if core is attention:
            net_cache: LayerCache = attention.new_cache(shape[0])
            return net_cache
        if not isinstance(core, SDPAttention):
            raise EngineError(
                f"the native engine cannot give {type(core).__name__} a cache. Set "
                'platform.layers="torch", or use another engine.'
            )
        if self._config.multi_latent_attention:
            groups = attention.num_attention_heads_per_partition
            widths = (attention.q_head_dim, self._config.v_head_dim)
        else:
            groups = attention.num_query_groups_per_partition
            widths = (self._config.kv_channels, self._config.kv_channels)
        keys, values = (torch.zeros(*shape, groups, width, dtype=self._dtype, device=self.device) for width in widths)
        return core.new_cache(keys, values)


class _RotaryAt(nn.Module):
    """Replaces a rotary embedding during a step, and returns the rows of its table at the step's positions."""

    def __init__(self, table: Any, positions_T: Tensor) -> None:
        super().__init__()
        self._rows = _rotary_rows(table, positions_T)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Return 0: Megatron asks for a length before it calls the embedding, and `forward` ignores it."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the embedding's rows at the step's positions; the arguments are ignored."""
        return self._rows


def _rotary_rows(table: Any, positions_T: Tensor) -> Any:
    """Return the rows at `positions_T` of a rotary embedding's result, which is angles, or angles and a factor."""
    if isinstance(table, tuple):
        return table[0][positions_T], *table[1:]
    return table[positions_T]


@contextmanager
def _attending_over(attentions: Sequence[Any], caches: Sequence[LayerCache], latent_table: Any) -> Iterator[None]:
    """Context in which these self-attentions attend over the caches.

    Latent attention embeds positions itself, so its rotary embedding is replaced by `latent_table` at the step's
    positions; None for other kinds of attention.
    """
    replaced = []
    for attention, cache in zip(attentions, caches, strict=True):
        _cached_part(attention).cache = cache
        if latent_table is not None:
            replaced.append(attention.rotary_pos_emb)
            attention.rotary_pos_emb = _RotaryAt(latent_table, cache.step.positions_T)
    try:
        yield
    finally:
        for attention in attentions:
            _cached_part(attention).cache = None
        for attention, rotary in zip(attentions, replaced, strict=False):
            attention.rotary_pos_emb = rotary


def _cached_part(attention: Any) -> Any:
    """Return the module of a layer's mixer that holds the cache: a gated delta net itself has no core attention."""
    return getattr(attention, "core_attention", attention)


def copied_runs(copies: Iterable[Copy]) -> Iterator[tuple[int, slice, int]]:
    """Yield (source, targets, length) of copies; those from a slot to consecutive slots are merged into one."""
    pending: tuple[int, slice, int] | None = None
    for copy in copies:
        if pending is not None and pending == (copy.source, slice(pending[1].start, copy.target), copy.length):
            pending = copy.source, slice(pending[1].start, copy.target + 1), copy.length
            continue
        if pending is not None:
            yield pending
        pending = copy.source, slice(copy.target, copy.target + 1), copy.length
    if pending is not None:
        yield pending


LEAST_KEYS = 128
"""Number of keys of the smallest bucket: smaller buckets would add graphs without making attention faster."""
TRASH_SLOT = -1
"""Slot of the padding rows of a bucket: the last slot of the cache, which no completion uses."""


class NextToken(NamedTuple):
    """The token that a completion computes in a step, in order to draw the next token."""

    token: int
    slot: int
    position: int
    seed: int


NextTokens = Sequence[NextToken] | NDArray[np.int64]
"""Tokens of a step, or the same as a table `[B, 4]`."""


class Bucket(NamedTuple):
    """Shapes of a step."""

    rows: int
    keys: int


class StaticDecode:
    """Computes steps in buckets, from buffers with fixed addresses.

    On a GPU the first step of a bucket runs eagerly, to warm up the kernels; the second step is captured as a graph,
    and later steps replay the graph.
    """

    def __init__(
        self,
        compute: Callable[[StepTokens, Tensor, Tensor], Tensor],
        num_slots: int,
        max_tokens: int,
        device: torch.device,
        *,
        captures: bool,
    ) -> None:
        """Create the buffers.

        Args:
            compute: function from a step's tokens, the indices `[B]` of the tokens to draw from, and their seeds `[B]`,
                to the drawn numbers, fields of `Drawn` `[4, B]`. It must not depend on host state that a step changes.
            num_slots: maximum number of completions in progress.
            max_tokens: maximum number of tokens of a slot.
            device: the device of the model.
            captures: whether steps are captured as graphs; otherwise they all run eagerly.
        """
        self._compute, self._num_slots, self._max_tokens = compute, num_slots, max_tokens
        self._captures = captures
        fields = len(NextToken._fields)
        self._host_4B = torch.zeros(fields, num_slots, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs_4B = torch.zeros(fields, num_slots, dtype=torch.int64, device=device)
        self._rows_B = torch.arange(num_slots, device=device)
        self._warm: set[Bucket] = set()
        self._graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    def step(self, tokens: NextTokens) -> Tensor:
        """Return the drawn numbers `[4, B]` of these tokens, in slots 0 ... B - 1, on the device.

        The result is valid until the next step, which must not begin before the result has been read.
        """
        # The previous copy to the device has finished: its step's results have been read.
        self._host_4B.zero_()
        self._host_4B[1] = TRASH_SLOT
        self._host_4B[:, : len(tokens)] = torch.from_numpy(np.asarray(tokens)).T
        self._inputs_4B.copy_(self._host_4B, non_blocking=True)
        bucket = self.bucket(tokens)
        if bucket in self._graphs:
            graph, drawn_4B = self._graphs[bucket]
            graph.replay()
        elif self._captures and bucket in self._warm:
            drawn_4B = self._captured(bucket)
        else:
            drawn_4B = self._run(bucket)
            self._warm.add(bucket)
        return drawn_4B[:, : len(tokens)]

    def bucket(self, tokens: NextTokens) -> Bucket:
        """Return the smallest bucket that fits these tokens."""
        longest = int(np.asarray(tokens)[:, 2].max()) + 1
        return Bucket(
            min(_power_of_two(len(tokens)), self._num_slots),
            min(_power_of_two(max(longest, LEAST_KEYS)), self._max_tokens),
        )

    def _run(self, bucket: Bucket) -> Tensor:
        ids_B, slots_B, positions_B, seeds_B = self._inputs_4B[:, : bucket.rows]
        tokens = StepTokens(
            ids_T=ids_B, slots_T=slots_B, positions_T=positions_B, num_decode=bucket.rows, longest=bucket.keys, spans=()
        )
        return self._compute(tokens, self._rows_B[: bucket.rows], seeds_B)

    def _captured(self, bucket: Bucket) -> Tensor:
        """Capture the bucket's graph and run it for the first time."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": threads of loggers and collectives keep running while this thread captures.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            drawn_4B = self._run(bucket)
        self._graphs[bucket] = graph, drawn_4B
        graph.replay()
        return drawn_4B


def reason_against_graphs(chunks: Sequence[nn.Module], mesh: Mesh, device: torch.device) -> str | None:
    """Return why steps of this model cannot be CUDA graphs, the same on all ranks; None if they can."""
    if device.type != "cuda":
        return "there is no GPU"
    for name, axis in (("tp", mesh.tp), ("pp", mesh.pp), ("ep", mesh.ep), ("etp", mesh.etp)):
        if axis.size > 1:
            return f"ranks exchange tokens in each step (mesh.{name}={axis.size})"
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    if any(layer.waits_for_device for layer in layers):
        return (
            "the host reads how many tokens each expert gets: only experts in bf16 on a GPU like Hopper or Blackwell, "
            "without model.moe.capacity_factor, need not"
        )
    return None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
