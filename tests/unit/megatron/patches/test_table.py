"""Every patch has a reason and an end, and is applied where its cause is given."""

import importlib

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.megatron.patches.table import PATCHES, SUPPORTED, patches_for
from mcore_rl.storage.checkpoint import megatron_version

WITHOUT_TE = {"CheckpointWithoutOutput.__init__", "te_general_gemm"}


def symbols(version: str = SUPPORTED[0], *, cuda: bool, te: bool, apex: bool = False) -> set[str]:
    return {patch.symbol for patch in patches_for(version, has_cuda=cuda, has_te=te, has_apex=apex)}


def test_every_patch_has_a_reason_an_end_and_known_versions() -> None:
    for patch in PATCHES:
        assert patch.reason and patch.until, patch.symbol
        assert patch.versions and set(patch.versions) <= set(SUPPORTED), patch.symbol


def test_no_symbol_is_replaced_twice_in_one_version() -> None:
    for version in SUPPORTED:
        applied = [patch.symbol for patch in PATCHES if version in patch.versions]
        assert len(applied) == len(set(applied))


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.17 is installed; this code knows 0\.16 and 0\.19"):
        patches_for("0.17", has_cuda=True, has_te=True, has_apex=True)


def test_with_cuda_and_transformer_engine_only_faults_of_the_version_are_patched() -> None:
    for version in SUPPORTED:
        wanted = {p.symbol for p in PATCHES if p.cause == "version" and version in p.versions}
        assert symbols(version, cuda=True, te=True) == wanted


def test_what_transformer_engine_lacks_is_patched_on_gpus_too() -> None:
    gained = symbols(cuda=True, te=False) - symbols(cuda=True, te=True)
    assert {symbol.partition(":")[2] for symbol in gained} >= WITHOUT_TE
    assert not any(symbol.startswith("torch") for symbol in gained)
    assert "megatron.core.optimizer:Adam" in gained
    assert "megatron.core.optimizer:Adam" not in symbols(cuda=True, te=False, apex=True)


def test_the_patches_of_this_machine_are_in_place() -> None:
    here = patches_for(megatron_version(), has_cuda=False, has_te=False, has_apex=False)
    for patch in here:
        module, _, path = patch.symbol.partition(":")
        owner = importlib.import_module(module)
        for name in path.split("."):
            owner = getattr(owner, name)
    assert any(patch.symbol.endswith("GPTModel._preprocess") for patch in here)
