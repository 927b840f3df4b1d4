"""One rank of reinforcement learning: `mcore-rl rl`, or `torchrun ... -m mcore_rl.programs.rl CONFIG.toml`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.checks.run import refuse
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl.loss import SELF, Clipped, DistillConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import ConfigError, StoppedError
from mcore_rl.families import allows_te
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.metrics.metrics import Metric
from mcore_rl.programs.inputs import refuse_other_tokenizer
from mcore_rl.programs.open_run import is_done, open_run
from mcore_rl.programs.rollouts import Prompts, load_prompts, make_flow, open_rollouts
from mcore_rl.rl.batch import LogprobHead
from mcore_rl.rl.engines.base import end_waits_when
from mcore_rl.rl.rewards.score import TRIED_AT_START, FailedPart, FailureReport, try_reward
from mcore_rl.rl.rollouts.prompts import refuse_prompts_without_teacher
from mcore_rl.rl.step.learner import Learner, OptionalParts, policy_logprobs
from mcore_rl.rl.step.policy_routes import PolicyLogprobs, PolicyRoutes
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.storage.checkpoint import find_checkpoint
from mcore_rl.storage.folders import read_run, run_of_checkpoint
from mcore_rl.storage.run_config import load_run_config
from mcore_rl.train.loop import Run
from mcore_rl.workers.launcher import world_size_of_launcher
from mcore_rl.workers.rank_guard import rank_guard

if TYPE_CHECKING:
    from mcore_rl.rl.models.teachers import Teachers, TeacherSource
    from mcore_rl.rl.step.texts import TextSource

    AnySource = TeacherSource | str | None

USUAL_STALENESS = 8
"""Rollout batches by which weights may be older without a warning (AReaL's docs/algorithms/async.md)."""


def main(argv: Sequence[str]) -> int:
    """Train a policy on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped as asked."""
    with rank_guard():
        train(load_run_config(RlRunConfig, Path(argv[0]), argv[1:]))
    return 0


def train(config: RlRunConfig) -> None:
    """Collective over the ranks that a launcher started: train to the last step, or until a stop is asked for."""
    # Everything that a user can get wrong comes first, before a model costs time.
    config = platforms.decided(config)
    check_rl(config, world_size_of_launcher())
    if config.critic is not None and config.critic.load is not None:
        from mcore_rl.rl.models.critic import refuse_other_critic

        refuse_other_critic(config.critic.load, config.model, Path(config.run_dir))
    prompts, text_source = load_prompts(config), None
    if config.rl.ptx.coeff:
        from mcore_rl.rl.step.texts import read_texts

        text_source = read_texts(config, prompts.chat, prompts.tokenizer.eod_id)
    platform = platforms.start(config.platform, allows_te=allows_te(config))
    if not is_done(config, platform):
        failed_at_start = on_rank_zero(lambda: try_reward_of(config.rl, prompts))
        teacher_sources = on_rank_zero(lambda: sources_of_teachers(config, prompts))
        with ExitStack() as stack:
            servers, before_models = None, None
            if config.served is not None and config.served.share_gpus:
                from mcore_rl.rl.engines.shared_gpus import SharedServers

                servers = SharedServers(config, platform)
                stack.callback(servers.close)
                before_models = servers.start
            names = {f"teacher {index}": name for index, name in enumerate(teacher_sources) if isinstance(name, str)}
            orders = {"rl.distill.server": names} if names else {}
            run = stack.enter_context(open_run(config, platform, orders, before_models=before_models))
            failures = FailureReport(run.log.message, run.folder.path)
            failures.add(failed_at_start)
            rollouts = stack.enter_context(
                open_rollouts(config, prompts, run.state.chunks, run.state.mesh, platform, failures, servers)
            )
            if rollouts.models is not None:
                # The models change this dict, and each checkpoint saves it.
                rollouts.models.moments = run.state.progress.reward_moments
            for line in [*prompts.describe(), *warnings_of(config)]:
                run.log.message(line)
            run.log.write_now(run.state.progress.step, [Metric("data/prompts", prompts.train.num_prompts)])
            if config.rl.distill.served:
                from mcore_rl.rl.models.served_teachers import ServedTeachers

                teachers = ServedTeachers(config.rl.distill, config.model, lambda: run.request.is_urgent)
                rollouts.teachers = stack.enter_context(closing(teachers))
            if config.rl.rollout.max_staleness:
                rollouts.flow = stack.enter_context(
                    closing(make_flow(rollouts, run.state.progress, config.train.steps))
                )
            end_waits_when(rollouts.engine, lambda: run.request.is_urgent)
            try:
                rollouts.update_weights(run.state.progress.step)
            except StoppedError:
                run.log.message(f"stopping before the first step, in a wait for servers: {run.stop_reason()}")
                return
            rollouts.engine.listen(run.log.message)
            for line in [*rollouts.engine.describe(), *rollouts.engine.take_lines()]:
                run.log.message(line)
            routes = PolicyRoutes(run.state, config.rl, config.replay)
            logprobs = policy_logprobs(run.state, config.rl, prompts.tokenizer.vocab_size)
            parts = optional_parts(config, run, logprobs, routes, teacher_sources, text_source)
            learner = Learner(run.state, config, routes, logprobs, parts)
            RlTrainer(run, config, rollouts, learner, prompts.held_out).run()
    platforms.stop()


def optional_parts(
    config: RlRunConfig,
    run: Run,
    logprobs: PolicyLogprobs,
    routes: PolicyRoutes,
    teachers: "Sequence[AnySource]",
    texts: "TextSource | None",
) -> OptionalParts:
    """Collective over the world: load the parts of a step that the config asks for; others are not imported."""
    parts, updates_per_rollout = OptionalParts(), config.updates_per_rollout
    if config.replay.split_interval is not None:
        from mcore_rl.rl.step.routing_split import RoutingSplits

        splits = RoutingSplits(
            logprobs,
            routes,
            config.replay,
            run.state,
            updates_per_rollout=updates_per_rollout,
            is_ahead=bool(config.rl.rollout.max_staleness),
        )
        parts = replace(parts, splits=splits)
    if config.rl.loss.has_reference:
        from mcore_rl.rl.models.reference import load_reference

        reference = load_reference(config.rl.loss, config.replay, run, logprobs, routes, updates_per_rollout)
        parts = replace(parts, reference=reference)
    if teachers:
        parts = replace(
            parts, teachers=load_teachers(config.rl.distill, run, teachers, logprobs.head, updates_per_rollout)
        )
    if config.critic is not None:
        from mcore_rl.rl.models.critic import load_critic

        parts = replace(parts, critic=load_critic(config, run))
    if texts is not None:
        from mcore_rl.rl.step.texts import load_texts

        parts = replace(parts, texts=load_texts(config.rl, config.train.seed, run, texts, logprobs.head.vocab_size))
    return parts


def try_reward_of(rl: RlConfig, prompts: Prompts) -> tuple[FailedPart, ...]:
    """Try reward and environment on real prompts, before a model is made; raises TrainingError if one always fails."""
    tried = prompts.train.take(0, TRIED_AT_START)
    failed: tuple[FailedPart, ...] = ()
    if rl.environment.name is not None:
        from mcore_rl.rl.environments.conversations import try_environment

        failed = try_environment(rl, tried, prompts.chat)
    if rl.agent.is_on:
        from mcore_rl.rl.agents.hold import try_agent

        failed = try_agent(rl, tried, prompts.chat, prompts.tokenizer, prompts.ends)
    return *failed, *try_reward(rl.reward, rl.max_completion_tokens, tried, prompts.tokenizer.encode)


def warnings_of(config: RlRunConfig) -> Iterator[str]:
    """Yield a warning about each setting that is valid but likely to disappoint."""
    source = run_of_checkpoint(Path(config.checkpoint.load)) if config.checkpoint.load else None
    learned = read_run(source).chat_template if source is not None else None
    if learned is not None and learned != config.data.chat_template:
        yield (
            f'warning: data.chat_template="{config.data.chat_template}", and the run of checkpoint.load={source} was '
            f'trained with "{learned}": where the two differ, the model reads turns, and ends them, otherwise than it '
            "has learned. Set the same."
        )
    moe, is_frozen = config.model.moe, config.rl.freeze_router or config.lora.is_on
    moving = {
        "aux_loss_coeff": moe.aux_loss_coeff if moe.balance != "none" else 0.0,
        "z_loss_coeff": moe.z_loss_coeff,
        "expert_bias_rate": moe.expert_bias_rate if moe.expert_bias and not is_frozen else 0.0,
    }
    if config.model.is_moe and any(moving.values()):
        named = ", ".join(f"model.moe.{name}={value}" for name, value in moving.items() if value)
        yield (
            f"{named}: the balance of the experts moves the policy too, also in a rollout batch whose rewards are all "
            "equal (Adam makes a step of optim.lr of a gradient of any size). Set it to 0 to learn from rewards alone, "
            "and rl.freeze_router=true to keep the routers as they are."
        )
    if cuts := config.rl.rollout.cuts:
        yield (
            f"warning: {', '.join(cuts)}: tokens are sampled from a part of the distribution and trained on with "
            "their probabilities in the whole one, so that updates move probability to the tokens that were cut "
            "(see rollout/cut_kl_nats). Set top_k=none, top_p=1 and min_p=0 to train on what was sampled."
        )
    refreshes = {
        "rl.loss.reference_refresh_rollouts": config.rl.loss.reference_refresh_rollouts,
        "rl.distill.self_refresh_rollouts": config.rl.distill.self_refresh_rollouts,
    }
    for name, rollouts in refreshes.items():
        if rollouts is not None and rollouts * config.updates_per_rollout >= config.train.steps:
            yield (
                f"warning: {name}={rollouts} rollout batches are all of train.steps={config.train.steps}: no update "
                "of this run has a refreshed one."
            )
    dtype = "auto" if config.served is None else config.served.dtype
    precision = config.platform.precision
    if dtype not in ("auto", precision):
        yield (
            f'warning: rl.engine.dtype="{dtype}" with platform.precision="{precision}": servers sample with other '
            "rounding than the trainer's, which rollout/mismatch_kl_nats measures. Set rl.loss.importance_sampling to "
            "correct for it."
        )
    is_corrected = config.rl.loss.correction is not None or config.rl.update.old_logprobs == "rollout"
    if config.served is not None and config.served.in_fp8 and not is_corrected:
        yield (
            'warning: rl.engine.weights="fp8_block": servers sample with weights and inputs in 8 bits, another policy '
            "than is trained, which rollout/mismatch_kl_nats measures. Set rl.loss.importance_sampling to correct for "
            'it, and with experts replay.kind="r3", as they choose others.'
        )
    capacity_factor = config.model.moe.capacity_factor
    if config.model.is_moe and capacity_factor:
        yield (
            f"warning: model.moe.capacity_factor={capacity_factor}: the trainer drops what an expert has no room for, "
            "the rollout engine drops nothing, so that the sampled logprobs differ from the trainer's also where the "
            "weights are equal (see moe/dropped_fraction and rollout/mismatch_kl_nats). Set it to none to train on "
            "what was sampled."
        )
    topk = config.model.indexer.top_k
    if topk is not None and config.served is not None and config.longest_sample > topk:
        yield (
            f"warning: samples have up to {config.longest_sample} tokens, of which indexers choose {topk} by "
            "model.indexer.top_k: servers choose by kernels of their own, in 8 bits and with another order of equal "
            "scores, so that the trainer attends to other keys than those that tokens were sampled with (see "
            'rollout/mismatch_kl_nats). Set rl.loss.importance_sampling to correct for it, or rl.engine.kind="native", '
            "which chooses as the trainer does."
        )
    staleness = config.rl.rollout.max_staleness
    if staleness and not isinstance(config.rl.loss, Clipped):
        yield (
            f'warning: rl.loss.kind="{config.rl.loss.kind}" with rl.rollout.max_staleness={staleness}: no clip ends '
            "what a token can gain that older weights sampled, from which the policy has moved already; GRPO without "
            'its clip rose on stale rollouts and then collapsed (arXiv 2510.01161). Set rl.loss.kind to "grpo", '
            '"gspo" or another that clips, or max_staleness=0.'
        )
    if staleness > USUAL_STALENESS:
        yield (
            f"warning: rl.rollout.max_staleness={staleness}: the older the weights that sampled, the more importance "
            "weights are cut or masked, and the less a rollout teaches; AReaL's guide calls 2 to "
            f"{USUAL_STALENESS} typical. Lower it as long as time/rollout_s, the wait for rollouts, does not grow."
        )
    has_token_ratio = config.rl.loss.kind in ("grpo", "ppo", "cispo", "dppo_tv", "sapo")
    if config.model.is_moe and has_token_ratio and config.replay.kind == "none":
        yield (
            f'warning: rl.loss.kind="{config.rl.loss.kind}" on a mixture of experts without routing replay: after an '
            "update tokens go to other experts, and their ratios measure that too (see routes/changed_fraction); "
            'large models have not converged so (arXiv 2507.18071). Set replay.kind="r2" or "r3", or kind="gspo".'
        )


def sources_of_teachers(config: RlRunConfig, prompts: Prompts) -> "list[AnySource]":
    """Return the models in `rl.distill`, after all checks that need no weights; None is an earlier version of the
    policy, a text the name of a server's model.

    Raises ConfigError if a checkpoint is not a language model with the policy's vocabulary, or does not fit the mesh,
    or a server's tokenizer is another; DataError if a checkpoint's is, or a prompt names a missing teacher; EngineError
    if a server gives no right logprobs.
    """
    distill, tokenizer = config.rl.distill, prompts.tokenizer
    if distill.paths:
        refuse_prompts_without_teacher(prompts.train, distill)

    def source(index: int, path: str) -> "AnySource":
        if path == SELF:
            return None
        if index in distill.served:
            from mcore_rl.rl.models.served_teachers import probed_teacher

            return probed_teacher(distill.served[index], distill, config.model, tokenizer, config.longest_sample)
        return teacher_source(path, config.model, config.mesh, config.longest_sample, config.packed_length, tokenizer)

    return [source(*numbered) for numbered in enumerate(distill.paths)]


def teacher_source(
    named: str, policy: ModelConfig, mesh: MeshConfig, longest_sample: int, packed_length: int, tokenizer: Tokenizer
) -> "TeacherSource":
    """Return the model of a teacher's checkpoint, like `sources_of_teachers`."""
    from mcore_rl.rl.frozen_model import model_to_freeze
    from mcore_rl.rl.models.teachers import TeacherSource

    path, field = find_checkpoint(Path(named)), f"rl.distill: teacher {named}"
    refuse_other_tokenizer(tokenizer, str(path), "rl.distill")
    model = model_to_freeze(path, policy)
    if model.head != "logits":
        raise ConfigError(f"{field} is a reward model, which has no logprobs. Name a language model.")
    if model.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"{field} has {model.vocab_size} tokens, the policy {policy.vocab_size}: their logprobs would be of "
            "other tokens. Name a teacher with the policy's tokenizer and vocabulary."
        )
    if model.max_position < longest_sample:
        raise ConfigError(
            f"{field} has model.max_position={model.max_position}, and the longest prompt with its completion has "
            f"{longest_sample} tokens. Shorten rl.prompts.max_tokens or rl.rollout.max_new_tokens."
        )
    refuse([f"{field}: {violation}" for violation in mesh_violations(model, mesh, packed_length, "the policy's")])
    return TeacherSource(path=path, model=model)


def load_teachers(
    distill: DistillConfig, run: Run, sources: "Sequence[AnySource]", logprobs: LogprobHead, updates_per_rollout: int
) -> "Teachers":
    """Collective over the world: return the run's teachers."""
    from mcore_rl.rl.frozen_model import FrozenModel
    from mcore_rl.rl.models.reference import Reference, earlier_policy
    from mcore_rl.rl.models.teachers import Teachers, TeacherSource

    state, config = run.state, run.state.config
    teachers: list[FrozenModel | Reference | None] = []
    for index, source in enumerate(sources):
        if isinstance(source, TeacherSource):
            frozen = FrozenModel(
                source.model,
                source.path,
                state.mesh,
                state.platform,
                config.platform,
                store=distill.store,
                verify_checksums=config.checkpoint.verify_checksums,
            )
            teachers.append(frozen)
            run.log.message(f"teacher: weights of {source.path}")
        elif source is not None:
            teachers.append(None)
            run.log.message(f"teacher: {distill.served[index]}, which has {source}")
        else:
            teachers.append(earlier_policy(run, "teacher", "teacher", distill.store, 'rl.distill.teacher="self"'))
    return Teachers(teachers, distill, logprobs, state, updates_per_rollout=updates_per_rollout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
