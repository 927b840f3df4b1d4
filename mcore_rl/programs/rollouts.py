"""Prompts and rollouts for an RL config, shared by training and evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.data.answer_ends import describe_ends, end_tokens
from mcore_rl.data.chat import RAW_JOINS, Chat, load_chat, raw_joins
from mcore_rl.data.records import WARNING
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import DataError
from mcore_rl.megatron.agree import on_every_rank
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform
from mcore_rl.programs.inputs import load_matching_tokenizer
from mcore_rl.rl.engines.base import Engine, asking, make_engine, sampling_of
from mcore_rl.rl.rewards.score import ANSWER_PARTS, FailureReport, Reward
from mcore_rl.rl.rollouts.evaluation import greedy_baseline
from mcore_rl.rl.rollouts.prompts import FilePrompts, PromptEncoder, PromptSource, held_out_prompts, train_prompts
from mcore_rl.rl.rollouts.rollout import Rollouts, runs_rewards
from mcore_rl.rl.types import Prompt
from mcore_rl.train.state import Progress

if TYPE_CHECKING:
    from mcore_rl.rl.agents.hold import AgentSessions
    from mcore_rl.rl.engines.shared_gpus import SharedServers
    from mcore_rl.rl.environments.conversations import Conversations
    from mcore_rl.rl.rollouts.flow import GroupFlow


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
        number = f"{self.train.num_prompts} prompts" if self.train.num_prompts else "generated prompts (unlimited)"
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


def make_flow(rollouts: Rollouts, progress: Progress, steps: int) -> "GroupFlow":
    """Return the flow of groups until step `steps`; raises ConfigError if the engine does not support it."""
    from mcore_rl.rl.rollouts.flow import GroupFlow

    engine, rollout, updates = asking(rollouts.engine), rollouts.rl.rollout, rollouts.updates_per_rollout
    request = engine.request_group
    if rollouts.conversations is not None:
        request = rollouts.conversations.hold_group
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


def _conversations(
    rl: RlConfig, engine: Engine, prompts: Prompts, mesh: Mesh, stack: ExitStack
) -> "Conversations | AgentSessions | None":
    """Collective over the world: return what holds conversations or runs agents, which ends with `stack`; or None."""
    if rl.agent.is_on:
        from mcore_rl.rl.agents.hold import AgentSessions

        serves = runs_rewards(mesh)
        agents = AgentSessions(rl, engine, prompts.chat, prompts.tokenizer, mesh, prompts.ends, serves=serves)
        return on_every_rank(lambda: stack.enter_context(agents))
    if rl.environment.name is None:
        return None
    from mcore_rl.rl.environments.conversations import Conversations
    from mcore_rl.rl.environments.interface import EnvironmentWorkers, environment_maker

    make, workers = on_every_rank(lambda: environment_maker(rl.environment)), None
    if runs_rewards(mesh):
        workers = stack.enter_context(EnvironmentWorkers(make, rl.environment))
    return Conversations(rl, engine, prompts.chat, mesh, workers)


@contextmanager
def open_rollouts(
    config: RlRunConfig,
    prompts: Prompts,
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    platform: Platform,
    failures: FailureReport,
    servers: "SharedServers | None" = None,
) -> Iterator[Rollouts]:
    """Collective over the world: create the engine on `chunks`, the reward models, and the worker processes for rewards
    and environment, which end on exit. Failed scores are added to `failures` on rank 0. Servers on the GPUs of the
    ranks are started unless they were, as `servers`.
    """
    rl, tokenizer = config.rl, prompts.tokenizer
    with ExitStack() as stack:
        reward = None
        if runs_rewards(mesh):
            reward = stack.enter_context(Reward(rl.reward, max_new_tokens=rl.max_completion_tokens))
        engine: Engine
        if config.served is None or not config.served.share_gpus:
            engine = make_engine(config, chunks, mesh, tokenizer.decode)
        else:
            from mcore_rl.rl.engines.shared_gpus import SharedServers, shared_engine

            if servers is None:
                servers = SharedServers(config, platform)
                try:
                    servers.start(has_models=True)
                except BaseException:
                    servers.close()
                    raise
            engine = shared_engine(servers, config, chunks, mesh, tokenizer.decode)
        stack.callback(engine.close)
        conversations = _conversations(rl, engine, prompts, mesh, stack)
        models = None
        if rl.reward.model_parts:
            from mcore_rl.rl.rewards.from_model import load_reward_models

            models = load_reward_models(config, tokenizer, mesh, platform)
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
            models=models,
            special_ids=tokenizer.special_ids,
            conversations=conversations,
            baseline=greedy_baseline if rl.advantage.kind == "remax" else None,
        )
