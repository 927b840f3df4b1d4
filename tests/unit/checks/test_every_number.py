"""Whatever number stands in a field: the config is refused with an error that names the field, or can be planned."""

import math
import typing
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mcore_rl.checks.cluster import check_cluster
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.describe import FieldDoc, describe
from mcore_rl.config.kinds import KINDS
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.section import alternatives
from mcore_rl.errors import ConfigError
from mcore_rl.planning.flops import train_flops_per_token
from mcore_rl.planning.memory import memory_by_stage
from mcore_rl.planning.training import training_of

BASES = {
    "pretrain": Path("tiny_moe/pretrain"),
    "sft": Path("tiny_moe/sft"),
    "rm": Path("tiny_moe/rm"),
    "dpo": Path("tiny_moe/dpo"),
    "rl": Path("tiny_moe/grpo"),
    "study": Path("tiny_moe/replay_study"),
    "pipeline": None,
    "cluster": Path("launch/clusters/example_cpu.toml"),
}
LIMITS = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**5000]
INTEGERS = st.one_of(st.integers(-2, 70), st.integers(-(2**64), 2**64), st.sampled_from(LIMITS))
FLOATS = st.one_of(st.floats(), st.floats(0, 2), st.sampled_from([math.inf, math.nan, 5e-324, 1.8e308, -0.0]))
FEW = settings(
    max_examples=3,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""Examples of each test, each of which sets all fields, one after the other."""
MORE_RANKS_OR_SAMPLES = ("mesh.cp", "mesh.dp", "mesh.etp", "rl.rollout.prompts_per_step", "rl.rollout.group_size")
"""Fields whose error may name the product that they are a factor of: data-parallel ranks, completions."""


def is_number(annotation: object) -> bool:
    return any(
        member in (int, float) or any(map(is_number, typing.get_args(member))) for member in alternatives(annotation)
    )


@cache
def numbers(kind: str) -> list[FieldDoc]:
    """Fields of a kind with numbers; of those that all trainings share, pretraining's stand for all."""
    shared = {doc.key for doc in describe(KINDS["pretrain"])} if kind in ("sft", "rm", "dpo", "rl") else set()
    return [doc for doc in describe(KINDS[kind]) if is_number(doc.annotation) and doc.key not in shared]


def written(number: float) -> str:
    """TOML of a number; Python writes no integer of more than 4,300 digits, and a user may."""
    return f"1{'0' * 5000}" if number == 10**5000 else str(number)


def planned(kind: str, words: list[str]) -> None:
    """Do all that is done with a config before ranks start."""
    config = load_config(KINDS[kind], BASES[kind], words)
    if kind in PROGRAMS:
        program, ranks = PROGRAMS[kind], config.mesh.smallest_world
        program.check(config, ranks)
        for stage in memory_by_stage(training_of(config, ranks)):
            assert 0 < stage.permanent <= stage.total and "GiB" in stage.describe()
        assert 0 < train_flops_per_token(config.model, config.packed_length) < math.inf
    elif kind == "cluster":
        check_cluster(config)
    assert dump_config(config) == dump_config(load_config(KINDS[kind], BASES[kind], words))


@pytest.mark.matrix("integers-sft", "integers-rm", "floats-dpo", "floats-pipeline")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [INTEGERS, FLOATS], ids=["integers", "floats"])
def test_every_number_in_every_field_is_refused_by_name_or_can_be_planned(kind, values, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])

    @FEW
    @given(st.lists(values, min_size=len(numbers(kind)), max_size=len(numbers(kind))), st.booleans())
    def each_field(drawn, as_list):
        for doc, number in zip(numbers(kind), drawn, strict=True):
            text = f"[{', '.join(3 * [written(number)])}]" if as_list else written(number)
            try:
                planned(kind, [f"{doc.key}={text}"])
            except ConfigError as error:
                named = doc.key in MORE_RANKS_OR_SAMPLES or doc.key.rpartition(".")[2] in str(error)
                assert named, f"{doc.key}={text[:50]}: {error}"

    each_field()


@pytest.mark.parametrize(("layers", "fits"), [(1, True), (2, True), (4, True), (3, False), (5, False)])
def test_full_recomputation_cuts_every_chunk_into_whole_groups(layers, fits):
    """8 layers in two stages: Megatron 0.16 reads layers 3 to 6 of a stage that has 4."""
    words = ["platform.recompute=full", f"platform.recompute_layers={layers}", "model.num_layers=8", "mesh.pp=2"]
    if fits:
        planned("pretrain", words)
    else:
        with pytest.raises(ConfigError, match=f"recompute_layers={layers} does not divide .* one of 1, 2, 4"):
            planned("pretrain", words)


def test_layers_of_multi_token_prediction_are_recomputed_one_at_a_time():
    """Megatron asserts it in its forward pass."""
    words = ["platform.recompute=full", "model.family=glm4_moe", "model.mtp_layers=1"]
    planned("pretrain", words)
    with pytest.raises(ConfigError, match=r"recompute_layers=2 with model\.mtp_layers=1.* Set it to 1"):
        planned("pretrain", [*words, "platform.recompute_layers=2"])


def test_two_uneven_stages_and_none_between_them_are_refused_where_megatron_divides_by_zero():
    mesh = ["model.num_layers=6", "mesh.tp=1", "mesh.ep=1", "mesh.pp=2", "mesh.vpp=2", "mesh.last_stage_layers=4"]
    planned("pretrain", mesh)
    with pytest.raises(ConfigError, match=r"mesh\.first_stage_layers=2 and mesh\.last_stage_layers=4 with mesh\.pp=2"):
        planned("pretrain", [*mesh, "mesh.first_stage_layers=2"])
