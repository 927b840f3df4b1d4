"""Checks that the settings of fine-tuning, of reward models and of preference optimisation are compatible."""

from collections.abc import Iterator

from mcore_rl.checks.mesh import unequal_length_violations
from mcore_rl.checks.model import unused
from mcore_rl.checks.run import batch_violations, chat_violations, refuse, run_violations, weight_violations
from mcore_rl.config.preferences import DPOConfig, DPOSection, PreferenceRunConfig, RewardModelConfig
from mcore_rl.config.sft import SFTConfig


def check_sft(config: SFTConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    data = config.data
    no_data = 'data.train is empty. Name files of JSON lines with "messages", or "prompt" and "response".'
    refuse(
        [
            *run_violations(config, world_size, data.seq_length, "data.seq_length"),
            *batch_violations(config.train, config.mesh, world_size),
            *([] if data.train else [no_data]),
            *weight_violations("data.train_weights", data.train_weights, "data.train", data.train),
            *chat_violations(data.tokenizer, data.chat_template, "conversations"),
        ]
    )


def preference_violations(config: PreferenceRunConfig, world_size: int) -> Iterator[str]:
    """Yield a sentence for each reason, apart from its loss, why the training cannot run."""
    data = config.data
    is_auto = data.tokens_per_microbatch == "auto"
    field = "2 x data.seq_length" if is_auto else "data.tokens_per_microbatch"
    yield from run_violations(config, world_size, config.packed_length, field)
    yield from unequal_length_violations(config.model, config.mesh)
    if not data.train:
        yield (
            'data.train is empty. Name files of JSON lines with "prompt", "chosen" and "rejected", or rankings with '
            '"responses".'
        )
    yield from weight_violations("data.train_weights", data.train_weights, "data.train", data.train)
    yield from chat_violations(data.tokenizer, data.chat_template, "preferences")
    max_position = config.model.max_position
    if data.seq_length > max_position:
        yield f"data.seq_length={data.seq_length} is more than model.max_position={max_position}. Shorten it."
    if data.tokens_per_microbatch != "auto" and data.tokens_per_microbatch < 2 * data.seq_length:
        yield (
            f"data.tokens_per_microbatch={data.tokens_per_microbatch} does not hold two answers of data.seq_length="
            f"{data.seq_length}, and both sides of a pair share a forward pass. Raise it to {2 * data.seq_length} or "
            "more, or shorten data.seq_length."
        )
    packed = "pairs, which are packed up to data.tokens_per_microbatch"
    yield from unused("train", config.train, (True, "micro_batch", packed))


def check_dpo(config: DPOConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    refuse([*preference_violations(config, world_size), *_inputs(config), *_loss(config.dpo, config.data.margin_field)])


def _inputs(config: DPOConfig) -> Iterator[str]:
    model, lora = config.model, config.lora
    if lora.is_on and lora.load is not None:
        yield (
            f'lora.load="{lora.load}" with `mcore-rl dpo`: the reference of a run that resumes would be the weights '
            "without these adapters. Merge them first (peft: merge_and_unload), and import the result."
        )
    if model.mtp_layers:
        yield (
            f"model.mtp_layers={model.mtp_layers}: preferences train no multi-token prediction. Set it to 0; "
            "`mcore-rl convert import --mtp drop` and `relayout` leave the layers out."
        )
    if config.data.has_steps:
        yield (
            'data.format="steps": labels of steps are for a process reward model (`mcore-rl rm`). Set it to "auto", '
            "and name files of pairs."
        )


def _loss(dpo: DPOSection, margin_field: str | None) -> Iterator[str]:
    named = f'dpo.loss="{dpo.loss}"'
    if dpo.loss == "robust" and not dpo.label_smoothing:
        yield (
            f"{named} with dpo.label_smoothing=0: it undoes labels that are wrong with this probability. Set it, or "
            'dpo.loss="sigmoid".'
        )
    if dpo.loss == "orpo" and not dpo.is_length_normalised:
        yield (
            f"dpo.length_normalised=false with {named}: the odds are of the mean probability of a token. Set it to "
            '"auto".'
        )
    yield from unused(
        "dpo",
        dpo,
        (not dpo.uses_reference, "reference", named),
        (dpo.loss in ("ipo", "orpo"), "target_margin margin_coeff", f"{named}, of which a margin is no part"),
        (margin_field is None, "margin_coeff", 'data.margin_field="none"'),
    )


def check_rm(config: RewardModelConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    rm, has_steps = config.rm, config.data.has_steps
    cause = 'data.format="steps", in which no answer is chosen, and labels fix the mean of the scores'
    rules = ((has_steps and rm.shift == "chosen", "shift", cause), (has_steps, "centering_coeff", cause))
    refuse([*preference_violations(config, world_size), *unused("rm", rm, *rules)])
