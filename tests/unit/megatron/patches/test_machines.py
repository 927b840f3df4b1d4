"""Every combination of CUDA, TransformerEngine and apex gets its patches, and trains to the numbers of a plain CPU.

The machines are emulated (tests/emulated_machine.py says how far), each in a process of its own. TransformerEngine's
layers cannot compute there: machines with CUDA and TransformerEngine are only looked at, and train nothing.
"""

import json
from typing import Any

import pytest

from mcore_rl.families import FAMILIES
from tests import emulated_runs
from tests.emulated_machine import emulated

LENGTHS_OF_EXPERTS = {"token_dispatcher.py:_maybe_dtoh_and_synchronize": 1.0}
"""Without TransformerEngine's permutation Megatron's dispatcher reads on the host how many tokens each expert gets."""
CUDA, TE, APEX = "cuda", "te", "apex"
MACHINES = [
    "+".join(name for name, is_there in zip((CUDA, TE, APEX), bits, strict=True) if is_there) or "none"
    for bits in [(c, t, a) for c in (0, 1) for t in (0, 1) for a in (0, 1)]
]


@pytest.fixture(scope="module")
def on_this_cpu() -> Any:
    return emulated_runs.train()


@pytest.mark.full
@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_gets_the_patches_of_what_it_lacks(machine: str, on_this_cpu: dict[str, Any]) -> None:
    has = set(machine.split("+"))
    trains = not {CUDA, TE} <= has
    done = emulated(machine, "train" if trains else "examine")
    assert done.returncode == 0, done.stderr[-3000:]
    trained = json.loads(done.stdout.splitlines()[-1])
    patched = set(trained["patches"])
    usable = has & {TE, APEX} if CUDA in has else set()
    assert ("torch.cuda:current_device" in patched) == (CUDA not in has)
    assert ("megatron.core.transformer.moe.moe_utils:te_general_gemm" in patched) == (TE not in usable)
    for symbol in ("megatron.core.optimizer:Adam", "megatron.core.optimizer.clip_grads:l2_norm_impl"):
        assert (symbol in patched) == (not usable)
    assert len(trained["unusable"]) == len(has & {TE, APEX} - usable)
    if CUDA in has:
        assert trained["first_call"]["connections"] == "1"
        assert trained["doctor"]["devices"] == [
            {"name": "emulated GPU", "capability": "9.0", "memory_gib": 140.0, "free_gib": 139.0}
        ]
        assert trained["doctor"]["faults"] == []
        lacks = [entry["what"].partition(" ")[0] for entry in trained["doctor"]["missing"]]
        assert ("TransformerEngine" in lacks) == (TE not in usable)
        assert trained["doctor"]["speed"] == {
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "overlap_shared_experts": False,
            "permute_fusion": TE in usable,
            "router_fusion": TE in usable,
            "cross_entropy_fusion": "native" if TE in usable else "none",
            "weight_gradient_fusion": {TE, APEX} <= usable,
            "fp8_recipe": "blockwise" if TE in usable else "none",
            "gc_interval": 100,
        }
        if TE in usable:
            assert trained["megatron"] == {
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "hybridep",
                "fp8": "hybrid",
                "fp8_recipe": "blockwise",
                "moe_permute_fusion": True,
                "moe_router_fusion": True,
                "cross_entropy_loss_fusion": True,
                "cross_entropy_fusion_impl": "native",
                "gradient_accumulation_fusion": APEX in usable,
                "apply_rope_fusion": True,
                # The kernel for packed sequences has no factor on queries and keys.
                "apply_rope_fusion with YaRN": False,
                "bias_activation_fusion": True,
                "bias_dropout_fusion": True,
            }
        assert "deep_ep" in lacks
    if not trains:
        return
    # Other kernels: grouped_mm, torch's attention and norm where CUDA is. Differences are rounding.
    for ours, theirs in ((trained, on_this_cpu), (trained["dispatched"], on_this_cpu["dispatched"])):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=1e-5)
    if CUDA not in has:
        assert trained["losses"] == on_this_cpu["losses"]
        assert trained["syncs"] == {}
    elif not usable:
        # A rank with all experts sorts its tokens by itself.
        assert waits_of_a_layer(trained["waits"]["local"]) == {}
        assert waits_of_a_layer(trained["waits"]["dispatched"]) == LENGTHS_OF_EXPERTS


def waits_of_a_layer(trained: dict[str, Any]) -> dict[str, float]:
    """How often a layer of experts waits for the device in a microbatch; nothing else may, but once a step."""
    times = trained["microbatches"] * trained["moe_layers"]
    places = {
        place: count
        for place, count in trained["syncs"].items()
        if place.partition(":")[2] not in emulated_runs.OF_THE_STEP
    }
    assert sum(trained["syncs"].values()) - sum(places.values()) <= 6
    return {place: count / times for place, count in places.items()}


@pytest.mark.matrix()
@pytest.mark.parametrize("machine", [CUDA])
def test_every_familys_logits_on_cuda_are_those_of_transformers(machine: str) -> None:
    done = emulated(machine, "tests.emulated_bench:families")
    assert done.returncode == 0, done.stderr[-3000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert differences.keys() == FAMILIES.keys()
    # Gated delta nets amplify rounding; tests/unit/model/test_gradients_equal_transformers.py compares them in fp64.
    amplified = {name for name in differences if name.startswith(("qwen3_next", "qwen3_5"))}
    assert max(differences[name] for name in amplified) <= 1e-4
    assert max(differences[name] for name in differences.keys() - amplified) <= 2e-5


@pytest.mark.full
@pytest.mark.parametrize("machine", ["cuda+broken-te"])
def test_a_transformer_engine_that_cannot_be_imported_is_refused_by_its_error(machine: str) -> None:
    done = emulated(machine, "train")
    assert done.returncode != 0
    assert "import transformer_engine.pytorch: ImportError" in done.stderr
    assert 'or set platform.layers="torch" to train with this package' in done.stderr


@pytest.mark.matrix()
@pytest.mark.parametrize("machine", ["broken-te", "other-apex", "cuda+other-apex"])
def test_packages_that_cannot_be_used_are_as_good_as_absent(machine: str, on_this_cpu: dict[str, Any]) -> None:
    done = emulated(machine, "train")
    assert done.returncode == 0, done.stderr[-3000:]
    trained = json.loads(done.stdout.splitlines()[-1])
    assert "megatron.core.optimizer:Adam" in trained["patches"]
    assert trained["losses"] == pytest.approx(on_this_cpu["losses"], rel=1e-6)
