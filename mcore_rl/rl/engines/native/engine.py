"""The native engine generates completions with the training modules, in their process and on their mesh."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.rollout import InProcessConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.errors import ConfigError, EngineError
from mcore_rl.megatron import batch_invariant
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import to_device
from mcore_rl.megatron.schedule import HeadOutput, ReadsDeferredLogits, run_pass
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.build import unwrap
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.model.layers.cache import PrefillRows, StepTokens
from mcore_rl.rl.batch import evaluating, without_capacity
from mcore_rl.rl.engines.base import Capabilities, Decode, Engine, QuietEngine, Sampling, StopStrings, check_request
from mcore_rl.rl.engines.native.decoder import Decoder, NextToken, StaticDecode, reason_against_graphs
from mcore_rl.rl.engines.native.scheduler import Draft, Scheduler, Step
from mcore_rl.rl.sampling import draw, uniforms
from mcore_rl.rl.types import Completion, Group, Prompt, single_version

STEPS_TOGETHER = 16
"""Most steps between two questions of replicas that share experts whether any of them has unfinished completions."""

Listener = Callable[[int, int, Sequence[int]], None]
"""Function called for each drawn token with the prompt's index, the index in the group, and the completion so far."""


class MegatronEngine(QuietEngine):
    """Continuous batching over caches of keys and values, or of states, on any mesh.

    The tensor- and pipeline-parallel ranks of a replica get the same requests. Each replica (data- or context-parallel
    rank) gets its own requests, possibly none. Completions have the routes of this pipeline stage's layers, which
    are the layers that this rank trains.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        model: ModelConfig,
        decode: Callable[[Sequence[int]], str],
        config: InProcessConfig,
        *,
        has_fixed_shapes: bool | None = None,
    ) -> None:
        """Create the engine.

        Args:
            chunks: this rank's part of the model.
            mesh: the mesh.
            model: the model's config.
            decode: function that converts token ids to text.
            config: sizes, and whether to use CUDA graphs.
            has_fixed_shapes: whether steps without prompts use the shapes of CUDA graphs; None: only with CUDA graphs.
                A CPU can use these shapes too, to rehearse a GPU's steps.

        Raises:
            ConfigError: if `config` asks for CUDA graphs, and this model or device does not support them.
        """
        self.mesh, self.model, self.decode = mesh, model, decode
        self.policy_version = 0
        self.listener: Listener | None = None
        self._chunks, self._num_slots = list(chunks), config.native_slots
        self._step_tokens = max(config.step_tokens, self._num_slots + 1)
        self._has_experts = model.moe.num_experts > 0
        self.as_in_training = batch_invariant.is_on()
        """Whether logprobs equal the trainer's bit for bit."""
        # Replicas that share experts must step together: an idle replica computes a token that is never read.
        spread = mesh.ep.size * mesh.etp.size > 1
        self.in_step = self._has_experts and spread and mesh.dp_cp.size > 1
        against = reason_against_graphs(chunks, mesh, next(chunks[0].parameters()).device)
        if config.cuda_graphs is True and against:
            raise ConfigError(f'rl.engine.cuda_graphs=true, but {against}. Set it to "auto", or false.')
        self.why_no_graphs = "rl.engine.cuda_graphs=false" if config.cuda_graphs is False else against
        """Reason why steps are not CUDA graphs; None if they are."""
        self._has_fixed_shapes = self.why_no_graphs is None if has_fixed_shapes is None else has_fixed_shapes
        # A training pass over a completion of one rank needs all of its positions here.
        self._compares_choices = model.indexer.top_k is not None and mesh.cp.size == 1
        self._compared_version: int | None = None
        self._overlap_2 = torch.zeros(2, dtype=torch.float64)

    def describe(self) -> list[str]:
        """Return a log line with the number of slots and how steps are computed."""
        how = f"step by step: {self.why_no_graphs}" if self.why_no_graphs else "steps without prompts as CUDA graphs"
        return [f"rollout engine: native, {self._num_slots} slots, {how}"]

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of this engine."""
        return Capabilities(max_tokens=self.model.max_position, routes=self._has_experts, seeded=True)

    def update_weights(self, policy_version: int) -> None:
        """Only record the version: the modules are the policy's own, and no cache outlives a call of `generate`."""
        self.policy_version = policy_version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds_PG: Sequence[Sequence[int]]) -> list[Group]:
        """Collective over the world, or over a replica's ranks if none share experts. Returns a group per prompt."""
        check_request(prompts, sampling, seeds_PG, self.capabilities)
        drafts = [
            Draft(group=group, index=index, prompt_T=prompt.tokens_T, seed=seed)
            for group, (prompt, seeds) in enumerate(zip(prompts, seeds_PG, strict=True))
            for index, seed in enumerate(seeds)
        ]
        longest = max((len(prompt.tokens_T) for prompt in prompts), default=0) + sampling.max_new_tokens
        num_slots = max(1, min(self._num_slots, len(drafts)))
        with evaluating(self._chunks), without_capacity(self._chunks):
            decoder = Decoder(self._chunks, self.mesh, num_slots, longest, with_routes=sampling.with_routes)
            can_cut = "delta" not in self.model.mixers
            scheduler = Scheduler(drafts, num_slots, self._step_tokens, can_cut=can_cut)
            run = _Run(self, decoder, scheduler, sampling)
            watched = self._watched(drafts, longest, decoder.device)
            run.chosen_keys = watched
            if self._has_fixed_shapes:
                captures = self.why_no_graphs is None
                run.static = StaticDecode(run.compute, num_slots, longest, decoder.device, captures=captures)
            with ExitStack() as stack:
                if watched is not None:
                    run.choosing = stack.enter_context(keeping_choices(self._chunks))
                while num_steps := self._world_max(run.least_steps, decoder.device):
                    for _ in range(num_steps):
                        run.step()
            if watched is not None:
                self._overlap_2 += watched.overlap(self.mesh, decoder.token_multiple)
        made = {(draft.group, draft.index): run.completion(draft) for draft in drafts}
        return [
            Group(prompt=prompt, completions=tuple(made[group, index] for index in range(len(seeds_PG[group]))))
            for group, prompt in enumerate(prompts)
        ]

    def take_metrics(self) -> list[Metric]:
        """Collective over the world where the model has indexers: return how far training chooses the same keys."""
        if not self._compares_choices:
            return []
        device = next(self._chunks[0].parameters()).device
        overlap_2 = self._overlap_2.to(device)
        dist.all_reduce(overlap_2, group=self.mesh.world.group)
        self._overlap_2 = torch.zeros(2, dtype=torch.float64)
        same, count = overlap_2.tolist()
        return [Metric("routes/index_overlap", same, count)] if count else []

    def _watched(self, drafts: Sequence[Draft], longest: int, device: torch.device) -> "ChosenKeys | None":
        """Collective over the world where replicas share experts: return the watch over the first completion; None
        where none is long enough, and after the first call since the weights were updated.
        """
        topk = self.model.indexer.top_k
        if topk is None or not self._compares_choices or self._compared_version == self.policy_version:
            return None
        if not self._world_max(int(longest > topk), device):
            return None
        self._compared_version = self.policy_version
        return ChosenKeys(self._chunks, drafts[0] if drafts else None, longest, topk)

    def _world_max(self, number: int, device: torch.device) -> int:
        """Return the largest number of the replicas that this one shares experts with; its own if there are none."""
        if not self.in_step:
            return number
        largest = torch.tensor(number, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.mesh.world.group)
        return int(largest)


def native_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> Engine:
    """Return the engine that generates with the training modules `chunks`."""
    assert isinstance(config.rl.engine, InProcessConfig)
    return MegatronEngine(chunks, mesh, config.model, decode, config.rl.engine)


class _Run:
    """State of a call of `generate`."""

    def __init__(self, engine: MegatronEngine, decoder: Decoder, scheduler: Scheduler, sampling: Sampling) -> None:
        self._engine, self._decoder, self.scheduler, self._sampling = engine, decoder, scheduler, sampling
        self._strings = defaultdict[Draft, StopStrings](lambda: StopStrings(sampling.stop_strings, engine.decode))
        self.routes: dict[Draft, Tensor] = {}
        self.static: StaticDecode | None = None
        """Computes steps without prompts in fixed shapes; None: all steps are computed in the same way."""
        self.chosen_keys: ChosenKeys | None = None
        """Watch over the choices of keys of a completion."""
        self.choosing: list[Any] = []
        """The layers that make these choices."""
        self._steady: _SteadySteps | None = None
        self._stop_tokens_S1 = np.array([*sampling.stop_tokens], dtype=np.int64)[:, None]

    @property
    def least_steps(self) -> int:
        """Number of steps after which this replica may have finished: 0 if it has, and at most STEPS_TOGETHER."""
        scheduler = self.scheduler
        if not scheduler.is_busy or not self._engine.in_step:
            return int(scheduler.is_busy)  # alone, it asks nobody
        if scheduler.is_waiting:
            return STEPS_TOGETHER
        num_done = min(len(draft.tokens_T) for draft in scheduler.active) + (
            self._steady.num_steps if self._steady else 0
        )
        return min(STEPS_TOGETHER, self._sampling.max_new_tokens - num_done)

    def step(self) -> None:
        """Compute a step of the schedule, append the drawn tokens, and remove the finished completions."""
        if self._steady is not None:
            self._repeat(self._steady)
            return
        step = self.scheduler.next_step()
        self._decoder.copy(step.copies)
        watched = self.chosen_keys.rows(step, self.scheduler.active) if self.chosen_keys is not None else {}
        # A graph would not show its choices.
        if self.static is not None and step.num_decode and not step.spans and not watched:
            active = self.scheduler.active
            drawn_3B = self._read(self.static.step([NextToken(*row, active[row.slot].seed) for row in step.rows]))
        else:
            computed_3B = self.compute(*self._tokens(step))
            drawn_3B = self._read(computed_3B) if step.drawing else np.zeros((3, 0))
        if watched and self.chosen_keys is not None:
            self.chosen_keys.add(watched, [layer.kept_choice for layer in self.choosing])
        self.scheduler.computed(step)
        self._decoder.copy(step.branches)
        drawn = drawn_3B.tolist()
        finished = [slot for slot, *numbers in zip(step.drawing, *drawn, strict=True) if self._add(slot, numbers)]
        is_looked_at = self._engine.listener is not None or self.chosen_keys is not None
        if finished:
            self._decoder.copy(self.scheduler.remove(finished))
        elif step.num_decode and not step.spans and not step.copies and not is_looked_at:
            # Nothing was added and nothing ended: the next steps are the same, one position on, until something ends.
            active = self.scheduler.active
            rows = [NextToken(draft.tokens_T[-1], slot, draft.cached, draft.seed) for slot, draft in enumerate(active)]
            num_left = self._sampling.max_new_tokens - max(len(draft.tokens_T) for draft in active)
            self._steady = _SteadySteps(rows, len(rows) + self._padding(len(rows)), num_left)

    def _repeat(self, steady: "_SteadySteps") -> None:
        """Compute a step in which each slot draws its next token; when any ends, give all of them their tokens."""
        if self.static is not None:
            drawn_3B = self._read(self.static.step(steady.next_B4()))
        else:
            numbers = to_device(torch.from_numpy(steady.numbers), self._decoder.device)
            ids_T, slots_T, positions_T, drawing_B, seeds_B = numbers.split(steady.sizes)
            longest, count = steady.longest + 1, len(drawing_B)
            tokens = StepTokens(
                ids_T=ids_T, slots_T=slots_T, positions_T=positions_T, num_decode=count, longest=longest, spans=()
            )
            drawn_3B = self._read(self.compute(tokens, drawing_B, seeds_B))
        tokens_B = drawn_3B[0].astype(np.int64)
        is_stopped_B = (tokens_B == self._stop_tokens_S1).any(0)
        if self._sampling.stop_strings:
            for slot, draft in enumerate(self.scheduler.active):
                is_stopped_B[slot] |= self._strings[draft].end(int(tokens_B[slot]))
        steady.add(tokens_B, drawn_3B)
        if steady.num_steps < steady.num_left and not is_stopped_B.any():
            return
        self._steady, finished = None, []
        of_slots = zip(*(block_nB.T.tolist() for block_nB in steady.blocks()), strict=True)
        for slot, (draft, (tokens, logprobs, kept)) in enumerate(zip(self.scheduler.active, of_slots, strict=True)):
            draft.tokens_T += tokens
            draft.logprobs_T += logprobs
            draft.kept_logprobs_T += kept
            draft.cached += steady.num_steps
            draft.is_stopped = bool(is_stopped_B[slot])
            if self._ends(draft, slot):
                finished.append(slot)
        self._decoder.copy(self.scheduler.remove(finished))

    def completion(self, draft: Draft) -> Completion:
        """Return the completion of a finished draft."""
        stopped = draft.tokens_T[-1] in self._sampling.stop_tokens
        return Completion(
            text=self._engine.decode(draft.tokens_T[:-1] if stopped else draft.tokens_T),
            tokens_T=tuple(draft.tokens_T),
            logprobs_T=tuple(draft.logprobs_T),
            kept_logprobs_T=tuple(draft.kept_logprobs_T),
            versions=single_version(self._engine.policy_version, len(draft.tokens_T)),
            finish="stop" if draft.is_stopped else "length",
            experts_TLK=self.routes.get(draft),
        )

    def _add(self, slot: int, numbers: Sequence[Any]) -> bool:
        draft = self.scheduler.active[slot]
        token, logprob, kept = numbers
        draft.tokens_T.append(int(token))
        draft.logprobs_T.append(logprob)
        draft.kept_logprobs_T.append(kept)
        if self._engine.listener is not None:
            self._engine.listener(draft.group, draft.index, draft.tokens_T)
        draft.is_stopped = draft.tokens_T[-1] in self._sampling.stop_tokens or (
            bool(self._sampling.stop_strings) and self._strings[draft].end(draft.tokens_T[-1])
        )
        return self._ends(draft, slot)

    def _ends(self, draft: Draft, slot: int) -> bool:
        """Whether the completion ends with its newest token; its routes are then read."""
        is_finished = draft.is_stopped or len(draft.tokens_T) >= self._sampling.max_new_tokens
        if is_finished and self._sampling.with_routes:
            self.routes[draft] = self._decoder.routes(slot, draft.cached)
        return is_finished

    def _tokens(self, step: Step) -> tuple[StepTokens, Tensor, Tensor]:
        """Return, on the device, the step's tokens, the indices of the tokens to draw from, and the draws' seeds."""
        active = self.scheduler.active
        spans, drawing, end = [], list(range(step.num_decode)), step.num_decode
        for span in step.spans:
            begin, end = end, end + span.stop - span.start
            spans.append(PrefillRows(begin, end, span.slot, span.stop))
            if span.stop == len(active[span.slot].prompt_T):
                drawing += [end - 1] * len(span.drawing)
        padding = self._padding(end)
        seeds = [active[slot].seed for slot in step.drawing]
        # A single copy to the device. Each part is contiguous, because compiled layers read the positions.
        fields = *zip(*step.rows, *[(0, -1, 0)] * padding, strict=True), drawing, seeds
        numbers = torch.tensor([number for part in fields for number in part], dtype=torch.int64)
        sizes = [len(part) for part in fields]
        ids_T, slots_T, positions_T, drawing_B, seeds_B = to_device(numbers, self._decoder.device).split(sizes)
        tokens = StepTokens(
            ids_T=ids_T,
            slots_T=slots_T,
            positions_T=positions_T,
            num_decode=step.num_decode,
            longest=max((row.position + 1 for row in step.rows[: step.num_decode]), default=0),
            spans=tuple(spans),
        )
        return tokens, drawing_B, seeds_B

    def _padding(self, num_tokens: int) -> int:
        multiple = self._decoder.token_multiple
        return max(-num_tokens % multiple, multiple - num_tokens)

    def compute(self, tokens: StepTokens, drawing_B: Tensor, seeds_B: Tensor) -> Tensor:
        """Collective over the ranks of this replica, and of replicas that share its experts: compute a step and draw.

        Nothing in it waits for the device, so that a CUDA graph can capture it.

        Args:
            tokens: the step's tokens.
            drawing_B: indices of the tokens to draw from.
            seeds_B: seeds of the draws.

        Returns:
            The fields of `Drawn`, float64 `[3, B]`.
        """
        engine = self._engine
        logits_Bv = self._decoder.step(tokens, drawing_B)
        drawn_3B = torch.zeros(3, len(drawing_B), dtype=torch.float64, device=self._decoder.device)
        if not len(drawing_B):
            return drawn_3B
        if logits_Bv is not None:
            numbers_B = uniforms(seeds_B, tokens.positions_T[drawing_B])
            cut, tp = self._sampling.cut, engine.mesh.tp
            vocab_size = self._sampling.vocab_size or engine.model.vocab_size
            drawn = draw(logits_Bv, numbers_B, cut, tp, vocab_size=vocab_size, as_in_training=engine.as_in_training)
            drawn_3B = torch.stack([values_B.double() for values_B in drawn])
        if engine.mesh.pp.size > 1:
            dist.broadcast(drawn_3B, group=engine.mesh.pp.group, group_src=engine.mesh.pp.size - 1)
        return drawn_3B

    def _read(self, drawn_3B: Tensor) -> NDArray[np.float64]:
        """Copy the drawn numbers to the host, the only synchronization of a step. Raises EngineError for a NaN."""
        drawn: NDArray[np.float64] = drawn_3B.cpu().numpy()
        if np.isnan(drawn).any():
            raise EngineError(
                f"the policy of version {self._engine.policy_version} gives logits that are not finite. Go back to an "
                "earlier checkpoint, or lower optim.lr."
            )
        return drawn


class _SteadySteps:
    """Steps since a slot was last given or taken, in which each slot draws its next token."""

    def __init__(self, rows: Sequence[NextToken], width: int, num_left: int) -> None:
        """Take the next step's tokens, their number with padding, and the steps after which a completion is full."""
        self.num_left = num_left
        self.drawn: list[NDArray[np.float64]] = []
        self.sizes = [width] * 3 + [len(rows)] * 2
        self.numbers = np.zeros(sum(self.sizes), dtype=np.int64)
        """Fields of the next step's tokens with padding, the indices of those to draw from, and their seeds."""
        fields_3T, self._table_B4 = self.numbers[: 3 * width].reshape(3, width), np.array(rows, dtype=np.int64)
        fields_3T[1, len(rows) :] = -1
        fields_3T[:, : len(rows)] = self._table_B4.T[:3]
        self.numbers[3 * width :] = [*range(len(rows)), *self._table_B4[:, 3]]
        self._ids_B, _, self._positions_B = fields_3T[:, : len(rows)]
        self.longest = int(self._positions_B.max())

    @property
    def num_steps(self) -> int:
        return len(self.drawn)

    def next_B4(self) -> NDArray[np.int64]:
        """Return the next step's tokens, with the columns of `NextToken`."""
        self._table_B4[:, 0], self._table_B4[:, 2] = self._ids_B, self._positions_B
        return self._table_B4

    def add(self, tokens_B: NDArray[np.int64], drawn_3B: NDArray[np.float64]) -> None:
        """Keep a step's numbers `[3, B]`, which the next step may overwrite, and go one position on."""
        self.drawn.append(drawn_3B.copy())
        self._ids_B[:] = tokens_B
        self._positions_B += 1
        self.longest += 1

    def blocks(self) -> tuple[NDArray[Any], ...]:
        """Return the tokens, their logprobs and the log of their kept mass, `[num_steps, B]` each."""
        tokens_nB, logprobs_nB, kept_nB = np.stack(self.drawn, axis=1)
        return tokens_nB.astype(np.int64), logprobs_nB, kept_nB


NUM_POSITIONS = 64
"""Most positions of a completion that are compared."""


class ChosenKeys:
    """The choices of keys of one completion while an engine generates it, in the layers of this stage with an indexer.

    The completion is the first of a call. Its positions are spread evenly from the first that has a choice to the last
    that it can have.
    """

    def __init__(self, chunks: Sequence[nn.Module], draft: Draft | None, longest: int, topk: int) -> None:
        """Start watching a completion; None: this replica has none and only joins the collectives."""
        self._chunks, self._draft = chunks, draft
        stride = max(1, -(-(longest - topk) // NUM_POSITIONS))
        self._positions = frozenset(range(topk, longest, stride))
        self._chosen: dict[int, list[Tensor]] = {}

    def rows(self, step: Step, active: Sequence[Draft]) -> dict[int, int]:
        """Return the index among the step's tokens of each watched position."""
        return {
            row.position: index
            for index, row in enumerate(step.rows)
            if row.position in self._positions and active[row.slot] is self._draft
        }

    def add(self, rows: dict[int, int], kept: Sequence[Tensor | None]) -> None:
        """Add the choices of a step, `[T, 1, topk]` of each layer, at the rows of watched positions."""
        for position, index in rows.items():
            chosen = [choice[index, 0].cpu() for choice in kept if choice is not None]
            assert len(chosen) == len(kept), "a token that sees more than topk keys has a choice in each layer"
            self._chosen[position] = chosen

    def overlap(self, mesh: Mesh, multiple: int) -> Tensor:
        """Collective over this model's ranks, and its experts': compare with a training pass over the completion.

        Args:
            mesh: The mesh, without context parallelism.
            multiple: Number that divides the length of a training pass.

        Returns:
            Sum of the shares of chosen keys that both have, and their number, float64 `[2]`: one for each position and
            layer of this stage.
        """
        draft = self._draft
        tokens = [0] if draft is None else [*draft.prompt_T, *draft.tokens_T][:-1]
        known = sorted(position for position in self._chosen if position < len(tokens))
        microbatch = _microbatch(tokens, multiple, mesh, next(self._chunks[0].parameters()).device)
        with keeping_choices(self._chunks) as attentions:
            run_pass(self._chunks, [microbatch], _NoHead(), backward=False)
            trained = [attention.kept_choice for attention in attentions]
        shares = torch.zeros(2, dtype=torch.float64)
        for layer, choice in enumerate(trained if known else ()):
            assert choice is not None, "a training pass chooses where the engine did"
            theirs_PK = torch.stack([self._chosen[position][layer] for position in known]).long()
            masks = [
                torch.zeros(len(known), len(tokens), dtype=torch.bool).scatter(1, of_side_PK, True)
                for of_side_PK in (theirs_PK, choice[known, 0].cpu().long())
            ]
            shares[0] += (masks[0] & masks[1]).sum() / theirs_PK.shape[1]
            shares[1] += len(known)
        return shares


@contextmanager
def keeping_choices(chunks: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Inside, the layers with an indexer keep the choice of their last forward pass in `kept_choice`."""
    attentions = [
        layer.self_attention
        for chunk in chunks
        for layer in unwrap(chunk).decoder.layers
        if layer.self_attention.core_attention.indexer is not None
    ]
    for attention in attentions:
        attention.keeps_choice = True
    try:
        yield attentions
    finally:
        for attention in attentions:
            attention.keeps_choice, attention.kept_choice = False, None


class _NoHead(ReadsDeferredLogits):
    """Takes nothing from a pass."""

    wants_losses = False

    def count(self, microbatch: LocalMicrobatch) -> Tensor:
        return microbatch.tokens_Bs.new_zeros(())

    def __call__(self, microbatch: LocalMicrobatch, output: object) -> HeadOutput:
        zero = microbatch.loss_mask_Bs.new_zeros(())
        return HeadOutput(loss=zero, count=self.count(microbatch), outputs={})


def _microbatch(tokens: Sequence[int], multiple: int, mesh: Mesh, device: torch.device) -> LocalMicrobatch:
    """Return a packed row of one sequence, filled up to a multiple as rows of training are."""
    lengths = len(tokens), -len(tokens) % multiple
    row_BS = torch.tensor([[*tokens, *[0] * lengths[1]]])
    at_BS = torch.cat([torch.arange(length) for length in lengths])[None]
    bounds = [0, lengths[0], *([sum(lengths)] if lengths[1] else [])]
    whole = Microbatch(
        tokens_BS=row_BS,
        labels_BS=row_BS,
        loss_mask_BS=torch.zeros(row_BS.shape),
        position_ids_BS=at_BS,
        packed=PackedSpans(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_length=max(lengths)),
    )
    return localize(whole, mesh.cp, device)
