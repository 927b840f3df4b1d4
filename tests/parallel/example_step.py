"""The step of examples/grpo_step.py, and RlTrainer's on the same prompts: apart from its test, so that a rank need not
import that.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from examples.grpo_step import CONFIG, PROMPTS, first_half, sample, update
from mcore_rl.families import allows_te
from mcore_rl.megatron.platform import start
from mcore_rl.programs.open_run import open_run
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.score import FailureReport, Reward
from mcore_rl.rl.rollouts.rollout import Rollouts
from mcore_rl.rl.step.learner import Learner, policy_logprobs
from mcore_rl.rl.step.policy_routes import PolicyRoutes
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.rl.types import Prompt
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState


def letters(tokens_T: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens_T)


def reward(given: RewardInput) -> float:
    """The example's reward as a part of rl.reward."""
    return first_half([ord(letter) - ord("a") for letter in given.completion])


class ExamplePrompts:
    num_prompts, skipped = len(PROMPTS), ""

    def take(self, cursor: int, count: int) -> list[Prompt]:
        return PROMPTS[cursor : cursor + count]


def weights(state: TrainState) -> dict[str, Tensor]:
    (chunk,) = state.chunks
    return {name: weight.detach().clone() for name, weight in chunk.named_parameters()}


def step_of_example() -> tuple[dict[str, Tensor], dict[str, Tensor], Sequence[float]]:
    """On a rank: weights before and after the example's step, and the mean rewards before and after it."""
    state = set_up(CONFIG, start(CONFIG.platform, allows_te=allows_te(CONFIG)))
    initial = weights(state)
    groups, before_PG = sample(state)
    update(state, groups, before_PG)
    return initial, weights(state), [float(rewards.mean()) for rewards in (before_PG, sample(state)[1])]


def step_of_trainer(folder: Path) -> dict[str, Tensor]:
    """On a rank: weights after one rollout batch of RlTrainer."""
    part = CONFIG.rl.reward.model_copy(update={"parts": (f"{__name__}:reward",)})
    rl = CONFIG.rl.model_copy(update={"reward": part})
    config = CONFIG.model_copy(update={"rl": rl, "run_dir": str(folder)})
    platform = start(config.platform, allows_te=allows_te(config))
    with open_run(config, platform) as run, Reward(config.rl.reward, max_new_tokens=12) as rewards:
        mesh = run.state.mesh
        rollouts = Rollouts(
            engine=MegatronEngine(run.state.chunks, mesh, config.model, letters, config.rl.engine),
            reward=rewards,
            failures=FailureReport(run.log.message, None),
            prompts=ExamplePrompts(),
            sampling=Sampling(max_new_tokens=12),
            mesh=mesh,
            rl=config.rl,
            seed=config.train.seed,
            updates_per_rollout=config.updates_per_rollout,
        )
        routes = PolicyRoutes(run.state, config.rl, config.replay)
        learner = Learner(run.state, config, routes, policy_logprobs(run.state, config.rl, config.model.vocab_size))
        RlTrainer(run, config, rollouts, learner, ()).run()
        return weights(run.state)
