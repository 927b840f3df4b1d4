"""Models with TransformerEngine's layers, on a CPU: every family is built, saved, loaded and converted.

What is shown here is all that happens to weights; forward passes need a GPU (make gpu).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.checks.mesh import mesh_violations
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.families import te_violations, weight_map
from tests.conversion import assert_same, exported, imported, read_dist, read_hf, saved
from tests.hf_models import oracle
from tests.hf_weights import to_global
from tests.parallel.checkpointing import config_of, run
from tests.parallel.test_converted_checkpoints import CASES
from tests.ranks import run_ranks
from tests.te.layers import attentions, described, exchanged, passed_on, resaved, settings_of
from tests.tiny_models import TINY

MESHES = {"1": MeshConfig(), "tp2": MeshConfig(tp=2), "ep2": MeshConfig(ep=2, dp=2), "pp2": MeshConfig(pp=2)}
REFUSED = {name: f"{name} norms the queries and the keys of all heads at once" for name in ("minimax_m2", "olmoe")}
REFUSED |= {name: f"{name} has gated delta nets" for name in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")}
REFUSED |= {name: f"{name} attends to keys that an indexer chooses" for name in ("deepseek_v32", "glm_moe_dsa")}
"""Families that TransformerEngine's layers cannot compute, and the message."""
MODELS = TINY | {
    "deepseek_v3 with MTP": TINY["deepseek_v3"].model_copy(update={"mtp_layers": 1}),
    "qwen3_moe with scores": TINY["qwen3_moe"].scored,
    "deepseek_v3 with another epsilon of the latents": TINY["deepseek_v3"].model_copy(update={"norm_eps": 1e-5}),
}
"""Models by name; the last one is refused."""
BUILT = [name for name in MODELS if name not in REFUSED and "epsilon" not in name]


@pytest.fixture(scope="module")
def layers() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_ranks(described, 1, MODELS)[0]
    return found


@pytest.mark.parametrize("name", BUILT)
def test_weights_of_both_kinds_of_layers_have_the_names_and_shapes_of_the_familys_rules(
    name: str, layers: dict[str, dict[str, Any]]
) -> None:
    ours, theirs = layers[name]["torch"], layers[name]["te"]
    assert theirs["shards"] == ours["shards"] and theirs["bytes"] == ours["bytes"]
    if MODELS[name].head == "logits":
        shapes = {key: shape for key, (shape, _) in theirs["shards"].items()}
        assert shapes == weight_map(MODELS[name]).mcore_shapes
    assert not ours["modules"]
    assert {"RMSNorm", "LayerNormLinear", "Linear"} <= theirs["modules"]
    assert ("GroupedLinear" in theirs["modules"]) == MODELS[name].is_moe
    assert "DotProductAttention" in theirs["modules"]


@pytest.mark.parametrize(
    ("name", "message"), [*REFUSED.items(), (list(MODELS)[-1], "model.mla.norm_eps=1e-06 and model.norm_eps=1e-05")]
)
def test_what_its_layers_cannot_compute_is_refused(name: str, message: str, layers: dict[str, dict[str, Any]]) -> None:
    assert message in layers[name]["te"] and 'Set platform.layers="torch"' in layers[name]["te"]
    assert layers[name]["torch"]["shards"]


@pytest.mark.parametrize("mesh", MESHES)
def test_checkpoints_of_either_kind_of_layers_are_loaded_by_the_other_bit_for_bit(mesh: str, tmp_path: Path) -> None:
    config = MESHES[mesh]
    cases = {
        name: (MODELS[name], settings_of("te"), random_tensors(MODELS[name]))
        for name in BUILT
        if MODELS[name].head == "logits" and fits(MODELS[name], config)
    }
    assert len(cases) >= (6 if mesh == "ep2" else 11)
    cases["in bf16"] = (MODELS["qwen3_moe"], settings_of("te", "bf16"), random_tensors(MODELS["qwen3_moe"]))
    ranks = run_ranks(exchanged, config.smallest_world, config, cases, tmp_path)
    assert all(rank[name] > 10 for rank in ranks for name in cases)
    for name in cases:
        ours, theirs = (read_dist(tmp_path / name / layers / "iter_0000000") for layers in ("torch", "te"))
        assert_same(theirs, ours)


def fits(model: ModelConfig, mesh: MeshConfig) -> bool:
    return (mesh.ep == 1 or model.is_moe) and not list(mesh_violations(model, mesh, seq_length=32))


def random_tensors(model: ModelConfig) -> dict[str, Tensor]:
    """Global tensors of Megatron's, without a number that bf16 would round."""
    generator = torch.Generator().manual_seed(5)
    shapes = weight_map(model).mcore_shapes
    return {key: torch.randn(shape, generator=generator).bfloat16().float() for key, shape in shapes.items()}


@pytest.mark.parametrize("mesh", ["1", "tp2-ep2", "pp2-vpp2"])
def test_a_conversion_passes_through_its_layers_bit_for_bit(mesh: str, tmp_path: Path) -> None:
    """Hugging Face's tensors are imported, loaded, saved and exported again; and streamed, as to a server."""
    config = {"1": MeshConfig(), "tp2-ep2": MeshConfig(tp=2, ep=2), "pp2-vpp2": MeshConfig(pp=2, vpp=2)}[mesh]
    sources, checkpoints = {}, {}
    for case, changes in CASES.items():
        options = changes | {"vocab_size": 1003}
        if case in ("deepseek_v3", "deepseek_v2", "glm4_moe_lite"):
            options |= {"rms_norm_eps": 1e-6}  # the norms of the latents have it too
        theirs = oracle(case, **options)
        if case in REFUSED or not fits(theirs.ours, config):
            continue
        sources[case] = saved(case, tmp_path / case / "hf", **options)
        path = imported(sources[case], tmp_path / case / "imported")
        checkpoints[case] = (theirs.ours, path, to_global(theirs.tensors, theirs.ours))
    assert len(checkpoints) >= (7 if config.ep > 1 else 10)
    ranks = run_ranks(passed_on, config.smallest_world, config, checkpoints, tmp_path / "passed on")
    for case, source in sources.items():
        assert_same(read_dist(tmp_path / "passed on" / case / "iter_0000000"), read_dist(checkpoints[case][1]))
        wanted = read_hf(source)
        back = exported(tmp_path / "passed on" / case / "iter_0000000", tmp_path / case / "back")
        assert_same(read_hf(back), wanted)
        streamed = ranks[0][case]
        if checkpoints[case][0].tied_embeddings:
            assert torch.equal(streamed.pop("lm_head.weight"), wanted["model.embed_tokens.weight"])
        assert_same(streamed, wanted)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_goes_on_bit_equal_from_a_state_that_its_layers_have_loaded_and_saved(mesh: str, tmp_path: Path) -> None:
    """Weights, main weights and moments of the optimizer: a run of ours stops, and resumes from the other's save."""
    model = TINY["deepseek_v3"] if mesh != "tp2" else TINY["qwen3_moe"]
    model = model.model_copy(update={"norm_eps": 1e-6})

    def config(name: str, layers: str, load: str | None) -> Any:
        made = config_of(tmp_path / name, model, MESHES[mesh], "bf16", load=load)
        kernels = {"layers": layers, "products": "mkl", "attention": "sdpa", "compiled": False}
        # TransformerEngine's clipping of gradients needs a GPU.
        changes = {
            "platform": made.platform.model_copy(update=kernels),
            "optim": made.optim.model_copy(update={"clip_grad": None}),
        }
        return made.model_copy(update=changes)

    whole = run(config("ours", "torch", None), until=4, save_at=[2])
    loaded = run_ranks(resaved, MESHES[mesh].smallest_world, config("theirs", "te", str(tmp_path / "ours")))[0]
    assert Path(loaded).name == "iter_0000002"
    resumed = run(config("back", "torch", str(tmp_path / "theirs")), until=4)
    assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("cp", [1, 2])
def test_its_own_rules_have_an_attention_for_what_is_not_refused_and_none_for_what_is(cp: int, precision: Any) -> None:
    mesh, settings = MeshConfig(cp=cp), settings_of("te", precision)
    models = {name: model for name, model in MODELS.items() if name not in REFUSED and "epsilon" not in name}
    models["gpt_oss without a window"] = TINY["gpt_oss"].model_copy(update={"sliding_window": None})
    found = run_ranks(attentions, 1, models, cp, precision)[0]
    same = {"norm_eps": 1e-6}
    wanted = {
        name: not any(te_violations(model.model_copy(update=same), mesh, settings)) for name, model in models.items()
    }
    assert found == wanted and len(set(wanted.values())) == (1 if cp == 1 or precision == "fp32" else 2)
