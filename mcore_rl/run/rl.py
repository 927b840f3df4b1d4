"""One rank of a reinforcement-learning run: `mcore-rl rl`, or `torchrun ... -m mcore_rl.run.rl CONFIG.toml`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mcore_rl.backend import platform as platforms
from mcore_rl.backend.launcher import world_size_of_launcher
from mcore_rl.backend.processes import rank_guard
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.obs.metrics import Metric
from mcore_rl.rl.learner import Learner
from mcore_rl.rl.policy_routes import PolicyRoutes
from mcore_rl.rl.reference import Reference
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.run.policy import Prompts, prompts_of, rollouts_of
from mcore_rl.run.training import Data, train
from mcore_rl.train.loop import Loop, Run


def main(argv: Sequence[str]) -> int:
    """Train as the config file and overrides in `argv` say: 0 when all is done or the run was asked to stop."""
    with rank_guard():
        config = load_config(RlRunConfig, Path(argv[0]), argv[1:])
        check_rl(config, world_size_of_launcher())
        prompts = prompts_of(config)
        platform = platforms.start(config.platform.model_copy(update={"layers": "torch"}))
        train(config, data_of(config, prompts), platform)
        platforms.stop()
    return 0


def data_of(config: RlRunConfig, prompts: Prompts) -> Data:
    """Prompts, and what makes a policy learn from them."""

    @contextmanager
    def begin(run: Run) -> Iterator[Loop]:
        with ExitStack() as stack:
            rollouts = rollouts_of(config, prompts, run.state.chunks, run.state.mesh, stack)
            rollouts.engine.update_weights(run.state.progress.step)
            routes = PolicyRoutes(
                run.state, config, run.folder.path / "routes" / str(run.state.platform.rank)
            )
            stack.callback(routes.close)
            learner = Learner(run.state, config, reference_of(config, run), routes)
            yield RlTrainer(run, config, rollouts, learner, prompts.held_out)

    def facts() -> list[Metric]:
        return [Metric("data/prompts", prompts.train.num_prompts)]

    return Data(begin=begin, facts=facts, lines=(prompts.told(), *warnings_of(config)))


def warnings_of(config: RlRunConfig) -> list[str]:
    """What a user should know before a run that may disappoint."""
    capacity_factor = config.model.moe.capacity_factor
    if config.model.is_moe and capacity_factor:
        return [
            f"warning: model.moe.capacity_factor={capacity_factor}: the trainer drops what an expert has no room for, "
            "the rollout engine drops nothing, so that the sampled logprobs differ from the trainer's also where the "
            "weights are equal (see moe/dropped_fraction and rollout/mismatch_kl_nats). Set it to 0 to train on what "
            "was sampled."
        ]
    has_token_ratio = config.rl.loss.kind in ("grpo", "cispo")
    if config.model.is_moe and has_token_ratio and config.replay.kind == "none":
        return [
            f'warning: rl.loss.kind="{config.rl.loss.kind}" on a mixture of experts without routing replay: after an '
            "update tokens go to other experts, and their ratios measure that too (see routes/changed_fraction); "
            'large models have not converged so (arXiv 2507.18071). Set replay.kind="r2" or "r3", or kind="gspo".'
        ]
    return []


def reference_of(config: RlRunConfig, run: Run) -> Reference | None:
    """Collective over the world: the reference that the run had, or the policy from which it starts; None: no KL."""
    if not config.rl.loss.kl_coeff:
        return None
    reference = Reference(run.state.chunks, run.state.mesh, config.model, run.folder.path / "reference")
    step = run.state.progress.step
    if step == 0:
        reference.set(0)
    else:
        run.log.message(f"reference policy: {reference.resume(step)}")
    return reference


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
