"""Prompts and rollouts as an RL config asks for them: shared by training and evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.chat import load_chat
from mcore_rl.data.end_tokens import describe_ends, end_tokens
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import DataError
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.base import sampling_of
from mcore_rl.rl.engines.make import make_engine
from mcore_rl.rl.prompts import PromptEncoder, PromptSource, held_out_prompts, train_prompts
from mcore_rl.rl.rewards.failures import FailureReport
from mcore_rl.rl.rewards.score import ANSWER_PARTS, Reward
from mcore_rl.rl.rollout import Rollouts, runs_rewards
from mcore_rl.rl.types import Prompt
from mcore_rl.run.trained_model import load_matching_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Encoded prompts, and the tokenizer that encoded them."""

    tokenizer: Tokenizer
    ends: Mapping[int, str]
    """Tokens that end a completion, each with the place that names it."""
    train: PromptSource
    held_out: tuple[Prompt, ...]

    def describe(self) -> list[str]:
        """Return lines for the log: the prompts, and what ends a completion."""
        number = f"{self.train.num_prompts} prompts" if self.train.num_prompts else "prompts without end"
        skipped = f"; left out: {self.train.skipped}" if self.train.skipped else ""
        return [
            f"{number} to learn from, {len(self.held_out)} held out{skipped}",
            describe_ends(self.ends, self.tokenizer),
        ]


def load_prompts(config: RlRunConfig) -> Prompts:
    """Encode the prompts that `config` names; DataError when there are none or the tokenizer does not match."""
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
    return Prompts(
        tokenizer=tokenizer,
        ends=ends,
        train=train_prompts(config.rl.prompts, held_out, encode, seed, needs_answer=needs_answer),
        held_out=held_out,
    )


@contextmanager
def open_rollouts(
    config: RlRunConfig,
    prompts: Prompts,
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    failures: FailureReport,
) -> Iterator[Rollouts]:
    """Collective over the world: make the engine on `chunks` and the reward workers, which end on leaving. Scores that
    fail are added to `failures` on rank 0.
    """
    rl, tokenizer = config.rl, prompts.tokenizer
    with ExitStack() as stack:
        reward = None
        if runs_rewards(mesh):
            reward = stack.enter_context(Reward(rl.reward, max_new_tokens=rl.rollout.max_new_tokens))
        yield Rollouts(
            engine=make_engine(config, chunks, mesh, tokenizer.decode),
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
            config=config,
            special_ids=tokenizer.special_ids,
        )
