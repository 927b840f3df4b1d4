"""Checks that the settings of a reinforcement-learning run are compatible, beyond the section `rl`."""

from collections.abc import Iterator

from mcore_rl.checks.engine import engine_violations
from mcore_rl.checks.mesh import unequal_length_violations
from mcore_rl.checks.model import replay_violations, unused
from mcore_rl.checks.rl import completion_field, rl_violations
from mcore_rl.checks.run import (
    chat_violations,
    offload_violations,
    precision_violations,
    refuse,
    run_violations,
    schedule_violations,
)
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig, OptimConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl.loss import CriticConfig, GaeAdvantage, PtxConfig
from mcore_rl.config.rl.rollout import MIN_TEMPERATURE, EngineConfig, EvalConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.run import PlatformConfig, TrainConfig
from mcore_rl.config.section import Store

MAX_DISTANCE = 100_000


def check_rl(config: RlRunConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    length_field = (
        f"rl.prompts.max_tokens + {completion_field(config.rl).removeprefix('rl.rollout.')}"
        if config.rl.update.max_tokens_per_microbatch == "auto"
        else "rl.update.max_tokens_per_microbatch"
    )
    refuse(
        [
            *run_violations(config, world_size, config.packed_length, length_field),
            *unequal_length_violations(config.model, config.mesh),
            *rl_violations(config.rl),
            *engine_violations(config),
            *replay_violations(config.replay, config.model),
            *chat_violations(config.data.tokenizer, config.data.chat_template, "prompts"),
            *_lengths(config.rl, config.packed_length, config.longest_sample, config.model.max_position),
            *_batches(config.rl, config.rollout_size, config.train),
            *_intervals(config.train, config.checkpoint.interval, config.updates_per_rollout, config.rollout_size),
            *_critic(config.critic, config.platform, config.critic_steps, config.train, config.updates_per_rollout),
            *_stores("optim", config.optim, "rl.update.store", config.update_store),
            *_stores(
                "rl.advantage.critic.optim", config.critic_optim, "rl.advantage.critic.store", config.critic_store
            ),
            *_texts(config.mesh, config.rl.ptx, world_size),
            *_layers(config.platform, config.rl.engine),
            *_model(config.model, config.mesh),
            *_routers(config.model, config.rl, config.replay, config.lora),
            *_evaluation(config.rl.eval, config.rl.prompts.task),
        ]
    )


def _lengths(rl: RlConfig, packed_length: int, longest: int, max_position: int) -> Iterator[str]:
    max_tokens = rl.update.max_tokens_per_microbatch
    if longest > max_position:
        yield (
            f"rl.prompts.max_tokens={rl.prompts.max_tokens} + {completion_field(rl)}="
            f"{rl.max_completion_tokens} are more than model.max_position={max_position}. "
            "Shorten one of them."
        )
    elif max_tokens != "auto" and packed_length < longest:
        yield (
            f"rl.update.max_tokens_per_microbatch={max_tokens} holds no rl.prompts.max_tokens="
            f"{rl.prompts.max_tokens} with {completion_field(rl)}={rl.max_completion_tokens}. "
            f"Raise it to {longest} or more, or shorten them."
        )


def _batches(rl: RlConfig, rollout_size: int, train: TrainConfig) -> Iterator[str]:
    rollout, size = rl.rollout, rollout_size
    if size % train.global_batch:
        near = _nearest_divisor(size, train.global_batch)
        yield (
            f"train.global_batch={train.global_batch} does not divide the {size} completions of a rollout batch "
            f"(rl.rollout.prompts_per_step={rollout.prompts_per_step} x group_size={rollout.group_size}). Use {near}."
        )
    loss = rl.loss
    if loss.kl_target is not None and loss.kl_horizon < size:
        yield (
            f"rl.loss.kl_horizon={loss.kl_horizon} is shorter than the {size} completions of a rollout batch, so that "
            f"kl_coeff would change by more than a fifth at a time. Set it to {size} or more (10000)."
        )
    if train.micro_batch != 1:
        yield (
            f"train.micro_batch={train.micro_batch} is not used: completions are packed into forward passes of "
            "rl.update.max_tokens_per_microbatch. Set it to 1, and that to what fits in memory."
        )
    no_growth = "reinforcement learning, whose batch does not grow"
    yield from unused("train", train, (True, "ramp_start ramp_increment ramp_samples", no_growth))


def _nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor of `size` nearest to `wanted`, the smaller of two; 1 if a huge size has none nearby."""
    start = min(size, wanted)
    for distance in range(min(start, MAX_DISTANCE)):
        for batch in (start - distance, start + distance):
            if size % batch == 0:
                return batch
    return 1


def _intervals(train: TrainConfig, save_interval: int | None, updates: int, rollout_size: int) -> Iterator[str]:
    """Check that intervals are whole rollout batches: a run saves, evaluates and ends only between them."""
    if not updates:
        return  # _batches reports it
    fields = {
        "train.steps": train.steps,
        "train.eval_interval": train.eval_interval,
        "checkpoint.interval": save_interval,
    }
    for name, steps in fields.items():
        if steps is not None and steps % updates:
            yield (
                f"{name}={steps} is not a multiple of the {updates} optimizer steps of a rollout batch (its "
                f"{rollout_size} completions x rl.update.epochs / train.global_batch={train.global_batch}). Use "
                f"{steps - steps % updates + updates}."
            )


def _stores(section: str, optim: OptimConfig | None, field: str, store: Store) -> Iterator[str]:
    """Check that an optimizer with state in main memory is not asked to leave the device."""
    if optim is not None and optim.offload_fraction and store != "device":
        yield (
            f'{field}="{store}" with {section}.offload_fraction={optim.offload_fraction:g}, whose state is in main '
            "memory all the time. Set one of them to its default."
        )


def _critic(
    critic: CriticConfig | None, platform: PlatformConfig, critic_steps: int, train: TrainConfig, updates: int
) -> Iterator[str]:
    """Check the critic's own schedule, and that its warm-up leaves steps to the policy."""
    if critic is None or not updates:
        return
    if critic.warmup_rollouts * updates >= train.steps:
        yield (
            f"rl.advantage.critic.warmup_rollouts={critic.warmup_rollouts} are all of train.steps="
            f"{train.steps}, of which a rollout batch takes {updates}: the policy would not be trained. Lower "
            "it, or raise train.steps."
        )
    yield from offload_violations(critic.optim, platform, "rl.advantage.critic.optim")
    yield from precision_violations(critic.optim, platform, "rl.advantage.critic.optim")
    yield from schedule_violations(
        critic.optim,
        critic_steps,
        "rl.advantage.critic.optim",
        "the critic's steps (train.steps, rl.advantage.critic.epochs)",
    )


def _texts(mesh: MeshConfig, ptx: PtxConfig, world_size: int) -> Iterator[str]:
    """Check that the texts mixed into updates are divided evenly over the ranks and the pipeline."""
    replicas = max(1, world_size // mesh.model_parallel)
    unit = replicas * (mesh.pp if mesh.vpp > 1 else 1)
    if ptx.coeff and ptx.sequences % unit:
        pipeline = f" and mesh.pp={mesh.pp} with mesh.vpp={mesh.vpp}" if mesh.vpp > 1 else ""
        yield (
            f"rl.ptx.sequences={ptx.sequences} is not a multiple of {unit}, for {replicas} data-parallel "
            f"ranks{pipeline}. Use {-(-ptx.sequences // unit) * unit}."
        )


def _layers(platform: PlatformConfig, engine: EngineConfig) -> Iterator[str]:
    if platform.layers == "te" and not engine.is_served:
        yield (
            'platform.layers="te": the rollout engine in this process runs on our layers, and a policy that trains on '
            'others would not be the one that sampled. Set platform.layers="torch", or rl.engine.kind="vllm".'
        )


def _model(model: ModelConfig, mesh: MeshConfig) -> Iterator[str]:
    for name in ("attention_dropout", "hidden_dropout"):
        if rate := getattr(model, name):
            yield (
                f"model.{name}={rate}: the policy in training would not be the one that sampled, whose ratios to it "
                "are measured. Set it to 0."
            )
    depth = model.mtp_layers
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if depth and mesh.pp > 1 and getattr(mesh, name) is True:
            yield (
                f"mesh.{name}=true with mesh.pp={mesh.pp} and model.mtp_layers={depth}, which reinforcement learning "
                "does not train: the reduction would wait for a gradient of their copy of the embedding. Set it to "
                '"auto", or import the weights with --mtp drop and set model.mtp_layers=0.'
            )


def _routers(model: ModelConfig, rl: RlConfig, replay: ReplayConfig, lora: LoraConfig) -> Iterator[str]:
    """Check what is trained, replayed and recorded of routers."""
    moe = model.moe
    if model.is_moe and moe.capacity_factor and replay.kind == "none":
        yield (
            f'model.moe.capacity_factor={moe.capacity_factor} with replay.kind="none": each training pass would drop '
            "other tokens than the pass for old logprobs, and the ratios would measure that. Set capacity_factor=none, "
            'or replay.kind="r2" with rl.update.old_logprobs="trainer", which imposes what that pass dropped.'
        )
    if rl.freeze_router and not model.is_moe:
        yield "rl.freeze_router=true, but the model has no experts. Set it to false."
    losses = {"aux_loss_coeff": moe.aux_loss_coeff if moe.balance != "none" else 0.0, "z_loss_coeff": moe.z_loss_coeff}
    if (rl.freeze_router or lora.is_on) and model.is_moe and any(losses.values()):
        named = ", ".join(f"model.moe.{name}={value}" for name, value in losses.items() if value)
        frozen = "rl.freeze_router=true" if rl.freeze_router else f"lora.rank={lora.rank}"
        yield (
            f"{frozen} with {named}: a loss on routers that do not learn would move the layers below them "
            "instead. Set it to 0."
        )
    if replay.kind == "r2" and rl.update.old_logprobs == "rollout":
        yield (
            'replay.kind="r2" with rl.update.old_logprobs="rollout": the routes to replay are recorded in the '
            'trainer\'s pass for old logprobs, which this omits. Set old_logprobs="trainer", or replay.kind="r3".'
        )
    if rl.loss.uses_router_shift and not model.is_moe:
        yield (
            f'rl.loss.kind="{rl.loss.kind}" with the router-shift ratio, but the model has no experts, and no '
            'router whose scores could move. Set rl.loss.kind="grpo", and router_shift=false.'
        )
    if isinstance(rl.advantage, GaeAdvantage) and rl.advantage.critic.replay != "none" and not model.is_moe:
        yield 'rl.advantage.critic.replay="r2", but the model has no experts. Set it to "none".'


def _evaluation(evaluation: EvalConfig, task: str) -> Iterator[str]:
    made = f'rl.prompts.task="{task}", whose held-out problems are made'
    yield from unused("rl.eval", evaluation, (task != "file", "files", made))
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield (
            f"rl.eval.samples={evaluation.samples} at rl.eval.temperature=0 are all the same. Set samples to 1, "
            "or a temperature."
        )
    if 0 < evaluation.temperature < MIN_TEMPERATURE:
        yield (
            f"rl.eval.temperature={evaluation.temperature} is below {MIN_TEMPERATURE}. Set it to 0, which takes "
            "the likeliest token."
        )
