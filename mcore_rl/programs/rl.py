"""One rank of reinforcement learning: `mcore-rl rl`, or `torchrun ... -m mcore_rl.programs.rl CONFIG.toml`."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mcore_rl.checks.inputs import has_checkpoints
from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.checks.run import refuse
from mcore_rl.config.data import DataConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl.loss import SELF, AnyLoss, DistillConfig, PtxConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.run import TrainConfig
from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.batch import SampleDataset
from mcore_rl.data.examples import read_examples
from mcore_rl.data.indexed import DataPlan, SampleCounts, build_datasets, plan_data
from mcore_rl.data.packing import PackedSequences, PackingOptions
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.metrics.metrics import Metric
from mcore_rl.programs.inputs import refuse_other_tokenizer
from mcore_rl.programs.open_run import is_done, open_run
from mcore_rl.programs.rollouts import Prompts, load_prompts, make_flow, open_rollouts
from mcore_rl.rl.batch import LogprobHead
from mcore_rl.rl.environments.conversations import try_environment
from mcore_rl.rl.frozen_model import FrozenModel, model_to_freeze
from mcore_rl.rl.models.critic import Critic, critic_routes
from mcore_rl.rl.models.reference import Reference, ReferencePass
from mcore_rl.rl.models.teachers import Teachers, TeacherSource
from mcore_rl.rl.rewards.score import TRIED_AT_START, FailedPart, FailureReport, try_reward
from mcore_rl.rl.rollouts.prompts import refuse_prompts_without_teacher
from mcore_rl.rl.step.learner import Learner, OptionalParts, policy_logprobs
from mcore_rl.rl.step.policy_routes import PolicyLogprobs, PolicyRoutes
from mcore_rl.rl.step.routing_split import RoutingSplits
from mcore_rl.rl.step.texts import Texts
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.storage.checkpoint import check, find_checkpoint
from mcore_rl.storage.folders import read_run, run_of_checkpoint, stored_lora
from mcore_rl.storage.run_config import load_run_config
from mcore_rl.train.loop import Run
from mcore_rl.workers.launcher import world_size_of_launcher
from mcore_rl.workers.rank_guard import rank_guard

OF_LAYERS = ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
"""Model fields that must be the same in a critic's checkpoint and the policy; loading checks the rest."""


def main(argv: Sequence[str]) -> int:
    """Train a policy on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped as asked."""
    with rank_guard():
        train(load_run_config(RlRunConfig, Path(argv[0]), argv[1:]))
    return 0


def train(config: RlRunConfig) -> None:
    """Collective over the ranks that a launcher started: train to the last step, or until a stop is asked for."""
    # Everything that a user can get wrong comes first, before a model costs time.
    check_rl(config, world_size_of_launcher())
    if config.critic is not None and config.critic.load is not None:
        refuse_other_critic(config.critic.load, config.model, Path(config.run_dir))
    prompts = load_prompts(config)
    text_source = read_texts(
        config.rl.ptx, prompts, config.model.vocab_size, config.train, config.packed_length, config.mesh.zigzag
    )
    platform = platforms.start(config.platform, allows_te=config.allows_te)
    if not is_done(config, platform):
        failed_at_start = on_rank_zero(lambda: try_reward_of(config.rl, prompts))
        source_of = partial(
            teacher_source,
            policy=config.model,
            mesh=config.mesh,
            longest_sample=config.longest_sample,
            packed_length=config.packed_length,
            tokenizer=prompts.tokenizer,
        )
        teacher_sources = on_rank_zero(lambda: sources_of_teachers(config.rl.distill, prompts, source_of))
        with ExitStack() as stack:
            run = stack.enter_context(open_run(config, platform))
            failures = FailureReport(run.log.message, run.folder.path)
            failures.add(failed_at_start)
            rollouts = stack.enter_context(
                open_rollouts(config, prompts, run.state.chunks, run.state.mesh, platform, failures)
            )
            if rollouts.models is not None:
                # The models change this dict, and each checkpoint saves it.
                rollouts.models.moments = run.state.progress.reward_moments
            for line in [*prompts.describe(), *warnings_of(config)]:
                run.log.message(line)
            run.log.write_now(run.state.progress.step, [Metric("data/prompts", prompts.train.num_prompts)])
            if config.rl.rollout.max_staleness:
                rollouts.flow = stack.enter_context(
                    closing(make_flow(rollouts, run.state.progress, config.train.steps))
                )
            rollouts.update_weights(run.state.progress.step)
            rollouts.engine.listen(run.log.message)
            for line in [*rollouts.engine.describe(), *rollouts.engine.take_lines()]:
                run.log.message(line)
            routes = PolicyRoutes(run.state, config.rl, config.replay)
            vocab_size = prompts.tokenizer.vocab_size
            logprobs = policy_logprobs(run.state, config.rl, vocab_size)
            updates_per_rollout = config.updates_per_rollout
            parts = OptionalParts(
                splits=make_splits(config, run, logprobs, routes),
                reference=load_reference(config.rl.loss, config.replay, run, logprobs, routes, updates_per_rollout),
                teachers=load_teachers(config.rl.distill, run, teacher_sources, logprobs.head, updates_per_rollout),
                critic=load_critic(config, run),
                texts=load_texts(config.rl, config.train.seed, run, text_source, vocab_size),
            )
            learner = Learner(run.state, config, routes, logprobs, parts)
            RlTrainer(run, config, rollouts, learner, prompts.held_out).run()
    platforms.stop()


def try_reward_of(rl: RlConfig, prompts: Prompts) -> tuple[FailedPart, ...]:
    """Try the reward and the environment on real prompts, before a model costs time. Raises TrainingError if a part
    always fails.
    """
    tried = prompts.train.take(0, TRIED_AT_START)
    return (
        *try_environment(rl, tried, prompts.chat),
        *try_reward(rl.reward, rl.max_completion_tokens, tried, prompts.tokenizer.encode),
    )


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
    has_token_ratio = config.rl.loss.kind in ("grpo", "ppo", "cispo")
    if config.model.is_moe and has_token_ratio and config.replay.kind == "none":
        yield (
            f'warning: rl.loss.kind="{config.rl.loss.kind}" on a mixture of experts without routing replay: after an '
            "update tokens go to other experts, and their ratios measure that too (see routes/changed_fraction); "
            'large models have not converged so (arXiv 2507.18071). Set replay.kind="r2" or "r3", or kind="gspo".'
        )


def refuse_other_critic(load: str, model: ModelConfig, run_dir: Path) -> None:
    """Raise a ConfigError if the model in rl.advantage.critic.load has different layers from the policy's, or low-rank
    adapters.
    """
    if has_checkpoints(run_dir):
        return
    path = find_checkpoint(Path(load))
    stored = ModelConfig.model_validate_json(json.dumps(check(path).model))
    differing = [
        f"{name} {getattr(stored, name)} instead of {getattr(model, name)}"
        for name in OF_LAYERS
        if getattr(stored, name) != getattr(model, name)
    ]
    if differing:
        raise ConfigError(
            f"rl.advantage.critic.load={load} is of a model with {', '.join(differing)}: the critic has the "
            "policy's layers. Name a checkpoint of the policy's model, or leave it out to start from the policy."
        )
    if stored_lora(path).is_on:
        raise ConfigError(
            f"rl.advantage.critic.load={load} has low-rank adapters, and a critic is trained whole. Add them to its "
            "weights with `mcore-rl convert export --merge`, import the result, and name that."
        )


def make_splits(config: RlRunConfig, run: Run, logprobs: PolicyLogprobs, routes: PolicyRoutes) -> RoutingSplits | None:
    """Return the splits of mismatches by routing for `replay.split_interval`; None without it."""
    if config.replay.split_interval is None:
        return None
    return RoutingSplits(
        logprobs,
        routes,
        config.replay,
        run.state,
        updates_per_rollout=config.updates_per_rollout,
        is_ahead=bool(config.rl.rollout.max_staleness),
    )


def load_reference(
    loss: AnyLoss,
    replay: ReplayConfig,
    run: Run,
    logprobs: PolicyLogprobs,
    routes: PolicyRoutes,
    updates_per_rollout: int,
) -> ReferencePass | None:
    """Collective over the world: return the run's reference policy, at step 0 the policy; None without KL."""
    if not loss.kl_coeff:
        return None
    config, step = run.state.config, run.state.progress.step
    reference = Reference(
        run.state.chunks,
        run.state.mesh,
        config.model,
        run.folder.path / "reference",
        run.folder.checkpoints,
        store=loss.reference_store,
        allowed=config.checkpoint.allow_changes,
        shares_base=config.lora.is_on,
        base=run.checkpoints.base,
    )
    if step == 0:
        reference.set(0)
    else:
        run.log.message(f"reference policy: {reference.resume(step)}")
    return ReferencePass(reference, loss, replay, logprobs, routes, run.state, updates_per_rollout=updates_per_rollout)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """The data of `rl.ptx`, after all checks."""

    packed: PackedSequences | None
    """Conversations; None if the texts are tokens on disk."""
    plan: DataPlan | None
    """Tokens on disk; None if the texts are conversations."""


def read_texts(
    ptx: PtxConfig, prompts: Prompts, vocab_size: int, train: TrainConfig, length: int, multiple: int
) -> TextSource | None:
    """Return the texts of `rl.ptx` for all steps, or None. A DataError names lines that are not conversations.

    Args:
        ptx: the section `rl.ptx`.
        prompts: the prompts, for their tokenizer and chat template.
        vocab_size: the model's number of tokens.
        train: the section `train`, for steps and seed.
        length: number of tokens of a sequence.
        multiple: multiple to which each conversation is padded.
    """
    if not ptx.coeff:
        return None
    num_sequences = train.steps * ptx.sequences
    if ptx.tokens:
        data = DataConfig(train=ptx.tokens, split=(1.0, 0.0, 0.0), seq_length=length)
        counts = SampleCounts(train=num_sequences, valid=0, test=0)
        plan = plan_data(data, vocab_size=vocab_size, samples=counts)
        return TextSource(packed=None, plan=plan)
    form = SFTDataConfig(train=ptx.files, seq_length=length, too_long="skip")
    packing = PackingOptions(
        row_length=length,
        length_multiple=multiple,
        buffer=form.pack_buffer,
        seed=train.seed,
        pad_id=prompts.tokenizer.eod_id,
    )
    packed = PackedSequences(read_examples(ptx.files, form, prompts.chat), packing, num_sequences)
    return TextSource(packed=packed, plan=None)


def load_texts(rl: RlConfig, seed: int, run: Run, source: TextSource | None, vocab_size: int) -> Texts | None:
    """Collective over the world: return the part that mixes texts into updates; None without texts."""
    if source is None:
        return None
    if source.packed is not None:
        examples = source.packed.examples
        counts = f"{len(examples)} conversations, {examples.num_skipped} too long and left out"
        for line in (f"rl.ptx: {counts}", *examples.notes):
            run.log.message(line)
        dataset: SampleDataset = source.packed
    else:
        assert source.plan is not None
        for text in source.plan.sources:
            run.log.message(f"rl.ptx: {text.describe(source.plan.samples.train)}")
        cache = run.folder.path / "index_cache"
        dataset = build_datasets(source.plan, seed=seed, cache_dir=cache).train
    return Texts(dataset, rl.ptx, run.state, vocab_size=vocab_size, chunk_tokens=rl.loss.logprob_chunk_tokens)


def sources_of_teachers(
    distill: DistillConfig, prompts: Prompts, source_of: Callable[[str], TeacherSource]
) -> list[TeacherSource | None]:
    """Return the models in `rl.distill`, after all checks that need no weights; None stands for an earlier version of
    the policy. `source_of` returns the model of a checkpoint.

    Raises:
        ConfigError: if a checkpoint is not a language model with the policy's vocabulary, or does not fit the mesh.
        DataError: if it was trained with another tokenizer, or a prompt names a missing teacher.
    """
    if distill.paths:
        refuse_prompts_without_teacher(prompts.train, distill)
    return [None if path == SELF else source_of(path) for path in distill.paths]


def teacher_source(
    named: str, policy: ModelConfig, mesh: MeshConfig, longest_sample: int, packed_length: int, tokenizer: Tokenizer
) -> TeacherSource:
    """Return the model of a teacher's checkpoint, like `sources_of_teachers`."""
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
    distill: DistillConfig,
    run: Run,
    sources: Sequence[TeacherSource | None],
    logprobs: LogprobHead,
    updates_per_rollout: int,
) -> Teachers | None:
    """Collective over the world: return the run's teachers; None without teachers."""
    if not sources:
        return None
    state, config, step = run.state, run.state.config, run.state.progress.step
    teachers: list[FrozenModel | Reference] = []
    for source in sources:
        if source is not None:
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
            continue
        folder = run.folder.path / "teacher"
        earlier = Reference(
            state.chunks,
            state.mesh,
            config.model,
            folder,
            run.folder.checkpoints,
            needed_by='rl.distill.teacher="self"',
            store=distill.store,
            allowed=config.checkpoint.allow_changes,
            shares_base=config.lora.is_on,
            base=run.checkpoints.base,
        )
        if step == 0:
            earlier.set(0)
        else:
            run.log.message(f"teacher: {earlier.resume(step)}")
        teachers.append(earlier)
    return Teachers(teachers, distill, logprobs, state, updates_per_rollout=updates_per_rollout)


def load_critic(config: RlRunConfig, run: Run) -> Critic | None:
    """Collective over the world: return the run's critic, with weights from rl.advantage.critic.load or the policy at
    step 0, and from the checkpoint later; None without a critic.
    """
    state = run.state.critic
    if state is None or config.critic is None:
        return None
    critic = Critic(
        state,
        run.state,
        config.critic,
        config.checkpoint,
        critic_routes(state, config.rl, config.replay, config.critic),
        epochs=config.critic_epochs,
        updates_per_rollout=config.updates_per_rollout,
    )
    if run.state.progress.step == 0:
        run.log.message(critic.begin(run.state.chunks))
    return critic


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
