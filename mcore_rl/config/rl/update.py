"""The section `rl.update`: how a rollout batch becomes updates."""

from typing import Literal

from pydantic import PositiveInt

from mcore_rl.config.section import Section, Store


class UpdateConfig(Section):
    """How a rollout batch becomes updates, each with train.global_batch completions."""

    epochs: PositiveInt = 1
    """Number of times that each completion of a rollout batch is trained on."""
    max_tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Tokens of a forward pass on a replica, into which whole completions are packed with their prompts; `auto`: the
    length of the longest sample."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Source of the old policy's logprobs; `trainer`: a training pass with the weights of the rollout; `rollout`: the
    rollout itself, which saves that pass but leaves the engine's rounding in the ratio."""
    store: Store = "device"
    """Memory in which the policy's optimizer state waits between its updates; its weights stay on the device; `host`:
    main memory (on CPUs nothing moves). With `host`, its gradients take memory only during updates."""
