"""Whole models whose kernels Triton's interpreter computes, beside the same models by torch."""

import pytest
import torch

from mcore_rl.backend import platform
from mcore_rl.backend.gpu import experts, logprobs, routing
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.parallel.mesh import destroy_mesh
from mcore_rl.train import setup
from mcore_rl.train.objectives import NextTokenHead
from mcore_rl.train.step import train_step
from tests.parallel import parity
from tests.tiny_models import TINY


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    # The interpreter's time is one for each block, however large.
    monkeypatch.setitem(logprobs.TILES, 4, logprobs.TILES[4]._replace(rows=256, columns=256, depth=64))
    for tiles in (experts.TILES, experts.PRODUCT_TILES):
        monkeypatch.setitem(tiles, 4, tiles[4]._replace(rows=64, columns=64, depth=64))
    yield
    platform.stop()


def one_step(model, mtp, names, **settings):
    """Loss and gradient norm of a step on one micro-batch, from the same seed."""
    destroy_mesh()
    of_platform = PlatformConfig(layers="torch", triton_kernels=names, **settings)
    config = parity.config_of(
        TINY[model].model_copy(update={"mtp_layers": mtp, "num_layers": 2}), MeshConfig(), of_platform
    )
    state = setup.set_up(config, platform.start(of_platform))
    report = train_step(state, parity.batch(state, 0)[:1], NextTokenHead())
    return report.loss, report.grad_norm


@pytest.mark.parametrize(("model", "mtp", "names"), [("deepseek_v3", 1, ("logprobs", "routing", "experts"))])
def test_training_by_kernels_is_training_by_torch(model, mtp, names, monkeypatch):
    """Pretraining with multi-token prediction: two losses over the vocabulary; an expert bias with groups.

    Sums are in another order: 1e-5.
    """
    used = set()
    for module, helper in ((logprobs, "_dense"), (routing, "_chooser"), (experts, "_weight_gradient")):
        original = getattr(module, helper)
        monkeypatch.setattr(module, helper, lambda *args, f=original: used.add(f) or f(*args))
    by_kernels = one_step(model, mtp, names)
    assert {function.__module__.rpartition(".")[2] for function in used} == set(names)
    by_torch = one_step(model, mtp, (), logits_chunk_tokens=32)
    torch.testing.assert_close(by_kernels, by_torch, rtol=1e-5, atol=0)
