"""The section `rl.update`: how a rollout batch becomes updates."""

from typing import Literal

from pydantic import PositiveInt

from mcore_rl.config.section import Section, Store


class UpdateConfig(Section):
    """Updates of train.global_batch completions each that a rollout batch becomes."""

    epochs: PositiveInt = 1
    """Number of times that each completion of a rollout batch is trained on."""
    max_tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one forward pass on one replica, into which whole completions are packed with their prompts; `auto`:
    one of the longest."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Source of the old policy's logprobs: a training pass under the weights of the rollout, or the rollout itself,
    which saves that pass and leaves the engine's rounding in the ratio."""
    store: Store = "device"
    """Memory in which the policy's optimizer state waits between its updates; its gradients then have memory in updates
    alone, and its weights stay on the device. `host`: main memory (on CPUs nothing moves); `file`: a file without a
    name in the run's folder."""
