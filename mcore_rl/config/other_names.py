"""Settings of other systems with the corresponding fields: the table of docs/algorithms.md, and the settings that every
run has. Names were read in these projects' public sources in November 2026.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from mcore_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalent:
    """Our fields for a setting, and its names in other systems."""

    fields: tuple[str, ...]
    """Our keys; keys that a training does not have are left out of an answer about it. Without any the setting is not
    offered, and the note says why.
    """
    verl: tuple[str, ...] = ()
    slime: tuple[str, ...] = ()
    trl: tuple[str, ...] = ()
    nemo_rl: tuple[str, ...] = ()
    openrlhf: tuple[str, ...] = ()
    megatron: tuple[str, ...] = ()
    note: str = ""
    """A sentence on a difference between the two systems."""
    is_same: bool = True
    """Whether the fields in SAME_VALUE take the value of the setting unchanged."""

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """All names, each with its system."""
        of_systems = (
            ("TRL", self.trl),
            ("verl", self.verl),
            ("slime", self.slime),
            ("NeMo-RL", self.nemo_rl),
            ("OpenRLHF", self.openrlhf),
            ("Megatron-LM", self.megatron),
        )
        return tuple((system, name) for system, names in of_systems for name in names)


COMPLETIONS = "It counts the completions of one update; a step is an update."
EQUIVALENTS: tuple[Equivalent, ...] = (
    Equivalent(
        fields=("rl.rollout.prompts_per_step",),
        megatron=("grpo_prompts_per_step",),
        verl=("data.train_batch_size",),
        slime=("rollout_batch_size",),
        nemo_rl=("grpo.num_prompts_per_step",),
        openrlhf=("rollout_batch_size",),
    ),
    Equivalent(
        fields=("rl.rollout.prompts_per_step",),
        trl=("generation_batch_size",),
        note="It counts prompts, not completions.",
        is_same=False,
    ),
    Equivalent(
        fields=("rl.rollout.group_size",),
        megatron=("grpo_group_size",),
        verl=("actor_rollout_ref.rollout.n",),
        slime=("n_samples_per_prompt",),
        trl=("num_generations",),
        nemo_rl=("grpo.num_generations_per_prompt",),
        openrlhf=("n_samples_per_prompt",),
    ),
    Equivalent(
        fields=("train.global_batch",),
        verl=("actor_rollout_ref.actor.ppo_mini_batch_size",),
        megatron=("global_batch_size",),
        nemo_rl=("policy.train_global_batch_size",),
        openrlhf=("train_batch_size",),
        note=COMPLETIONS,
    ),
    Equivalent(
        fields=("train.global_batch", "train.micro_batch"),
        verl=("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",),
        trl=("per_device_train_batch_size", "gradient_accumulation_steps"),
        nemo_rl=("policy.train_micro_batch_size",),
        openrlhf=("micro_train_batch_size",),
        note="train.global_batch is the batch of all GPUs; accumulation follows from it.",
    ),
    Equivalent(
        fields=("rl.update.epochs",),
        megatron=("grpo_iterations",),
        verl=("actor_rollout_ref.actor.ppo_epochs",),
        trl=("num_iterations",),
        openrlhf=("max_epochs",),
    ),
    Equivalent(
        fields=("rl.update.max_tokens_per_microbatch",),
        megatron=("rl_use_sequence_packing",),
        verl=("actor_rollout_ref.actor.ppo_max_token_len_per_gpu",),
        slime=("max_tokens_per_gpu",),
        nemo_rl=("policy.sequence_packing",),
    ),
    Equivalent(
        fields=("rl.rollout.max_new_tokens",),
        verl=("data.max_response_length",),
        slime=("rollout_max_response_len",),
        trl=("max_completion_length",),
        nemo_rl=("policy.generation.max_new_tokens",),
        openrlhf=("generate_max_len",),
    ),
    Equivalent(
        fields=("rl.rollout.temperature",),
        megatron=("rl_default_temperature",),
        verl=("actor_rollout_ref.rollout.temperature",),
        slime=("rollout_temperature",),
        trl=("temperature",),
        nemo_rl=("policy.generation.temperature",),
        openrlhf=("temperature",),
        note="Training and sampling use the same temperature.",
    ),
    Equivalent(
        fields=("rl.rollout.top_p",), verl=("actor_rollout_ref.rollout.top_p",), slime=("rollout_top_p",)
    ),
    Equivalent(
        fields=("rl.rollout.top_k",), verl=("actor_rollout_ref.rollout.top_k",), slime=("rollout_top_k",)
    ),
    Equivalent(
        fields=("rl.prompts.max_tokens",),
        verl=("data.max_prompt_length",),
        slime=("rollout_max_prompt_len",),
        trl=("max_prompt_length",),
        openrlhf=("prompt_max_len",),
    ),
    Equivalent(
        fields=("rl.loss.kind",),
        verl=("actor_rollout_ref.actor.policy_loss.loss_mode",),
        trl=("importance_sampling_level",),
        nemo_rl=("loss_fn.sequence_level_importance_ratios",),
    ),
    Equivalent(
        fields=("rl.loss.kind", "rl.advantage.kind"),
        verl=("algorithm.adv_estimator",),
        slime=("advantage_estimator",),
        openrlhf=("advantage_estimator",),
    ),
    Equivalent(
        fields=("rl.loss.clip_low", "rl.loss.clip_high"),
        megatron=("grpo_clamp_eps_lower", "grpo_clamp_eps_upper"),
        verl=("actor_rollout_ref.actor.clip_ratio",),
        slime=("eps_clip",),
        trl=("epsilon",),
        nemo_rl=("loss_fn.ratio_clip_min",),
        openrlhf=("eps_clip",),
    ),
    Equivalent(fields=("rl.loss.clip_low",), verl=("clip_ratio_low",)),
    Equivalent(
        fields=("rl.loss.clip_high",),
        verl=("clip_ratio_high",),
        slime=("eps_clip_high",),
        trl=("epsilon_high",),
        nemo_rl=("ratio_clip_max",),
        note="It is relative: the bound is 1 + clip_high.",
    ),
    Equivalent(
        fields=("rl.loss.dual_clip",),
        verl=("clip_ratio_c",),
        slime=("eps_clip_c",),
        trl=("delta",),
        nemo_rl=("loss_fn.ratio_clip_c",),
        openrlhf=("dual_clip",),
    ),
    Equivalent(
        fields=("rl.loss.kl_coeff", "rl.loss.kl_in"),
        verl=("use_kl_loss", "kl_loss_coef", "algorithm.kl_ctrl.kl_coef"),
        slime=("use_kl_loss", "kl_loss_coef"),
        nemo_rl=("loss_fn.reference_policy_kl_penalty",),
        openrlhf=("init_kl_coef", "use_kl_loss"),
    ),
    Equivalent(fields=("rl.loss.kl_coeff", "dpo.beta"), trl=("beta",), megatron=("grpo_kl_beta",)),
    Equivalent(fields=("rl.loss.kl_in",), verl=("algorithm.use_kl_in_reward",), slime=("kl_coef",)),
    Equivalent(
        fields=("rl.loss.kl_estimator",),
        verl=("kl_loss_type",),
        slime=("kl_loss_type",),
        nemo_rl=("reference_policy_kl_type",),
        openrlhf=("kl_estimator",),
    ),
    Equivalent(
        fields=("rl.loss.entropy_coeff",),
        megatron=("grpo_entropy_term_weight",),
        verl=("actor_rollout_ref.actor.entropy_coeff",),
        slime=("entropy_coef",),
        openrlhf=("entropy_loss_coef",),
    ),
    Equivalent(
        fields=("rl.loss.reference_refresh_rollouts",),
        slime=("ref_update_interval",),
        trl=("sync_ref_model", "ref_model_sync_steps"),
    ),
    Equivalent(
        fields=("rl.loss.aggregation",),
        verl=("loss_agg_mode",),
        slime=("calculate_per_token_loss",),
        nemo_rl=("loss_fn.token_level_loss",),
    ),
    Equivalent(fields=("rl.loss.aggregation", "dpo.loss"), trl=("loss_type",)),
    Equivalent(
        fields=("rl.advantage.kind",),
        verl=("norm_adv_by_std_in_grpo",),
        slime=("disable_grpo_std_normalization",),
        trl=("scale_rewards",),
        nemo_rl=("grpo.normalize_rewards",),
    ),
    Equivalent(
        fields=("rl.rollout.dynamic_sampling",),
        megatron=("grpo_filter_groups_with_same_reward",),
        verl=("algorithm.filter_groups.enable",),
        slime=("dynamic_sampling_filter_path",),
        nemo_rl=("grpo.use_dynamic_sampling",),
        openrlhf=("dynamic_filtering",),
    ),
    Equivalent(
        fields=("rl.reward.overlong_buffer_tokens",),
        verl=("overlong_buffer.len",),
        nemo_rl=("grpo.reward_shaping",),
    ),
    Equivalent(
        fields=("rl.loss.mask_truncated",),
        trl=("mask_truncated_completions",),
        nemo_rl=("grpo.overlong_filtering",),
    ),
    Equivalent(
        fields=("rl.loss.importance_sampling", "rl.loss.importance_sampling_high"),
        megatron=("rl_importance_sampling_truncation_coef",),
        slime=("use_tis", "tis_clip"),
        trl=("vllm_importance_sampling_correction", "vllm_importance_sampling_cap"),
        nemo_rl=("truncated_importance_sampling_ratio",),
    ),
    Equivalent(
        fields=("replay.kind",),
        verl=("router_replay.mode",),
        slime=("use_routing_replay", "use_rollout_routing_replay"),
    ),
    Equivalent(
        fields=("rl.reward.parts",),
        verl=("custom_reward_function.path",),
        slime=("custom_rm_path",),
        trl=("reward_funcs",),
        openrlhf=("remote_rm_url",),
    ),
    Equivalent(
        fields=("rl.engine.tensor_parallel",),
        verl=("rollout.tensor_model_parallel_size",),
        slime=("rollout_num_gpus_per_engine",),
        trl=("vllm_tensor_parallel_size",),
        openrlhf=("vllm_tensor_parallel_size",),
    ),
    Equivalent(
        fields=("rl.prompts.files", "data.train"),
        verl=("data.train_files",),
        slime=("prompt_data",),
        trl=("dataset_name",),
        openrlhf=("prompt_data",),
    ),
    Equivalent(
        fields=("rl.prompts.prompt_field", "data.messages_field"),
        verl=("data.prompt_key",),
        slime=("input_key",),
        trl=("dataset_text_field",),
        openrlhf=("input_key",),
    ),
    Equivalent(
        fields=("rl.prompts.answer_field",),
        slime=("label_key",),
        openrlhf=("label_key",),
    ),
    Equivalent(
        fields=("optim.lr",),
        verl=("actor_rollout_ref.actor.optim.lr",),
        trl=("learning_rate",),
        nemo_rl=("policy.optimizer.kwargs.lr",),
        openrlhf=("actor_learning_rate", "learning_rate"),
    ),
    Equivalent(
        fields=("rl.advantage.critic.optim.lr",),
        verl=("critic.optim.lr",),
        openrlhf=("critic_learning_rate",),
    ),
    Equivalent(fields=("optim.schedule",), trl=("lr_scheduler_type",), openrlhf=("lr_scheduler",)),
    Equivalent(
        fields=("optim.warmup_steps",),
        verl=("actor.optim.lr_warmup_steps",),
        trl=("warmup_steps", "warmup_ratio"),
        openrlhf=("lr_warmup_ratio",),
        note="It is a number of steps.",
    ),
    Equivalent(fields=("optim.weight_decay",), verl=("actor.optim.weight_decay",)),
    Equivalent(
        fields=("optim.clip_grad",),
        verl=("actor_rollout_ref.actor.grad_clip",),
        trl=("max_grad_norm",),
        nemo_rl=("policy.max_grad_norm",),
        openrlhf=("max_norm",),
    ),
    Equivalent(
        fields=("train.steps",),
        verl=("trainer.total_training_steps", "trainer.total_epochs"),
        slime=("num_rollout",),
        trl=("max_steps", "num_train_epochs"),
        nemo_rl=("grpo.max_num_steps",),
        openrlhf=("num_episodes",),
        note="A step is an update of the weights, not a rollout or an epoch.",
    ),
    Equivalent(
        fields=("checkpoint.interval",),
        verl=("trainer.save_freq",),
        slime=("save_interval",),
        trl=("save_steps",),
        nemo_rl=("checkpointing.save_period",),
        openrlhf=("save_steps",),
    ),
    Equivalent(
        fields=("train.eval_interval",),
        verl=("trainer.test_freq",),
        trl=("eval_steps",),
        nemo_rl=("grpo.val_period",),
        openrlhf=("eval_steps",),
    ),
    Equivalent(
        fields=("run_dir",),
        verl=("trainer.default_local_dir",),
        trl=("output_dir",),
        nemo_rl=("checkpointing.checkpoint_dir",),
        openrlhf=("save_path",),
    ),
    Equivalent(
        fields=("model.path",),
        verl=("actor_rollout_ref.model.path",),
        slime=("hf_checkpoint",),
        trl=("model_name_or_path",),
        nemo_rl=("policy.model_name",),
        openrlhf=("pretrain",),
    ),
    Equivalent(fields=("data.seq_length",), trl=("max_seq_length", "max_length"), openrlhf=("max_len",)),
    Equivalent(
        fields=("mesh.tp",),
        verl=("actor.megatron.tensor_model_parallel_size",),
        megatron=("tensor_model_parallel_size",),
        nemo_rl=("megatron_cfg.tensor_model_parallel_size",),
    ),
    Equivalent(
        fields=("mesh.pp",),
        verl=("actor.megatron.pipeline_model_parallel_size",),
        megatron=("pipeline_model_parallel_size",),
        nemo_rl=("megatron_cfg.pipeline_model_parallel_size",),
    ),
    Equivalent(
        fields=("mesh.ep",),
        verl=("actor.megatron.expert_model_parallel_size",),
        megatron=("expert_model_parallel_size",),
        nemo_rl=("megatron_cfg.expert_model_parallel_size",),
    ),
    Equivalent(
        fields=("mesh.cp",),
        verl=("actor.megatron.context_parallel_size",),
        megatron=("context_parallel_size",),
        nemo_rl=("megatron_cfg.context_parallel_size",),
    ),
    Equivalent(
        fields=("log.project",),
        verl=("trainer.project_name",),
        slime=("wandb_project",),
        nemo_rl=("logger.wandb.project",),
        openrlhf=("wandb_project",),
    ),
    Equivalent(
        fields=("log.name",),
        verl=("trainer.experiment_name",),
        trl=("run_name",),
        nemo_rl=("logger.wandb.name",),
        openrlhf=("wandb_run_name",),
    ),
    Equivalent(
        fields=("log.sinks",),
        verl=("trainer.logger",),
        slime=("use_wandb",),
        trl=("report_to",),
        nemo_rl=("logger.wandb_enabled", "logger.tensorboard_enabled", "logger.mlflow_enabled"),
        openrlhf=("use_wandb",),
        note="The console and metrics.jsonl are written in any case.",
    ),
    Equivalent(fields=("lora.rank",), verl=("model.lora_rank",), trl=("lora_r",), openrlhf=("lora_rank",)),
    Equivalent(
        fields=("lora.alpha",), verl=("model.lora_alpha",), trl=("lora_alpha",), openrlhf=("lora_alpha",)
    ),
    Equivalent(fields=("lora.rslora",), trl=("use_rslora",)),
    Equivalent(
        fields=("lora.targets",),
        verl=("model.target_modules",),
        trl=("lora_target_modules",),
        openrlhf=("target_modules",),
        note="Kinds of modules are named, each with all of its projections.",
    ),
    Equivalent(fields=("lora.targets", "lora.expert_gate_up"), trl=("lora_target_parameters",)),
    Equivalent(fields=("lora.load",), verl=("model.lora_adapter_path",)),
    Equivalent(
        fields=(),
        verl=("model.lora.dropout",),
        trl=("lora_dropout",),
        openrlhf=("lora_dropout",),
        note="A mask on the input of each adapter would keep a second copy of that input for the backward pass, which "
        "no plan counts, peft refuses it for routed experts, and reinforcement learning has no dropout. Leave it out; "
        "against overfitting lower lora.rank, or set optim.weight_decay.",
    ),
)
TRAINED_TOGETHER = "Kinds of modules are named here, each with all of its projections: "
VALUE_NOTES: dict[str, dict[str, str]] = {
    "lora.targets": {
        **dict.fromkeys(
            ("lm_head", "output_layer", "embed_tokens", "word_embeddings", "embedding"),
            "The output layer and the embedding get no adapters: the losses read the output layer's weight outside of "
            "its own pass, and vLLM leaves its adapter out of the logprobs of prompts, by which servers are verified. "
            'Train the layers, or the whole model (lora.rank="none").',
        ),
        **dict.fromkeys(
            ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "linear_qkv", "linear_proj"),
            f'{TRAINED_TOGETHER}"attention".',
        ),
        **dict.fromkeys(
            ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "linear_fc1", "linear_fc2"),
            f'{TRAINED_TOGETHER}"mlp" in dense layers, "shared_experts", "experts".',
        ),
        **dict.fromkeys(("all-linear", "all"), 'These are the layers\' matrices: lora.targets="auto".'),
        **dict.fromkeys(("router", "gate"), "Routers are frozen with the base."),
    }
}
"""Key -> item of its value in other systems -> what stands for it here, or why nothing does, and what to do."""
SAME_VALUE = frozenset(
    {
        *("rl.rollout.prompts_per_step", "rl.rollout.group_size", "rl.rollout.max_new_tokens"),
        *("rl.rollout.temperature", "rl.rollout.top_p", "rl.rollout.top_k", "rl.prompts.max_tokens"),
        *("rl.update.epochs", "rl.update.max_tokens_per_microbatch"),
        *("rl.loss.clip_low", "rl.loss.clip_high", "rl.loss.dual_clip", "rl.loss.entropy_coeff"),
        *("rl.loss.mask_truncated", "rl.loss.kl_coeff", "dpo.beta", "rl.rollout.dynamic_sampling"),
        *("rl.engine.tensor_parallel", "rl.prompts.answer_field"),
        *("optim.lr", "rl.advantage.critic.optim.lr", "optim.weight_decay", "optim.clip_grad"),
        *("run_dir", "model.path", "data.seq_length"),
        *("mesh.tp", "mesh.pp", "mesh.ep", "mesh.cp", "lora.rank", "log.project", "log.name"),
    }
)
"""Fields that take the values of the corresponding settings unchanged, if the type fits."""
SIGNS: tuple[tuple[str, str], ...] = (
    ("verl", r"\bactor_rollout_ref\b|\bdata\.train_batch_size\b|\bppo_mini_batch_size\b"),
    ("NeMo-RL", r"\bnum_prompts_per_step\b|\bloss_fn\b|\bmegatron_cfg\b"),
    ("OpenRLHF", r"\b(actor_learning_rate|init_kl_coef|actor_num_gpus_per_node|micro_rollout_batch_size)\b"),
    ("slime", r"\b(rollout|n|num)[-_](samples[-_]per[-_]prompt|batch[-_]size|rollout|function[-_]path)\b"),
    ("TRL", r"\b(per_device_train_batch_size|num_generations|model_name_or_path|lr_scheduler_type)\b"),
)
"""Words that occur only in configs of a system; the first system that matches decides."""


def equivalent_named(key: str, fields: Collection[str]) -> tuple[str, Equivalent, tuple[str, ...]] | None:
    """Return the system that has the setting `key`, its row, and the row's fields that are in `fields`.

    The longest match decides; among equally long matches, a complete name. A key may end in a name, as `rl.temperature`
    in TRL's `temperature`, or be the end of a name, as `actor.ppo_epochs`, if it has two parts or an underscore, unlike
    `lr`, `n` or `path`.
    """
    found: tuple[tuple[int, bool], str, Equivalent, tuple[str, ...]] | None = None
    wanted = _parts(key)
    for row in EQUIVALENTS:
        ours = tuple(field for field in row.fields if field in fields)
        for system, name in row.named if ours or not row.fields else ():
            parts = _parts(name)
            shared = min(len(parts), len(wanted))
            if len(wanted) < len(parts) and shared == 1 and "_" not in wanted[0]:
                continue
            rank = shared, shared == len(parts)
            if parts[-shared:] == wanted[-shared:] and (found is None or rank > found[0]):
                found = rank, system, row, ours
    return found and found[1:]


def setting_named(key: str, fields: Collection[str], system: str | None) -> Equivalent | None:
    """Return the row of the setting with the whole dotted name `key` in a config of `system`; None is any system.

    The longest matching name decides. Returns None if no field in `fields` corresponds to the setting.
    """
    wanted = _parts(key)
    found = [
        (len(parts), -len(row.fields), row)
        for row in EQUIVALENTS
        for of, name in row.named
        if system in (None, of) and any(field in fields for field in row.fields)
        if wanted[-len(parts := _parts(name)) :] == parts
    ]
    return max(found, key=lambda match: match[:2])[2] if found else None


def system_of(text: str) -> str | None:
    """Return the system of a config in YAML or JSON, by words that only its configs have; None if unknown."""
    return next((system for system, sign in SIGNS if re.search(sign, text)), None)


def refuse_foreign_config(path: str, text: str) -> None:
    """Raise a ConfigError if the file is a config in YAML or JSON; the message names the system that it is from."""
    is_json, is_yaml = text.lstrip().startswith("{"), path.lower().endswith((".yaml", ".yml"))
    if not (is_json or is_yaml or path.lower().endswith(".json")):
        return
    system = system_of(text)
    form = "YAML" if is_yaml else "JSON"
    whose = f"a config of {system}, in {form}" if system else f"{form}"
    raise ConfigError(
        f"{path} is {whose}; configs here are TOML. `mcore-rl init --from {path}` writes what can be said of it as "
        "TOML, and lists the rest; or begin with a recipe (`mcore-rl recipes`), and set on it what differs: a key of "
        'the other system is answered with ours, and "What others call it" in docs/algorithms.md lists them.'
    )


def _parts(name: str) -> list[str]:
    return name.lstrip("-+").replace("-", "_").split(".")
