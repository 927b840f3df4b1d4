"""Checks that the settings of a reinforcement-learning run are compatible, beyond the section `rl`."""

from collections.abc import Iterator

from mcore_rl.checks.engine import engine_violations
from mcore_rl.checks.mesh import unequal_length_violations
from mcore_rl.checks.model import replay_violations, unused
from mcore_rl.checks.rl import completion_field, rl_violations
from mcore_rl.checks.run import chat_violations, muon_violations, optimizer_violations, refuse, run_violations
from mcore_rl.config.rl.rollout import MIN_TEMPERATURE, EvalConfig
from mcore_rl.config.rl_run import RlRunConfig

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
            *engine_violations(config, world_size),
            *replay_violations(config.replay, config.model),
            *chat_violations(config.data.tokenizer, config.data.chat_template, "prompts"),
            *_lengths(config),
            *_batches(config, world_size),
            *_intervals(config),
            *_optimizers(config),
            *_limits_of_time(config),
            *_layers(config),
            *_routers(config),
            *_evaluation(config.rl.eval, config.rl.prompts.task),
        ]
    )


def _lengths(config: RlRunConfig) -> Iterator[str]:
    rl, longest, max_position = config.rl, config.longest_sample, config.model.max_position
    max_tokens = rl.update.max_tokens_per_microbatch
    if longest > max_position:
        yield (
            f"rl.prompts.max_tokens={rl.prompts.max_tokens} + {completion_field(rl)}={rl.max_completion_tokens} are "
            f"more than model.max_position={max_position}. Shorten one of them."
        )
    elif max_tokens != "auto" and config.packed_length < longest:
        yield (
            f"rl.update.max_tokens_per_microbatch={max_tokens} holds no rl.prompts.max_tokens="
            f"{rl.prompts.max_tokens} with {completion_field(rl)}={rl.max_completion_tokens}. "
            f"Raise it to {longest} or more, or shorten them."
        )


def _limits_of_time(config: RlRunConfig) -> Iterator[str]:
    """Check that a server is given up before the run that waits for it counts as hung."""
    engine, train = config.served, config.train
    if engine is None:
        return
    limits = (
        ("train.hang_start_s", train.hang_start_s, "rl.engine.start_timeout_s", engine.start_timeout_s),
        ("train.hang_s", train.hang_s, "rl.engine.request_timeout_s", engine.request_timeout_s),
        ("train.hang_s", train.hang_s, "rl.engine.update_timeout_s", engine.update_timeout_s),
    )
    for name, limit_s, of_server, server_s in limits:
        if isinstance(limit_s, float) and limit_s <= server_s:
            yield (
                f"{name}={limit_s:g} is not above {of_server}={server_s:g}: a run that waits for a silent server "
                f"ends as hung before it goes on without it. Raise it, or lower {of_server}."
            )


def _batches(config: RlRunConfig, world_size: int) -> Iterator[str]:
    rollout, loss, ptx = config.rl.rollout, config.rl.loss, config.rl.ptx
    train, mesh, size = config.train, config.mesh, config.rollout_size
    if size % train.global_batch:
        near = _nearest_divisor(size, train.global_batch)
        yield (
            f"train.global_batch={train.global_batch} does not divide the {size} completions of a rollout batch "
            f"(rl.rollout.prompts_per_step={rollout.prompts_per_step} x group_size={rollout.group_size}). Use {near}."
        )
    if loss.kl_target is not None and loss.kl_horizon < size:
        yield (
            f"rl.loss.kl_horizon={loss.kl_horizon} is shorter than the {size} completions of a rollout batch, so that "
            f"kl_coeff would change by more than a fifth at a time. Set it to {size} or more (10000)."
        )
    yield from unused(
        "train",
        train,
        (True, "micro_batch", "completions, which are packed up to rl.update.max_tokens_per_microbatch"),
        (True, "ramp_start ramp_increment ramp_samples", "reinforcement learning, whose batch does not grow"),
    )
    replicas = max(1, world_size // mesh.model_parallel)
    unit = replicas * (mesh.pp if mesh.vpp > 1 else 1)
    if ptx.coeff and ptx.sequences % unit:
        pipeline = f" and mesh.pp={mesh.pp} with mesh.vpp={mesh.vpp}" if mesh.vpp > 1 else ""
        yield (
            f"rl.ptx.sequences={ptx.sequences} is not a multiple of {unit}, for {replicas} data-parallel "
            f"ranks{pipeline}. Use {-(-ptx.sequences // unit) * unit}."
        )


def _nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor of `size` nearest to `wanted`, the smaller of two; 1 if a huge size has none nearby."""
    start = min(size, wanted)
    for distance in range(min(start, MAX_DISTANCE)):
        for batch in (start - distance, start + distance):
            if size % batch == 0:
                return batch
    return 1


def _intervals(config: RlRunConfig) -> Iterator[str]:
    train, updates = config.train, config.updates_per_rollout
    fields = {
        "train.steps": train.steps,
        "train.eval_interval": train.eval_interval,
        "checkpoint.interval": config.checkpoint.interval,
    }
    for name, steps in fields.items():
        if updates and steps is not None and steps % updates:  # _batches reports a batch without updates
            yield (
                f"{name}={steps} is not a multiple of the {updates} optimizer steps of a rollout batch (its "
                f"{config.rollout_size} completions x rl.update.epochs / train.global_batch={train.global_batch}). Use "
                f"{steps - steps % updates + updates}."
            )


def _optimizers(config: RlRunConfig) -> Iterator[str]:
    updates, steps = config.updates_per_rollout, config.train.steps
    for optim, key, store, field in (
        (config.optim, "optim", config.update_store, "rl.update.store"),
        (config.critic_optim, "rl.advantage.critic.optim", config.critic_store, "rl.advantage.critic.store"),
    ):
        if optim is not None and optim.offload_fraction and store != "device":
            yield (
                f'{field}="{store}" with {key}.offload_fraction={optim.offload_fraction:g}, whose state is in main '
                "memory all the time. Set one of them to its default."
            )
    if config.critic is None or not updates:
        return
    if config.critic.warmup_rollouts * updates >= steps:
        yield (
            f"rl.advantage.critic.warmup_rollouts={config.critic.warmup_rollouts} are all of train.steps={steps}, of "
            f"which a rollout batch takes {updates}: the policy would not be trained. Lower it, or raise train.steps."
        )
    optim, key = config.critic.optim, "rl.advantage.critic.optim"
    steps_field = "the critic's steps (train.steps, rl.advantage.critic.epochs)"
    yield from optimizer_violations(optim, config.platform, config.critic_steps, key, steps_field)
    yield from muon_violations(optim, config, key)


def _layers(config: RlRunConfig) -> Iterator[str]:
    model, mesh, depth = config.model, config.mesh, config.model.mtp_layers
    if config.platform.layers == "te" and not config.rl.engine.is_served:
        yield (
            'platform.layers="te": the rollout engine in this process runs on our layers, and a policy that trains on '
            'others would not be the one that sampled. Set platform.layers="torch", or rl.engine.kind="vllm".'
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if rate := getattr(model, name):
            yield (
                f"model.{name}={rate}: the policy in training would not be the one that sampled, whose ratios to it "
                "are measured. Set it to 0."
            )
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if depth and mesh.pp > 1 and getattr(mesh, name) is True:
            yield (
                f"mesh.{name}=true with mesh.pp={mesh.pp} and model.mtp_layers={depth}, which reinforcement learning "
                "does not train: the reduction would wait for a gradient of their copy of the embedding. Set it to "
                '"auto", or import the weights with --mtp drop and set model.mtp_layers=0.'
            )


def _routers(config: RlRunConfig) -> Iterator[str]:
    model, rl, replay = config.model, config.rl, config.replay
    moe = model.moe
    if not model.is_moe:
        cause = "a model without experts"
        yield from unused("rl", rl, (True, "freeze_router", cause))
        if config.critic is not None:
            yield from unused("rl.advantage.critic", config.critic, (True, "replay", cause))
        if rl.loss.uses_router_shift:
            yield (
                f'rl.loss.kind="{rl.loss.kind}" with the router-shift ratio, but the model has no experts, and no '
                'router whose scores could move. Set rl.loss.kind="grpo", and router_shift=false.'
            )
        return
    if moe.capacity_factor and replay.kind == "none":
        yield (
            f'model.moe.capacity_factor={moe.capacity_factor} with replay.kind="none": each training pass would drop '
            "other tokens than the pass for old logprobs, and the ratios would measure that. Set capacity_factor=none, "
            'or replay.kind="r2" with rl.update.old_logprobs="trainer", which imposes what that pass dropped.'
        )
    losses = {"aux_loss_coeff": moe.aux_loss_coeff if moe.balance != "none" else 0.0, "z_loss_coeff": moe.z_loss_coeff}
    if (rl.freeze_router or config.lora.is_on) and any(losses.values()):
        named = ", ".join(f"model.moe.{name}={value}" for name, value in losses.items() if value)
        frozen = "rl.freeze_router=true" if rl.freeze_router else f"lora.rank={config.lora.rank}"
        yield (
            f"{frozen} with {named}: a loss on routers that do not learn would move the layers below them "
            "instead. Set it to 0."
        )
    if replay.kind == "r2" and rl.update.old_logprobs == "rollout":
        yield (
            'replay.kind="r2" with rl.update.old_logprobs="rollout": the routes to replay are recorded in the '
            'trainer\'s pass for old logprobs, which this omits. Set old_logprobs="trainer", or replay.kind="r3".'
        )


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
