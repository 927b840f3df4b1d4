"""One rank of a reinforcement-learning run: `mcore-rl rl`, or `torchrun ... -m mcore_rl.run.rl CONFIG.toml`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from mcore_rl.backend import platform as platforms
from mcore_rl.backend.launcher import world_size_of_launcher
from mcore_rl.backend.processes import rank_guard
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.agree import on_rank_zero
from mcore_rl.rl.critic import Critic
from mcore_rl.rl.learner import Learner
from mcore_rl.rl.policy_routes import PolicyRoutes
from mcore_rl.rl.reference import Reference
from mcore_rl.rl.rewards.failures import FailedPart, FailureReport
from mcore_rl.rl.rewards.trial import TRIED_AT_START, try_reward
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.run.open_run import is_done, open_run
from mcore_rl.run.rollouts import Prompts, load_prompts, open_rollouts
from mcore_rl.run.trained_model import read_trained_model, run_of_checkpoint
from mcore_rl.train.loop import Run


def main(argv: Sequence[str]) -> int:
    """Train a policy on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped as asked."""
    with rank_guard():
        train(load_config(RlRunConfig, Path(argv[0]), argv[1:]))
    return 0


def train(config: RlRunConfig) -> None:
    """Collective over the ranks that a launcher started: train to the last step, or until a stop is asked for."""
    # Everything that a user can get wrong comes first, before a model costs time.
    check_rl(config, world_size_of_launcher())
    prompts = load_prompts(config)
    # The engine's cache of keys and values needs our own attention, not TransformerEngine's.
    platform = platforms.start(config.platform.model_copy(update={"layers": "torch"}))
    if not is_done(config, platform):
        failed_at_start = on_rank_zero(lambda: try_reward_of(config, prompts))
        with ExitStack() as stack:
            run = stack.enter_context(open_run(config, platform))
            failures = FailureReport(run.log.message, run.folder.path)
            failures.add(failed_at_start)
            rollouts = stack.enter_context(
                open_rollouts(config, prompts, run.state.chunks, run.state.mesh, platform, failures)
            )
            if rollouts.models is not None:
                # One dict, which the models change and each checkpoint saves.
                rollouts.models.moments = run.state.progress.reward_moments
            for line in [*prompts.describe(), *warnings_of(config)]:
                run.log.message(line)
            run.log.write_now(run.state.progress.step, [Metric("data/prompts", prompts.train.num_prompts)])
            rollouts.engine.update_weights(run.state.progress.step)
            # Ranks of one machine share its disk: each has a folder of its own.
            folder = run.folder.path / "routes" / str(platform.rank)
            with closing(PolicyRoutes(run.state, config, folder)) as routes:
                reference, vocab_size = load_reference(config, run), prompts.tokenizer.vocab_size
                critic = load_critic(config, run)
                learner = Learner(run.state, config, reference, routes, critic, vocab_size=vocab_size)
                RlTrainer(run, config, rollouts, learner, prompts.held_out).run()
    platforms.stop()


def try_reward_of(config: RlRunConfig, prompts: Prompts) -> tuple[FailedPart, ...]:
    """Call the reward once on real prompts, before a model costs time; TrainingError where a part always fails."""
    reward, limit = config.rl.reward, config.rl.rollout.max_new_tokens
    return try_reward(reward, limit, prompts.train.take(0, TRIED_AT_START), prompts.tokenizer.encode)


def warnings_of(config: RlRunConfig) -> Iterator[str]:
    """Yield a sentence on each setting that is valid and likely to disappoint."""
    source = run_of_checkpoint(Path(config.checkpoint.load)) if config.checkpoint.load else None
    learned = read_trained_model(source).chat_template if source is not None else None
    if learned is not None and learned != config.data.chat_template:
        yield (
            f'warning: data.chat_template="{config.data.chat_template}", and the run of checkpoint.load={source} was '
            f'trained with "{learned}": where the two differ, the model reads turns, and ends them, otherwise than it '
            "has learned. Set the same."
        )
    moe = config.model.moe
    moving = {
        "aux_loss_coeff": moe.aux_loss_coeff if moe.balance != "none" else 0.0,
        "z_loss_coeff": moe.z_loss_coeff,
        "expert_bias_rate": moe.expert_bias_rate if moe.expert_bias and not config.rl.freeze_router else 0.0,
    }
    if config.model.is_moe and any(moving.values()):
        named = ", ".join(f"model.moe.{name}={value}" for name, value in moving.items() if value)
        yield (
            f"{named}: the balance of the experts moves the policy too, also in a rollout batch whose rewards are all "
            "equal (Adam makes a step of optim.lr of a gradient of any size). Set it to 0 to learn from rewards alone, "
            "and rl.freeze_router=true to keep the routers as they are."
        )
    rollout = config.rl.rollout
    cuts = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
    off = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
    if set_cuts := [f"rl.rollout.{name}={value}" for name, value in cuts.items() if value != off[name]]:
        yield (
            f"warning: {', '.join(set_cuts)}: tokens are sampled from a part of the distribution and trained on with "
            "their probabilities in the whole one, so that updates move probability to the tokens that were cut "
            "(see rollout/cut_kl_nats). Set top_k=none, top_p=1 and min_p=0 to train on what was sampled."
        )
    capacity_factor = config.model.moe.capacity_factor
    if config.model.is_moe and capacity_factor:
        yield (
            f"warning: model.moe.capacity_factor={capacity_factor}: the trainer drops what an expert has no room for, "
            "the rollout engine drops nothing, so that the sampled logprobs differ from the trainer's also where the "
            "weights are equal (see moe/dropped_fraction and rollout/mismatch_kl_nats). Set it to none to train on "
            "what was sampled."
        )
    has_token_ratio = config.rl.loss.kind in ("grpo", "ppo", "cispo")
    if config.model.is_moe and has_token_ratio and config.replay.kind == "none":
        yield (
            f'warning: rl.loss.kind="{config.rl.loss.kind}" on a mixture of experts without routing replay: after an '
            "update tokens go to other experts, and their ratios measure that too (see routes/changed_fraction); "
            'large models have not converged so (arXiv 2507.18071). Set replay.kind="r2" or "r3", or kind="gspo".'
        )


def load_reference(config: RlRunConfig, run: Run) -> Reference | None:
    """Collective over the world: return the reference policy of the run, at step 0 the policy; None without KL."""
    if not config.rl.loss.kl_coeff:
        return None
    reference = Reference(
        run.state.chunks, run.state.mesh, config.model, run.folder.path / "reference", run.folder.checkpoints
    )
    step = run.state.progress.step
    if step == 0:
        reference.set(0)
    else:
        run.log.message(f"reference policy: {reference.resume(step)}")
    return reference


def load_critic(config: RlRunConfig, run: Run) -> Critic | None:
    """Collective over the world: return the critic of the run, at step 0 with the weights of rl.critic.load or those of
    the policy, later with those of the checkpoint; None without one.
    """
    if run.state.critic is None:
        return None
    critic = Critic(run.state.critic, config)
    if run.state.progress.step == 0:
        run.log.message(critic.begin(run.state.chunks))
    return critic


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
