"""Prompts and rollouts for an RL config, shared by training and evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.checks.run import refuse
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.data.answer_ends import describe_ends, end_tokens
from mcore_rl.data.chat import RAW_JOINS, Chat, load_chat, raw_joins
from mcore_rl.data.records import WARNING
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.megatron.agree import on_every_rank, on_rank_zero
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform
from mcore_rl.programs.inputs import load_matching_tokenizer
from mcore_rl.rl.engines.base import asking, make_engine, sampling_of
from mcore_rl.rl.environments.conversations import Conversations
from mcore_rl.rl.environments.interface import EnvironmentWorkers, environment_maker
from mcore_rl.rl.frozen_model import FrozenModel, model_to_freeze
from mcore_rl.rl.rewards.from_model import (
    OwnText,
    Reader,
    RewardModel,
    RewardModels,
    RewardModelSource,
    step_reader,
    text_reader,
    whole_reader,
)
from mcore_rl.rl.rewards.score import ANSWER_PARTS, FailureReport, Reward
from mcore_rl.rl.rollouts.evaluation import greedy_baseline
from mcore_rl.rl.rollouts.flow import GroupFlow
from mcore_rl.rl.rollouts.prompts import FilePrompts, PromptEncoder, PromptSource, held_out_prompts, train_prompts
from mcore_rl.rl.rollouts.rollout import Rollouts, runs_rewards
from mcore_rl.rl.types import Prompt
from mcore_rl.storage.checkpoint import find_checkpoint
from mcore_rl.storage.folders import read_run, run_of_checkpoint
from mcore_rl.train.state import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Encoded prompts, and the tokenizer that encoded them."""

    tokenizer: Tokenizer
    chat: Chat
    """The chat template that rendered them."""
    ends: Mapping[int, str]
    """Tokens that end a completion, each with the place that defines it."""
    train: PromptSource
    held_out: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()
    """Sentences on the shape of each file, and on turns that the template joins."""

    def describe(self) -> list[str]:
        """Return log lines about the prompts and the ends of completions."""
        number = f"{self.train.num_prompts} prompts" if self.train.num_prompts else "prompts without end"
        skipped = f"; left out: {self.train.skipped}" if self.train.skipped else ""
        return [
            f"{number} to learn from, {len(self.held_out)} held out{skipped}",
            describe_ends(self.ends, self.tokenizer),
            *self.notes,
        ]


def load_prompts(config: RlRunConfig) -> Prompts:
    """Encode the prompts in `config`. Raises DataError if there are none or the tokenizer does not match."""
    tokenizer = load_matching_tokenizer(config.data.tokenizer, config.model, config.checkpoint.load)
    chat = load_chat(config.data.chat_template, tokenizer, config.data.tokenizer.path)
    ends = end_tokens(tokenizer, chat, config.data.tokenizer.path)
    ends |= {token: "rl.rollout.stop_tokens" for token in config.rl.rollout.stop_tokens if token not in ends}
    if beyond := [token for token in ends if token >= tokenizer.vocab_size]:
        raise DataError(
            f"rl.rollout.stop_tokens names {beyond}, and the tokenizer has the ids 0 to {tokenizer.vocab_size - 1}. "
            "Name some of these."
        )
    encode = PromptEncoder(chat, config.rl.prompts.max_tokens)
    seed = config.train.seed
    needs_answer = any(part in ANSWER_PARTS for part in config.rl.reward.parts)
    held_out = held_out_prompts(config.rl.eval, config.rl.prompts, encode, seed, needs_answer=needs_answer)
    train = train_prompts(config.rl.prompts, held_out, encode, seed, needs_answer=needs_answer)
    notes: list[str] = []
    if isinstance(train, FilePrompts):
        notes += train.notes
        texts = (*held_out, *train.prompts)
        if config.data.chat_template == "raw" and any(raw_joins(prompt.problem.messages) for prompt in texts):
            notes.append(f"{WARNING}{RAW_JOINS}")
    return Prompts(tokenizer=tokenizer, chat=chat, ends=ends, train=train, held_out=held_out, notes=tuple(notes))


def load_reward_models(
    config: RlRunConfig, tokenizer: Tokenizer, mesh: Mesh, platform: Platform
) -> RewardModels | None:
    """Collective over the world: build the reward models in rl.reward.parts; None without reward models.

    Raises:
        ConfigError: if a checkpoint is not a reward model, or its model cannot be sharded over the mesh.
        DataError: if it was trained with another tokenizer.
    """
    reward = config.rl.reward
    if not reward.model_parts:
        return None
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
    """Return a reward model's tokenizer and template from `rl.reward.model_tokenizer` or from the run that trained it;
    None if they are the policy's and it reads the policy's tokens.
    """
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
    if rl.environment.name is not None:
        raise ConfigError(
            f"{field} has a tokenizer of its own, and conversations with rl.environment are not tokenised again. Name "
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
    """Return how a reward model reads completions: in the policy's tokens, or as text in its own tokens.

    Args:
        source: the reward model.
        separator: text that ends a step, if the model scores steps.
        tokenizer: the policy's tokenizer.
    """
    if source.own_text is not None:
        config, template = source.own_text
        chat = load_chat(template, load_tokenizer(config), config.path)
        return text_reader(chat, separator if source.scores_steps else None)
    return step_reader(separator, tokenizer.decode) if source.scores_steps else whole_reader


def make_flow(rollouts: Rollouts, progress: Progress, steps: int) -> GroupFlow:
    """Return the flow of groups for the rollout batches until step `steps`.

    Raises:
        ConfigError: if the engine does not support it.
    """
    engine, rollout, updates = asking(rollouts.engine), rollouts.rl.rollout, rollouts.updates_per_rollout
    request = engine.request_group if rollouts.conversations is None else rollouts.conversations.hold_group
    return GroupFlow(
        lambda index, prompt: request(index, prompt, rollouts.sampling, rollouts.seeds(index)),
        rollouts.prompts,
        rollouts.mesh,
        asks=engine.asks,
        prompts_per_step=rollout.prompts_per_step,
        max_staleness=rollout.max_staleness,
        rollouts=range(progress.step // updates, steps // updates),
        cursor=progress.consumed_prompts,
    )


@contextmanager
def open_rollouts(
    config: RlRunConfig,
    prompts: Prompts,
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    platform: Platform,
    failures: FailureReport,
) -> Iterator[Rollouts]:
    """Collective over the world: create the engine on `chunks`, the reward models, and the worker processes for rewards
    and environment, which end on exit. Failed scores are added to `failures` on rank 0.
    """
    rl, tokenizer = config.rl, prompts.tokenizer
    with ExitStack() as stack:
        reward = None
        if runs_rewards(mesh):
            reward = stack.enter_context(Reward(rl.reward, max_new_tokens=rl.max_completion_tokens))
        engine, conversations = make_engine(config, chunks, mesh, tokenizer.decode), None
        stack.callback(engine.close)
        if rl.environment.name is not None:
            make, workers = on_every_rank(lambda: environment_maker(rl.environment)), None
            if runs_rewards(mesh):
                workers = stack.enter_context(EnvironmentWorkers(make, rl.environment))
            conversations = Conversations(rl, engine, prompts.chat, mesh, workers)
        yield Rollouts(
            engine=engine,
            reward=reward,
            failures=failures,
            prompts=prompts.train,
            sampling=sampling_of(
                rl.rollout,
                prompts.ends,
                vocab_size=tokenizer.vocab_size,
                with_routes=config.model.is_moe and config.wants_engine_routes,
            ),
            mesh=mesh,
            rl=rl,
            seed=config.train.seed,
            updates_per_rollout=config.updates_per_rollout,
            models=load_reward_models(config, tokenizer, mesh, platform),
            special_ids=tokenizer.special_ids,
            conversations=conversations,
            baseline=greedy_baseline if rl.advantage.kind == "remax" else None,
        )
