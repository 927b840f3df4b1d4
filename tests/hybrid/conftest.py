"""Megatron has a HybridModel since 0.19: with 0.16 there is nothing here to test."""

from mcore_rl.storage.checkpoint import megatron_version
from tests.unit.conftest import one_rank  # noqa: F401

if megatron_version() == "0.16":
    collect_ignore_glob = ["test_*"]
