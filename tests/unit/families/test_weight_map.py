"""Every element of both sides is paired exactly once, and the Megatron side is what Megatron's model has."""

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable

import pytest
import torch

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families import family_named, weight_map
from mcore_rl.families.weight_map import (
    AxisRange,
    Region,
    WeightBlock,
    WeightMap,
    composed,
    copies_into_hf,
    copies_into_megatron,
    covered_otherwise_than_once,
    overlap,
    sizes,
)
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model, local_shards
from tests.hf_models import PUBLISHED
from tests.tiny_models import TINY

PARAMETERS = {
    "DeepSeek-V3": (684.5, 1),  # 671, and 14 of MTP of which the two embeddings are shared (arXiv 2412.19437)
    "DeepSeek-V2-Lite": (15.7, 0),
    "dots.llm1": (142.8, 0),
    "GLM-4.5-Air": (106.8, 0),
    "gpt-oss-20b": (20.9, 0),
    "MiniMax-M2": (228.7, 0),
    "OLMoE-1B-7B": (6.92, 0),
    "Qwen1.5-MoE-A2.7B": (14.3, 0),
    "Qwen3-Next-80B-A3B": (81.3, 1),
    "Seed-OSS-36B": (36.15, 0),
}
"""By the name of a published model, its billions of parameters with a number of MTP layers."""


def variants() -> dict[str, ModelConfig]:
    """Each family tiny, and with awkward sizes."""
    found = {}
    for name, tiny in TINY.items():
        found[name] = tiny
        dense = 0 if name == "gpt_oss" else 2
        experts = {"num_experts": 7, "first_dense_layers": dense, "num_groups": None, "top_groups": None}
        moe = tiny.moe.model_copy(update=experts) if tiny.is_moe else tiny.moe
        heads = 9 if family_named(name).is_latent else 3
        odd = {"vocab_size": 1003, "num_heads": 9, "num_kv_heads": heads, "head_dim": 24, "moe": moe}
        found[f"{name}-awkward"] = tiny.model_copy(update=odd | {"tied_embeddings": not tiny.tied_embeddings})
    deepseek = found["deepseek_v3"]
    found["deepseek_v3-mtp"] = deepseek.model_copy(update={"mtp_layers": 2})
    found["glm_moe_dsa-mtp"] = found["glm_moe_dsa"].model_copy(update={"mtp_layers": 1})
    moe = deepseek.moe.model_copy(update={"first_dense_layers": 0})
    mla = deepseek.mla.model_copy(update={"q_lora_rank": None})
    found["deepseek_v3-alike"] = deepseek.model_copy(update={"moe": moe, "mla": mla})
    return found


VARIANTS = variants()


@pytest.mark.parametrize("layout", ["each", "fused"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_element_is_paired_exactly_once(variant: str, layout: str) -> None:
    weight_map(VARIANTS[variant], layout).prove()


@pytest.mark.matrix("OLMoE-1B-7B", "DeepSeek-V2-Lite")
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_maps_of_published_models_have_their_published_number_of_parameters(name: str) -> None:
    billions, mtp_layers = PARAMETERS[name]
    model = checked_model_from_hf(PUBLISHED[name]).model_copy(update={"mtp_layers": mtp_layers})
    weights = weight_map(model)
    elements = sum(torch.Size(shape).numel() for shape in weights.hf_shapes.values())
    assert elements / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.full
def test_the_map_of_deepseek_v3_is_proved_from_its_config_alone() -> None:
    weight_map(checked_model_from_hf(PUBLISHED["DeepSeek-V3"])).prove()


@pytest.mark.parametrize("variant", VARIANTS)
def test_global_tensors_are_those_of_the_megatron_model(variant: str, one_rank: Mesh) -> None:
    model = VARIANTS[variant]
    settings = PlatformConfig()
    chunks = build_model(model, one_rank, start(settings), settings)
    weights = weight_map(model)
    assert {shard.key: shard.global_shape for shard in local_shards(chunks)} == weights.mcore_shapes
    fp32 = {shard.key for shard in local_shards(chunks) if shard.key.endswith("expert_bias")}
    assert weights.fp32_keys == fp32


def with_first_wider(weights: WeightMap, rows: int) -> Iterable[WeightBlock]:
    first, *rest = weights.blocks
    span, *spans = first.hf_where
    return [dataclasses.replace(first, hf_where=(AxisRange(0, span.stop + rows), *spans)), *rest]


def with_gates_taken_twice(weights: WeightMap) -> Iterable[WeightBlock]:
    """Take the rows of the gate of one expert for those of the up-projection too, with which they alternate."""
    for block in weights.blocks:
        is_changed = block.hf_name == GATE_UP and block.hf_where[0].start == 3
        columns = AxisRange(0, 96, 2) if is_changed else block.hf_where[-1]
        yield dataclasses.replace(block, hf_where=(*block.hf_where[:-1], columns))


EMBEDDING, GATE_UP = r"model\.embed_tokens\.weight", "model.layers.1.mlp.experts.gate_up_proj"
BROKEN: dict[str, tuple[str, Callable[[WeightMap], Iterable[WeightBlock]], str]] = {
    "dropped": ("qwen3_moe", lambda weights: weights.blocks[1:], EMBEDDING),
    "doubled": ("qwen3_moe", lambda weights: [weights.blocks[0], *weights.blocks], EMBEDDING),
    "narrowed": ("qwen3_moe", lambda weights: with_first_wider(weights, -1), EMBEDDING),
    "too wide": ("qwen3_moe", lambda weights: with_first_wider(weights, 1), EMBEDDING),
    "rows in steps taken twice": (
        *("gpt_oss", with_gates_taken_twice),
        rf"{GATE_UP} \[3:4, 0:64, 1:96:2\] is used 0 times",
    ),
    "not transposed": (
        "gpt_oss",
        lambda weights: (dataclasses.replace(block, transposed=False) for block in weights.blocks),
        r"gate_up_proj \[0:1, 0:64, 0:96:2\] and .*fc1.weight differ in shape",
    ),
}
"""Name of a mistake: the model, its blocks with the mistake, and the message."""


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_map_is_refused_with_the_tensors_name(mistake: str) -> None:
    variant, change, message = BROKEN[mistake]
    weights = weight_map(VARIANTS[variant])
    with pytest.raises(CheckpointError, match=message):
        dataclasses.replace(weights, blocks=tuple(change(weights))).prove()


def test_padding_that_is_forgotten_is_found() -> None:
    weights = dataclasses.replace(weight_map(VARIANTS["llama"]), padding=())
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight \[120:128, 0:64\] is written 0 times"):
        weights.prove()


def test_coverage_agrees_with_counting_cells() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        shape = tuple(torch.randint(1, 6, (3,), generator=generator).tolist())
        places = [random_place(shape, generator) for _ in range(int(torch.randint(0, 4, (), generator=generator)))]
        cells = torch.zeros(shape, dtype=torch.int)
        for place in places:
            cells[as_slices(place)] += 1
        found = torch.ones(shape, dtype=torch.int)
        for where, times in covered_otherwise_than_once(shape, places):
            assert times != 1
            found[as_slices(where)] = times
        assert torch.equal(found, cells)


def random_place(shape: tuple[int, ...], generator: torch.Generator) -> Region:
    def any_of(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    spans = [list(itertools.combinations(range(size + 1), 2)) for size in shape]
    return tuple(AxisRange(*pairs[any_of(len(pairs))], step=1 + any_of(3)) for pairs in spans)


def as_slices(where: Region) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in where)


def test_a_window_is_compared_with_the_copies_in_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a push and the copies that a check composes grow with layers x experts, not with its square."""
    qwen = TINY["qwen3_moe"]
    model = qwen.model_copy(update={"num_layers": 6, "moe": qwen.moe.model_copy(update={"num_experts": 40})})
    weights = weight_map(model)
    num_compared = 0

    def counted(region: Region, window: Region) -> bool:
        nonlocal num_compared
        num_compared += 1
        return overlap(region, window)

    monkeypatch.setattr(sys.modules["mcore_rl.families.weight_map"], "overlap", counted)
    through = copies_into_megatron(weights.blocks)
    composites = {name: composed(copies, through) for name, copies in copies_into_hf(weights.blocks).items()}
    assert {name: sum(math.prod(sizes(part.into)) for part in parts) for name, parts in composites.items()} == {
        name: math.prod(shape) for name, shape in weights.hf_shapes.items()
    }
    assert num_compared <= 3 * len(weights.blocks)
