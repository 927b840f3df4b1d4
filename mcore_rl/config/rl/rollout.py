"""The sections `rl.rollout`, `rl.eval` and `rl.samples`: sampling for training, for evaluation and for people to
read.
"""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from mcore_rl.config.section import Probability, Section

MIN_TEMPERATURE = 1e-6
"""Smallest temperature other than 0: logits divided by much less are not finite in float32."""


class RolloutConfig(Section):
    """How many completions are sampled for a step, and how."""

    prompts_per_step: PositiveInt = 16
    """Prompts per rollout batch, over all ranks."""
    group_size: PositiveInt = 8
    """Completions per prompt; advantages are relative within them."""
    max_new_tokens: PositiveInt = 1024
    """Maximum number of tokens of a completion; a completion that reaches it without an end is truncated."""
    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits; at 0 the most likely token is taken. Training uses the tempered distribution too."""
    top_k: PositiveInt | None = None
    """Number of most likely tokens to sample from; `none`: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Total probability of the most likely tokens to sample from; 1: all tokens."""
    min_p: Probability = 0.0
    """Minimum probability of a token to sample, as a fraction of the most likely token's; 0: all tokens."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, in addition to the model's end tokens. They remain in the text, with every engine,
    as if servers had include_stop_str_in_output: the text that is scored is the text that is trained on."""
    stop_tokens: tuple[NonNegativeInt, ...] = ()
    """Further token ids that end a completion, in addition to the end of the assistant's turn in the chat template, the
    tokenizer's eos_token, eos_token_id in the generation_config.json next to it, and the end of a document."""
    max_staleness: NonNegativeInt = 0
    """Number of rollout batches by which the weights that sample a token may be older than the weights that train on
    it: servers generate groups while the policy trains, at most this many batches ahead, and continue with the new
    weights when these arrive; 0: the policy trains and generates in turn."""
    dynamic_sampling: bool = False
    """Replace groups in which all completions are right, or all are wrong, by groups of new prompts (DAPO); see
    `dynamic_sampling_by`."""
    dynamic_sampling_by: Literal["auto", "accuracy", "reward"] = "auto"
    """How completions of a group must differ, with `dynamic_sampling`; `accuracy`: in whether they are correct
    (rl.reward.correct), as in the paper: groups that differ only in their length are replaced; `reward`: in the whole
    reward; `auto`: `accuracy` if a rule decides (exact, numeric, math, countdown, code without `partial`), else
    `reward`."""
    max_refills: PositiveInt = 4
    """Maximum number of further rollouts per step with `dynamic_sampling`, each of as many prompts as are likely to
    fill it; after that the step trains on the groups it has. Surplus groups are not trained on, and their prompts come
    again."""

    @cached_property
    def cuts(self) -> list[str]:
        """Fields, with their values, that restrict sampling to a part of the distribution."""
        off = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
        return [f"rl.rollout.{name}={value}" for name in off if (value := getattr(self, name)) != off[name]]


class EvalConfig(Section):
    """Prompts that are never trained on, and how they are answered, every train.eval_interval steps."""

    files: tuple[str, ...] = ()
    """Files, as rl.prompts.files; with a built-in task there are none, and problems of a different seed are made."""
    num_prompts: PositiveInt = 64
    """Number of prompts, from the beginning of the files."""
    samples: PositiveInt = 1
    """Completions per prompt; with k of them, pass@k is reported too."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits for these completions; at 0 the most likely tokens are taken."""


class SamplesConfig(Section):
    """Completions for people to read: all of a rollout batch as JSON lines in `<run_dir>/samples`, a few in the log."""

    interval: PositiveInt | None = 10
    """Interval, in rollout batches, at which completions are written; `none`: never."""
    shown: NonNegativeInt = 3
    """Number of a batch's completions that are logged as a table."""
