"""What is wrong with a run of preference optimisation is found before it starts."""

from pathlib import Path

import pytest

from mcore_rl.checks.inputs import absent_inputs, inputs_of
from mcore_rl.checks.preferences import check_dpo
from mcore_rl.config.load import load_config
from mcore_rl.config.preferences import DPOConfig
from mcore_rl.errors import ConfigError


def config_of(*overrides: str) -> DPOConfig:
    return load_config(DPOConfig, Path("tiny_moe/dpo"), ["mesh.tp=1", "mesh.ep=1", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dpo.loss=robust"], 'dpo.loss="robust" with dpo.label_smoothing=0'),
        (["dpo.loss=simpo", "dpo.reference=a"], 'dpo.reference="a" is not used with dpo.loss="simpo"'),
        (["dpo.loss=orpo", "dpo.length_normalised=false"], 'dpo.length_normalised=false with dpo.loss="orpo"'),
        (["dpo.loss=ipo", "dpo.target_margin=0.5"], 'dpo.target_margin=0.5 with dpo.loss="ipo"'),
        (["dpo.loss=orpo", "dpo.margin_coeff=1.0"], 'dpo.margin_coeff=1.0 with dpo.loss="orpo"'),
        (["dpo.margin_coeff=1.0", "data.margin_field=none"], 'with data.margin_field="none"'),
        (["model.mtp_layers=1"], "model.mtp_layers=1: preferences train no multi-token prediction"),
        (["train.micro_batch=2"], "train.micro_batch=2 is not used"),
        (["data.tokens_per_microbatch=128"], "does not hold two answers of data.seq_length=128"),
        (["data.train=[]"], "data.train is empty"),
        (["model.moe.dispatcher=allgather", "mesh.ep=2", "mesh.dp=2"], "sequences of different lengths"),
    ],
)
def test_settings_that_do_not_agree_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_dpo(config_of(*overrides), 1)
    assert message in str(raised.value)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "simpo", "orpo"])
def test_every_loss_runs_with_its_defaults_on_any_number_of_ranks(loss: str) -> None:
    for ranks in (1, 3, 8):
        check_dpo(config_of(f"dpo.loss={loss}"), ranks)


def test_a_reference_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = config_of(f"dpo.reference={tmp_path}/sft", f"run_dir={tmp_path}/run")
    (sentence,) = (text for text in absent_inputs(inputs_of(config)) if "dpo.reference" in text)
    assert f"dpo.reference names the checkpoint {tmp_path}/sft, which does not exist" in sentence
