"""Rewards from a model with a scalar head, which scores batches of completions on the training ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.checks.run import refuse
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.extension import STEP_MODEL_PART
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.data.answer_ends import read_steps, step_ends, step_tokens
from mcore_rl.data.chat import Chat, Conversation, answered, load_chat
from mcore_rl.data.packing import LENGTH_MULTIPLE, padded, plan_minibatches
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.megatron.agree import from_every_rank, on_every_rank, on_rank_zero
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.rl.batch import ValueHead, evaluating, exchange_samples, limits_on, make_microbatch
from mcore_rl.rl.frozen_model import FrozenModel, model_to_freeze
from mcore_rl.rl.rewards.interface import Outcome, Score, TextStep
from mcore_rl.rl.rewards.score import Moments
from mcore_rl.rl.types import Completion, Group, SampleShape, TrainedSample, WaitingBytes
from mcore_rl.rl.workers import FailedScore
from mcore_rl.storage.checkpoint import find_checkpoint
from mcore_rl.storage.folders import read_run, run_of_checkpoint


class Reading(NamedTuple):
    """A prompt with a completion as a reward model reads it."""

    tokens_T: tuple[int, ...]
    positions: tuple[int, ...]
    """Token indices at which scores are read, in increasing order; the final entry is the last token."""
    ends: tuple[int, ...] = ()
    """End of each step, in characters of the completion; empty if whole completions are scored."""


Reader = Callable[[Group, Completion], Reading | None]
"""Function that returns the reading of a completion of a group; None if the completion has no step."""


class OwnText(NamedTuple):
    """A reward model's own tokenizer and chat template; the template is given as in `data.chat_template`."""

    tokenizer: TokenizerConfig
    template: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSource:
    """A reward model named in the config, before it is built."""

    part: str
    """Name of the part of the reward, `model:PATH` or `step_model:PATH`."""
    path: Path
    model: ModelConfig
    """Config of the checkpoint's model, which has a scalar head."""
    own_text: OwnText | None
    """The model's own tokenizer and template; None: it reads the policy's tokens."""

    @property
    def scores_steps(self) -> bool:
        """Whether the model scores each step rather than whole completions."""
        return self.part.startswith(STEP_MODEL_PART)


def whole_reader(group: Group, completion: Completion) -> Reading:
    """Read a completion in the policy's tokens, with its score at the last token. Of segments, the last one is read."""
    tokens_T = (*group.prompt.tokens_T, *completion.tokens_T)[_first_read(group, completion) :]
    return Reading(tokens_T, (len(tokens_T) - 1,))


def _first_read(group: Group, completion: Completion) -> int:
    """Return the index in the sample of the last segment's first token."""
    return len(group.prompt.tokens_T) + completion.segments[-1] if completion.segments else 0


def step_reader(separator: str, decode: Callable[[Sequence[int]], str]) -> Reader:
    """Return a reader that keeps the policy's tokens and reads a score at the end of each step."""

    def read(group: Group, completion: Completion) -> Reading | None:
        if not completion.num_sampled:
            return None
        # If a completion has several turns, its text is the last turn's.
        start, stop = completion.sampled_spans[-1]
        begin, tokens_T = _first_read(group, completion), completion.tokens_T[start:stop]
        first = len(group.prompt.tokens_T) + start - begin
        ends = step_ends(completion.text, separator)
        if not ends:
            return None
        tokens = step_tokens(tokens_T, completion.text, ends, decode)
        # If two steps end in the same token, only the later step is scored.
        positions = {first + token: end for token, end in zip(tokens, ends, strict=True)}
        read_T = (*group.prompt.tokens_T, *completion.tokens_T)[begin:]
        return Reading(read_T, tuple(positions), tuple(positions.values()))

    return read


def text_reader(chat: Chat, separator: str | None) -> Reader:
    """Return a reader that encodes a completion's text with the reward model's template and tokenizer; `separator` ends
    a step (None: the completion is scored as a whole).
    """

    def read(group: Group, completion: Completion) -> Reading | None:
        problem, text = group.prompt.problem, completion.text
        prompt = Conversation(messages=tuple(problem.messages) or ({"role": "user", "content": problem.prompt},))
        ends = [len(text)] if separator is None else step_ends(text, separator)
        if separator is None:
            ids_T = chat.encode(answered(prompt, text)).ids_T
            return Reading(ids_T, (len(ids_T) - 1,))
        if not ends:
            return None
        # Blank lines at the end belong to the last step.
        stepped = read_steps(chat, prompt, text, [*ends[:-1], len(text)])
        return Reading(stepped.ids_T, stepped.tokens, tuple(ends))

    return read


class RewardModel:
    """A model, sharded over the policy's mesh, that scores completions at their last token, or at each step's. It
    routes without replay. Every method is collective over the world.
    """

    def __init__(
        self,
        source: RewardModelSource,
        read: Reader,
        frozen: FrozenModel,
        mesh: Mesh,
        device: torch.device,
        *,
        packed_length: int,
        packed_multiple: int,
    ) -> None:
        """Prepare its passes, of at most `packed_length` positions, padded to a multiple of `packed_multiple`."""
        self.source, self._read, self._frozen = source, read, frozen
        self._mesh, self._device, self._head = mesh, device, ValueHead()
        self._packed_length = packed_length
        self._multiple = lcm(packed_multiple, LENGTH_MULTIPLE)
        # Asked for: Megatron decides in which order data- and context-parallel ranks alternate in `dp_cp`.
        self._dp_ranks = from_every_rank(mesh.dp.rank, mesh.dp_cp.group)

    @property
    def waiting_bytes(self) -> WaitingBytes:
        """Bytes of the model's weights on this rank between passes."""
        return self._frozen.waiting_bytes

    def outcomes(self, groups: Sequence[Group]) -> list[Outcome]:
        """Return the outcome of each of this replica's completions, in order: a score, or a failure with its reason."""
        readings = [self._reading(group, completion) for group in groups for completion in group.completions]
        read = [reading for reading in readings if isinstance(reading, Reading)]
        scores = iter(self._scores(read))
        return [
            self._outcome(reading, next(scores)) if isinstance(reading, Reading) else reading for reading in readings
        ]

    def _reading(self, group: Group, completion: Completion) -> Reading | FailedScore:
        try:
            reading = self._read(group, completion)
        except DataError as error:
            return FailedScore("raised", f"the reward model's template or tokenizer: {error}", error="DataError")
        if reading is None:
            return FailedScore("bad_steps", "the completion has no step")
        if len(reading.tokens_T) > (limit := self.source.model.max_position):
            text = f"the text has {len(reading.tokens_T)} tokens, the reward model reads {limit}"
            return FailedScore("raised", text, error="DataError")
        return reading

    def _outcome(self, reading: Reading, scores: Sequence[float]) -> Outcome:
        if not all(map(math.isfinite, scores)):
            return FailedScore("not_finite", f"the reward model gave {scores[-1] if len(scores) == 1 else scores}")
        if not reading.ends:
            return Score(scores[0])
        steps = tuple(TextStep(end, score) for end, score in zip(reading.ends, scores, strict=True))
        return Score(sum(scores), steps)

    @torch.no_grad()
    def _scores(self, readings: Sequence[Reading]) -> list[list[float]]:
        """Return the scores of each of this replica's texts at the positions of its reading."""
        mesh, device = self._mesh, self._device
        # Scores are read from the first position up to the last token. The last token must enter the layers, so a
        # token is appended that serves only as its label, and the "prompt" ends with the first position.
        own = [(reading.positions[0] + 1, len(reading.tokens_T) - reading.positions[0]) for reading in readings]
        of_ranks = from_every_rank(own, mesh.dp_cp.group)
        shapes = dict(
            enumerate(
                SampleShape(replica_rank=rank, num_prompt_tokens=begin, num_completion_tokens=count, is_trained=True)
                for rank, lengths in enumerate(of_ranks)
                for begin, count in lengths
            )
        )
        if not shapes:  # on all ranks or on none: these are the texts of all replicas
            return []
        first = sum(map(len, of_ranks[: mesh.dp_cp.rank]))
        samples = {
            first + index: TrainedSample(
                tokens_T=torch.tensor([*reading.tokens_T, reading.tokens_T[-1]]),
                rollout_logprobs_C=torch.zeros(count),
                shape=shapes[first + index],
            )
            for index, (reading, (_, count)) in enumerate(zip(readings, own, strict=True))
        }
        lengths = {index: shape.num_positions for index, shape in shapes.items()}
        longest = padded(max(lengths.values()), mesh.config.zigzag)
        limits = limits_on(mesh, padded(max(self._packed_length, longest), self._multiple), self._multiple)
        (plan,) = plan_minibatches(lengths, 1, mesh.dp.size, limits)
        wanted = [plan.samples_of(rank) for rank in self._dp_ranks]
        here = exchange_samples(samples, shapes, wanted, mesh.dp_cp, device)
        microbatches = [
            make_microbatch(here, indices, limits, mesh.cp, device) for indices in plan.microbatches[mesh.dp.rank]
        ]
        with self._frozen.installed(), evaluating(self._frozen.chunks):
            outputs = run_pass(self._frozen.chunks, microbatches, self._head, backward=False)
        # One number per position, starting at each text's first scored position, all texts concatenated.
        counts_N = torch.tensor([shapes[index].num_completion_tokens for index in range(len(shapes))])
        begins_N = counts_N.cumsum(0) - counts_N
        firsts_N = torch.tensor([shapes[index].num_prompt_tokens - 1 for index in range(len(shapes))])
        scores_C = torch.zeros(int(counts_N.sum()), dtype=torch.float64, device=device)
        if mesh.is_last_stage:
            offsets_N = (begins_N - firsts_N).to(device)
            for microbatch, output in zip(microbatches, outputs, strict=True):
                indices_N = torch.tensor(microbatch.samples, dtype=torch.int64, device=device)
                of_T = indices_N[microbatch.sequence_T[microbatch.mask_T]]
                places_T = offsets_N[of_T] + microbatch.place_T[microbatch.mask_T]
                scores_C[places_T] = output["values"][microbatch.mask_T].double()
            # Each position has its score on one rank and 0 on all other ranks.
            dist.all_reduce(scores_C, group=mesh.dp_cp.group)
        if mesh.pp.size > 1:
            dist.broadcast(scores_C, group=mesh.pp.group, group_src=mesh.pp.size - 1)
        scores_C = scores_C.cpu()
        return [
            scores_C[[int(begins_N[first + index]) + p - reading.positions[0] for p in reading.positions]].tolist()
            for index, reading in enumerate(readings)
        ]


class RewardModels:
    """The reward parts that are models. Every method is collective over the world."""

    def __init__(
        self, models: Sequence[RewardModel], mesh: Mesh, *, normalize: bool, step_value: str = "probability"
    ) -> None:
        """Create the parts; `normalize` uses the running mean and standard deviation of whole completions' scores."""
        self._models, self._mesh = models, mesh
        self._normalizes, self._step_value = normalize, step_value
        self.moments: dict[str, list[float]] = {}
        """Count, mean and sum of squared deviations of each part's training scores so far."""

    @property
    def waiting_bytes(self) -> Sequence[WaitingBytes]:
        """Bytes of each reward model on this rank between passes."""
        return [model.waiting_bytes for model in self._models]

    def outcomes(self, groups: Sequence[Group], *, are_counted: bool) -> Mapping[str, list[Outcome]]:
        """Return, by part, the outcome of each of this replica's completions in order, normalized if configured. Scores
        that `are_counted` update the running mean and deviation; those of an evaluation do not.
        """
        found = {}
        for model in self._models:
            part, outcomes = model.source.part, model.outcomes(groups)
            if model.source.scores_steps:
                if self._step_value == "probability":
                    outcomes = [_with_probabilities(outcome) for outcome in outcomes]
            elif self._normalizes:
                if are_counted:
                    self._count(part, [outcome.value for outcome in outcomes if isinstance(outcome, Score)])
                count, mean, squares = self.moments.get(part, [0.0, 0.0, 0.0])
                moments = Moments(int(count), mean, squares)
                # The scale is unknown until two scores differ.
                deviation = 1.0 if moments.are_equal(moments.size) else moments.std(ddof=1)
                outcomes = [
                    Score((outcome.value - mean) / deviation) if isinstance(outcome, Score) else outcome
                    for outcome in outcomes
                ]
            found[part] = outcomes
        return found

    def _count(self, part: str, scores: Sequence[float]) -> None:
        """Add the scores of all replicas in rank order, so that every rank computes the same sums."""
        of_ranks = from_every_rank(scores, self._mesh.dp_cp.group)
        scores_N = torch.tensor([score for of_rank in of_ranks for score in of_rank], dtype=torch.float64)
        if not len(scores_N):
            return
        before, mean, squares = self.moments.get(part, [0.0, 0.0, 0.0])
        more, new_mean = len(scores_N), scores_N.mean().item()
        count, shift = before + more, new_mean - mean
        # Chan's update: the sums of squares about both means, plus the term for the distance between the means.
        squares += (scores_N - new_mean).square().sum().item() + shift**2 * before * more / count
        self.moments[part] = [count, mean + shift * more / count, squares]


def _with_probabilities(outcome: Outcome) -> Outcome:
    """Replace each step's score, a logit, by the probability that the step is correct."""
    if isinstance(outcome, FailedScore) or outcome.steps is None:
        return outcome
    # The logistic function, written with tanh so that no score overflows.
    steps = tuple(TextStep(end, 0.5 * (1 + math.tanh(value / 2))) for end, value in outcome.steps)
    return Score(sum(step.value for step in steps), steps)


def load_reward_models(config: RlRunConfig, tokenizer: Tokenizer, mesh: Mesh, platform: Platform) -> RewardModels:
    """Collective over the world: build the reward models in rl.reward.parts. Raises ConfigError if a checkpoint is not
    a reward model or does not fit the mesh, DataError if it was trained with another tokenizer.
    """
    reward = config.rl.reward
    sources = on_rank_zero(
        lambda: [
            reward_model_source(part, config.model, config.rl, config.mesh, config.packed_length, tokenizer)
            for part in reward.model_parts
        ]
    )
    readers = on_every_rank(lambda: [reader_of(source, reward.step_separator, tokenizer) for source in sources])
    models = [
        RewardModel(
            source,
            read,
            FrozenModel(
                source.model,
                source.path,
                mesh,
                platform,
                config.platform,
                store=reward.model_store,
                verify_checksums=config.checkpoint.verify_checksums,
            ),
            mesh,
            platform.device,
            packed_length=max(config.packed_length, config.longest_sample + 1),
            packed_multiple=config.packed_multiple,
        )
        for source, read in zip(sources, readers, strict=True)
    ]
    return RewardModels(models, mesh, normalize=reward.normalize_models, step_value=reward.step_value)


def reward_model_source(
    part: str, policy: ModelConfig, rl: RlConfig, mesh: MeshConfig, packed_length: int, tokenizer: Tokenizer
) -> RewardModelSource:
    """Return the model of a part `model:PATH`, after all checks that need no weights."""
    path = find_checkpoint(Path(part.partition(":")[2]))
    field = f'rl.reward.parts="{part}"'
    model = model_to_freeze(path, policy)
    if model.head != "score":
        raise ConfigError(
            f"{field}: {path} is of a language model, which gives no score. Name a checkpoint of a reward model, as "
            "`mcore-rl rm` trains."
        )
    own_text = _own_text(part, path, model, policy, rl, tokenizer)
    refuse([f"{field}: {violation}" for violation in mesh_violations(model, mesh, packed_length, "the policy's")])
    return RewardModelSource(part=part, path=path, model=model, own_text=own_text)


def _own_text(
    part: str, path: Path, model: ModelConfig, policy: ModelConfig, rl: RlConfig, tokenizer: Tokenizer
) -> OwnText | None:
    reward, field = rl.reward, f'rl.reward.parts="{part}"'
    folder = run_of_checkpoint(path)
    trained = read_run(folder) if folder is not None and (folder / "checkpoints").is_dir() else None
    theirs = reward.model_tokenizer
    if theirs is None and trained is not None and trained.tokenizer.path is not None:
        # Nothing is known about a missing tokenizer.
        theirs = trained.tokenizer if Path(trained.tokenizer.path).exists() else None
    own = load_tokenizer(theirs) if theirs is not None else tokenizer
    if theirs is None or own.digest == tokenizer.digest:
        if model.vocab_size != policy.vocab_size:
            raise ConfigError(
                f"{field} has {model.vocab_size} tokens, the policy {policy.vocab_size}, and nothing says which "
                "tokenizer it was trained with: it would read other tokens than the policy writes. Name its tokenizer "
                "in rl.reward.model_tokenizer, and its template in rl.reward.model_chat_template."
            )
        if reward.model_chat_template is not None:
            raise ConfigError(
                f'rl.reward.model_chat_template="{reward.model_chat_template}" is not used: {field} has the policy\'s '
                "tokenizer, and reads the policy's tokens as they are. Leave it out."
            )
        return None
    if own.vocab_size > model.vocab_size:
        raise DataError(
            f"the tokenizer {theirs.path} has {own.vocab_size} tokens, {field} {model.vocab_size}. Name in "
            "rl.reward.model_tokenizer the one that the model was trained with."
        )
    if rl.environment.name is not None or rl.agent.is_on:
        source = "rl.agent" if rl.agent.is_on else "rl.environment"
        raise ConfigError(
            f"{field} has a tokenizer of its own, and conversations with {source} are not tokenised again. Name "
            "a reward model with the policy's tokenizer."
        )
    template = reward.model_chat_template or (trained.chat_template if trained is not None else None)
    if template is None:
        raise ConfigError(
            f"{field} has a tokenizer of its own, and nothing says which template it was trained with. Set "
            "rl.reward.model_chat_template."
        )
    load_chat(template, own, theirs.path)
    return OwnText(theirs, template)


def reader_of(source: RewardModelSource, separator: str, tokenizer: Tokenizer) -> Reader:
    """Return how a reward model reads completions: in the policy's tokens, or as text in its own tokens."""
    if source.own_text is not None:
        config, template = source.own_text
        chat = load_chat(template, load_tokenizer(config), config.path)
        return text_reader(chat, separator if source.scores_steps else None)
    return step_reader(separator, tokenizer.decode) if source.scores_steps else whole_reader
