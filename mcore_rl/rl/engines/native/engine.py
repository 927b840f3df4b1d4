"""The native engine generates completions with the training modules, in their process and on their mesh."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isnan
from typing import Any

import torch
import torch.distributed as dist
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
        self._in_step = self._has_experts and spread and mesh.dp_cp.size > 1
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
        """Collective over the world, or over each replica's ranks if replicas share no experts. Returns a group per
        prompt.
        """
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
                while self._any_busy(run.scheduler.is_busy, decoder.device):
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
        if not self._any_busy(longest > topk, device):
            return None
        self._compared_version = self.policy_version
        return ChosenKeys(self._chunks, drafts[0] if drafts else None, longest, topk)

    def _any_busy(self, is_busy: bool, device: torch.device) -> bool:
        """Whether this replica, or any replica that it shares experts with, has unfinished completions."""
        if not self._in_step:
            return is_busy
        flag = torch.tensor(int(is_busy), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.mesh.world.group)
        return bool(flag)


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

    def step(self) -> None:
        """Compute a step of the schedule, append the drawn tokens, and remove the finished completions."""
        step = self.scheduler.next_step()
        self._decoder.copy(step.copies)
        watched = self.chosen_keys.rows(step, self.scheduler.active) if self.chosen_keys is not None else {}
        # A graph would not show its choices.
        if self.static is not None and step.num_decode and not step.spans and not watched:
            active = self.scheduler.active
            drawn = self._read(self.static.step([NextToken(*row, active[row.slot].seed) for row in step.rows]))
        else:
            drawn_3B = self.compute(*self._tokens(step))
            drawn = self._read(drawn_3B) if step.drawing else [[], [], [], []]
        if watched and self.chosen_keys is not None:
            self.chosen_keys.add(watched, [layer.kept_choice for layer in self.choosing])
        self.scheduler.computed(step)
        self._decoder.copy(step.branches)
        finished = [slot for slot, *numbers in zip(step.drawing, *drawn, strict=True) if self._add(slot, numbers)]
        if finished:
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
        """Append a token to the slot's completion. Returns whether the completion ends with it."""
        draft = self.scheduler.active[slot]
        token, logprob, kept = numbers
        draft.tokens_T.append(int(token))
        draft.logprobs_T.append(logprob)
        draft.kept_logprobs_T.append(kept)
        if self._engine.listener is not None:
            self._engine.listener(draft.group, draft.index, draft.tokens_T)
        is_full = len(draft.tokens_T) >= self._sampling.max_new_tokens
        draft.is_stopped = draft.tokens_T[-1] in self._sampling.stop_tokens or (
            bool(self._sampling.stop_strings) and self._strings[draft].end(draft.tokens_T[-1])
        )
        is_finished = is_full or draft.is_stopped
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
        multiple = self._decoder.token_multiple
        padding = max(-end % multiple, multiple - end)
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

    def _read(self, drawn_3B: Tensor) -> list[list[float]]:
        """Copy the drawn numbers to the host, the only synchronization of a step. Raises EngineError for a NaN."""
        drawn: list[list[float]] = drawn_3B.tolist()
        if any(isnan(number) for numbers in drawn for number in numbers):
            raise EngineError(
                f"the policy of version {self._engine.policy_version} gives logits that are not finite. Go back to an "
                "earlier checkpoint, or lower optim.lr."
            )
        return drawn


NUM_POSITIONS = 64
"""Most positions of a completion that are compared."""


class ChosenKeys:
    """The choices of keys of one completion while an engine generates it, in the layers of this stage with an indexer.

    The completion is the first of a call. Its positions are spread evenly from the first that has a choice to the last
    that it can have.
    """

    def __init__(self, chunks: Sequence[nn.Module], draft: Draft | None, longest: int, topk: int) -> None:
        """Start watching a completion; None: this replica has none and only joins the collectives."""
        self._chunks = chunks
        self._draft = draft
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
