"""Checks that the settings of preference optimisation are compatible."""

from collections.abc import Iterator

from mcore_rl.checks.preferences import preference_violations
from mcore_rl.checks.run import refuse
from mcore_rl.config.dpo import DPOConfig, DPOSection
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.preferences import PreferenceDataConfig


def check_dpo(config: DPOConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    refuse(
        [
            *preference_violations(config, world_size),
            *_adapters(config.lora),
            *_loss(config.dpo, config.data.margin_field),
            *_model(config.model),
            *_data(config.data),
        ]
    )


def _data(data: PreferenceDataConfig) -> Iterator[str]:
    if data.has_steps:
        yield (
            'data.format="steps": labels of steps are for a process reward model (`mcore-rl rm`). Set it to "auto", '
            "and name files of pairs."
        )


def _adapters(lora: LoraConfig) -> Iterator[str]:
    if lora.is_on and lora.load is not None:
        yield (
            f'lora.load="{lora.load}" with `mcore-rl dpo`: the reference of a run that resumes would be the weights '
            "without these adapters. Merge them first (peft: merge_and_unload), and import the result."
        )


def _loss(dpo: DPOSection, margin_field: str | None) -> Iterator[str]:
    named = f'dpo.loss="{dpo.loss}"'
    if dpo.loss == "robust" and not dpo.label_smoothing:
        yield (
            f"{named} with dpo.label_smoothing=0: it undoes labels that are wrong with this probability. Set it, or "
            'dpo.loss="sigmoid".'
        )
    if not dpo.uses_reference and dpo.reference is not None:
        yield f'dpo.reference="{dpo.reference}" is not used with {named}. Set it to "none", or another loss.'
    if dpo.loss == "orpo" and not dpo.is_length_normalised:
        yield (
            f"dpo.length_normalised=false with {named}: the odds are of the mean probability of a token. Set it to "
            '"auto".'
        )
    for name in ("target_margin", "margin_coeff"):
        if dpo.loss in ("ipo", "orpo") and getattr(dpo, name):
            yield (
                f"dpo.{name}={getattr(dpo, name)} with {named}, which is no function of a difference of rewards with a "
                "margin. Set it to 0, or another loss."
            )
    if dpo.margin_coeff and margin_field is None:
        yield (
            f'dpo.margin_coeff={dpo.margin_coeff} with data.margin_field="none": pairs have no margins. Name the '
            "field, or set the factor to 0."
        )


def _model(model: ModelConfig) -> Iterator[str]:
    if model.mtp_layers:
        yield (
            f"model.mtp_layers={model.mtp_layers}: preferences train no multi-token prediction. Set it to 0; "
            "`mcore-rl convert import --mtp drop` and `relayout` leave the layers out."
        )
