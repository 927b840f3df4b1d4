"""Traps of Megatron that are silent: each would give a wrong number without an error."""

import math

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.model.build import copy_in, local_shards
from mcore_rl.train.step import NextTokenHead, evaluate, train_step
from tests.parallel.parity import Tensors, assembled, batch, config_of, fresh_weights, random_weights, set_up_plain
from tests.ranks import run_ranks
from tests.tiny_models import TINY

MODEL = TINY["qwen3_moe"]


@pytest.mark.matrix("tp2-etp2")
@pytest.mark.parametrize("mesh", [MeshConfig(ep=2, dp=2), MeshConfig(tp=2, etp=2)], ids=["ep2", "tp2-etp2"])
def test_ranks_start_with_different_experts(mesh: MeshConfig) -> None:
    """The random state must switch between ranks: without CUDA torch's own way to seed it does nothing."""
    ranks = run_ranks(fresh_weights, 2, config_of(MODEL, mesh))
    fc1_LEFD = assembled(ranks)["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    halves = fc1_LEFD.chunk(2, dim=1 if mesh.ep > 1 else 2)
    shared = torch.isin(halves[0].flatten(), halves[1].flatten()).float().mean().item()
    assert shared < 0.01, f"{shared:.0%} of the weights are the same on both ranks"


def test_checkpoint_names_are_those_of_transformer_engine() -> None:
    """Megatron's layers without TransformerEngine would store an MoE layer's norm under the name of a dense one's."""
    names = set(random_weights(config_of(MODEL, MeshConfig())))
    assert names == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.final_layernorm.weight",
        *(
            f"decoder.layers.{name}"
            for name in (
                "self_attention.linear_qkv.layer_norm_weight",
                "self_attention.linear_qkv.weight",
                "self_attention.q_layernorm.weight",
                "self_attention.k_layernorm.weight",
                "self_attention.linear_proj.weight",
                "pre_mlp_layernorm.weight",
                "mlp.router.weight",
                "mlp.experts.experts.linear_fc1.weight",
                "mlp.experts.experts.linear_fc2.weight",
            )
        ),
    }


def test_latent_attention_has_the_names_of_transformer_engine() -> None:
    names = set(random_weights(config_of(TINY["deepseek_v3"], MeshConfig())))
    assert {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight",
        "decoder.layers.1.mlp.router.expert_bias",
    } <= names


@pytest.mark.matrix("deepseek_v3-seq_aux_loss-tp2-ep2")
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(tp=2, ep=2)], ids=["1", "tp2-ep2"])
@pytest.mark.parametrize(("family", "balance"), [("qwen3_moe", "global_aux_loss"), ("deepseek_v3", "seq_aux_loss")])
def test_a_step_with_an_infinite_gradient_changes_nothing(family: str, balance: str, mesh: MeshConfig) -> None:
    """Neither weights nor what a model has outside its optimizer: expert biases, counts of the experts' tokens."""
    moe = TINY[family].moe.model_copy(update={"balance": balance})
    config = config_of(TINY[family].model_copy(update={"moe": moe}), mesh)
    for before, after in run_ranks(poisoned_step, mesh.smallest_world, config):
        assert before == after


def poisoned_step(config: PretrainConfig) -> tuple[object, object]:
    """On a rank: the sum of all weights, the rate and the report around a step whose gradient is not finite."""
    state = set_up_plain(config)
    train_step(state, batch(state, 0), NextTokenHead())
    hook = next(state.chunks[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    before = snapshot(state)
    report = train_step(state, batch(state, 1), NextTokenHead())
    hook.remove()
    assert report.skipped and math.isnan(report.grad_norm)
    assert state.progress.skipped_steps == 1 and state.progress.step == 2
    after = snapshot(state)
    healthy = train_step(state, batch(state, 2), NextTokenHead())
    assert not healthy.skipped and math.isfinite(healthy.loss)
    return before, after


def snapshot(state) -> object:  # type: ignore[no-untyped-def]
    """State that a skipped step must leave unchanged."""
    weights = [shard.data.double().sum().item() for shard in local_shards(state.chunks)]
    buffers = {name: tensor.tolist() for chunk in state.chunks for name, tensor in chunk.named_buffers()}
    biases = [values for name, values in buffers.items() if name.endswith("expert_bias")]
    assert bool(biases) == state.config.model.moe.expert_bias and all(map(any, biases)), "no bias has moved"
    return weights, buffers, state.schedule.num_steps, [g["step"] for g in state.optimizer.param_groups]


@pytest.mark.full
def test_evaluation_is_the_loss_before_the_step_and_leaves_no_trace() -> None:
    for mesh in (MeshConfig(), MeshConfig(pp=2, vpp=2)):
        for evaluated, again, trained in run_ranks(evaluation, mesh.smallest_world, config_of(MODEL, mesh)):
            assert evaluated == again
            assert evaluated == pytest.approx(trained, rel=1e-7)


def evaluation(config: PretrainConfig) -> tuple[float, float, float]:
    """On a rank: the loss of a batch, evaluated twice and then trained on."""
    state = set_up_plain(config)
    losses = []
    for _ in range(2):
        sums = evaluate(state, batch(state, 0), NextTokenHead())
        losses.append(sums["loss"] / sums["count"])
    return losses[0], losses[1], train_step(state, batch(state, 0), NextTokenHead()).loss


@pytest.mark.full
def test_half_precision_trains_like_full_precision() -> None:
    """bf16 weights with fp32 main weights: the first losses agree to bf16's three digits."""
    full = config_of(MODEL, MeshConfig())
    half = config_of(MODEL, MeshConfig(tp=2, ep=2), PlatformConfig(layers="torch", precision="bf16"))
    initial = random_weights(full)
    full_losses = run_ranks(losses_of, 1, full, initial)[0]
    half_losses = run_ranks(losses_of, 2, half, initial)[0]
    assert half_losses == pytest.approx(full_losses, rel=5e-3)
    assert half_losses[-1] < half_losses[0] - 0.1


def losses_of(config: PretrainConfig, initial: Tensors) -> list[float]:
    """On a rank: ten steps on one batch."""
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    return [train_step(state, batch(state, 0), NextTokenHead()).loss for _ in range(10)]
