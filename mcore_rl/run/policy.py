"""What generates and judges: shared by the programs that sample from a policy."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.data.chat import load_chat
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.base import sampling_of
from mcore_rl.rl.engines.make import make_engine
from mcore_rl.rl.prompts import (
    PromptEncoder,
    PromptSource,
    held_out_prompts,
    train_prompts,
)
from mcore_rl.rl.rewards.score import Reward
from mcore_rl.rl.rollout import Rollouts, judges
from mcore_rl.rl.types import Prompt
from mcore_rl.run.trained import refuse_other_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """What is asked, in tokens."""

    tokenizer: Tokenizer
    train: PromptSource
    held_out: tuple[Prompt, ...]

    def told(self) -> str:
        """All of it in a sentence."""
        number = f"{self.train.num_prompts} prompts" if self.train.num_prompts else "prompts without end"
        skipped = f"; left out: {self.train.skipped}" if self.train.skipped else ""
        return f"{number} to learn from, {len(self.held_out)} held out{skipped}"


def prompts_of(config: RlRunConfig) -> Prompts:
    """The prompts that `config` names, encoded; DataError when there are none or the tokenizer does not fit."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the tokenizer {config.data.tokenizer.path} has {tokenizer.vocab_size} tokens, model.vocab_size is "
            f"{config.model.vocab_size}. Name the tokenizer that the model was trained with."
        )
    refuse_other_tokenizer(tokenizer, config.checkpoint.load)
    chat = load_chat(config.data.chat_template, tokenizer, config.data.tokenizer.path)
    encode = PromptEncoder(chat, config.rl.prompts.max_tokens)
    seed = config.train.seed
    held_out = held_out_prompts(config.rl.eval, config.rl.prompts, encode, seed)
    return Prompts(
        tokenizer=tokenizer,
        train=train_prompts(config.rl.prompts, held_out, encode, seed),
        held_out=held_out,
    )


def rollouts_of(
    config: RlRunConfig, prompts: Prompts, chunks: Sequence[nn.Module], mesh: Mesh, stack: ExitStack
) -> Rollouts:
    """Collective over the world: engine and judges, which `stack` closes."""
    rl, tokenizer = config.rl, prompts.tokenizer
    reward = None
    if judges(mesh):
        reward = stack.enter_context(Reward(rl.reward, max_new_tokens=rl.rollout.max_new_tokens))
    return Rollouts(
        engine=make_engine(config, chunks, mesh, tokenizer.decode),
        reward=reward,
        prompts=prompts.train,
        sampling=sampling_of(
            rl.rollout, tokenizer.eod_id, with_routes=config.model.is_moe and config.wants_engine_routes
        ),
        mesh=mesh,
        config=config,
    )
