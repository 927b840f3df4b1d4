"""A run that resumes from a checkpoint computes what it would have computed, on the same mesh bit for bit."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.model.build import unwrap
from mcore_rl.train import setup
from mcore_rl.train.step import NextTokenHead, evaluate
from tests.parallel.checkpointing import (
    DEEPSEEK,
    QWEN,
    SMALL,
    SMALL_DEEPSEEK,
    assert_killed,
    config_of,
    kill_this_rank,
    opened,
    run,
    stop_writers,
    stopped_writers,
)
from tests.parallel.parity import SEQUENCES, batch
from tests.ranks import run_ranks
from tests.tiny_models import TINY

ONE = MeshConfig()
TP2_EP2 = MeshConfig(tp=2, ep=2)
LATE_GATHER = MeshConfig(dp=2, overlap_grad_reduce=True, overlap_param_gather=True)


@pytest.mark.matrix("qwen-pp2-vpp2")
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (QWEN, MeshConfig(pp=2, vpp=2)),
        (QWEN, MeshConfig(cp=2)),
        (QWEN, ONE),
        (DEEPSEEK, MeshConfig(pp=2, vpp=2)),
        (DEEPSEEK, LATE_GATHER),
    ],
    ids=["qwen-pp2-vpp2", "qwen-cp2", "qwen-1", "deepseek-pp2-vpp2", "deepseek-dp2-overlap"],
)
def test_a_run_goes_on_alike_on_another_mesh(
    stayed: Callable[[ModelConfig], tuple[str, dict[int, float]]], model: ModelConfig, mesh: MeshConfig, tmp_path: Path
) -> None:
    """Optimizer, experts, expert bias and schedule come along from TP2 x EP2."""
    folder, losses = stayed(model)
    moved = run(config_of(tmp_path, model, mesh, load=folder), until=5)
    assert list(moved.losses) == [4, 5]
    assert list(moved.losses.values()) == pytest.approx([losses[step] for step in (4, 5)], rel=1e-6)
    assert any("random states follow anew from train.seed=1234 and step 3" in line for line in moved.lines)


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelConfig], tuple[str, dict[int, float]]]:
    """Folder and losses of a model's run on TP2 x EP2 that saved after step 3 and stayed until step 5."""

    @cache
    def run_of(model: ModelConfig) -> tuple[str, dict[int, float]]:
        folder = tmp_path_factory.mktemp(model.family)
        return str(folder), run(config_of(folder, model, TP2_EP2), until=5, save_at=[3]).losses

    return run_of


@pytest.mark.full
@pytest.mark.parametrize(("family", "within"), [("qwen3_next", 3e-6), ("glm_moe_dsa", 1e-6)])
def test_newer_kinds_of_attention_resume_on_other_meshes(family: str, within: float, tmp_path: Path) -> None:
    """A rank's parts of the projections of delta nets are tensors of their own in a checkpoint, with their moments;
    these layers amplify the rounding of sums in another order. Indexers are held by no optimizer.
    """
    stayed = run(config_of(tmp_path / "stayed", TINY[family], TP2_EP2), until=4, save_at=[2])
    for name, mesh in {"pp2": MeshConfig(pp=2), "cp2": MeshConfig(cp=2)}.items():
        moved = run(config_of(tmp_path / name, TINY[family], mesh, load=str(tmp_path / "stayed")), until=4)
        assert moved.losses == pytest.approx({step: stayed.losses[step] for step in (3, 4)}, rel=within), name


@pytest.mark.full
def test_a_pipeline_stage_without_experts_can_be_left_and_entered(tmp_path: Path) -> None:
    """Its optimizer of the experts is empty, yet rank 0's is the one that Megatron saves as common to all."""
    staged = run(config_of(tmp_path / "a", SMALL_DEEPSEEK, MeshConfig(pp=2)), until=4, save_at=[2])
    single = run(config_of(tmp_path / "b", SMALL_DEEPSEEK, ONE, load=str(tmp_path / "a")), until=4, save_at=[3])
    again = run(config_of(tmp_path / "c", SMALL_DEEPSEEK, MeshConfig(pp=2), load=str(tmp_path / "b")), until=4)
    assert single.losses[3] == pytest.approx(staged.losses[3], rel=1e-6)
    assert single.losses[4] == pytest.approx(staged.losses[4], rel=1e-6)
    assert again.losses[4] == pytest.approx(staged.losses[4], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (SMALL.model_copy(update={"hidden_dropout": 0.1, "attention_dropout": 0.1}), TP2_EP2),
        (SMALL_DEEPSEEK, MeshConfig(ep=2, dp=2, overlap_grad_reduce=True, overlap_param_gather=True)),
        (TINY["llama"].model_copy(update={"num_layers": 2}), ONE),
    ],
    ids=["dropout-tp2-ep2", "bf16-expert-bias-ep2-overlap", "dense"],
)
def test_a_resumed_run_is_bit_equal(model: ModelConfig, mesh: MeshConfig, tmp_path: Path) -> None:
    """Also with dropout, with an overlapped optimizer, in bf16 with fp32 main weights, and saved in mid-warm-up."""
    precision = "bf16" if model is SMALL_DEEPSEEK else "fp32"
    whole = run(config_of(tmp_path / "whole", model, mesh, precision), until=5)
    parts = config_of(tmp_path / "parts", model, mesh, precision)
    assert run(parts, until=1, save_at=[1]).source is None
    resumed = [run(parts, until=end, save_at=[end]) for end in (2, 5)]
    assert [resumed[0].losses[2]] == [whole.losses[2]]
    assert resumed[1].losses == {step: whole.losses[step] for step in (3, 4, 5)}
    assert resumed[1].source == tmp_path / "parts/checkpoints/iter_0000002"


@pytest.mark.full
def test_an_offloaded_optimizer_is_bit_equal_to_that_of_the_device_and_reads_its_checkpoints(tmp_path: Path) -> None:
    """Half of the state is the processor's, of another Adam; a resume gives each half its count of steps."""
    mesh = MeshConfig(ep=2, dp=2, overlap_grad_reduce=True, overlap_param_gather=True)
    whole = run(config_of(tmp_path / "whole", SMALL, mesh, "bf16"), until=5, save_at=[2])
    config = config_of(tmp_path / "half", SMALL, mesh, "bf16", load=str(tmp_path / "whole"))
    half = config.model_copy(update={"optim": config.optim.model_copy(update={"offload_fraction": 0.5})})
    losses = run(half, until=3, save_at=[3]).losses | run(half, until=5).losses
    assert losses == {step: whole.losses[step] for step in (3, 4, 5)}
    back = run(config_of(tmp_path / "back", SMALL, mesh, "bf16", load=str(tmp_path / "half")), until=5)
    assert back.losses == {step: whole.losses[step] for step in (4, 5)}


@pytest.mark.full
def test_an_optimizer_with_moments_and_gradients_in_bf16_resumes_bit_equal_and_reads_one_in_fp32(
    tmp_path: Path,
) -> None:
    """Checkpoints are in fp32, in which both kinds read each other's."""
    mesh = MeshConfig(ep=2, dp=2, overlap_grad_reduce=True, overlap_param_gather=True)

    def lowered(name: str, **options: str) -> PretrainConfig:
        config = config_of(tmp_path / name, SMALL, mesh, "bf16", **options)
        fields = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")
        return config.model_copy(update={"optim": config.optim.model_copy(update=dict.fromkeys(fields, "bf16"))})

    plain = run(config_of(tmp_path / "plain", SMALL, mesh, "bf16"), until=4, save_at=[2])
    whole = run(lowered("whole"), until=4, save_at=[2])
    again = run(lowered("again", load=str(tmp_path / "whole/checkpoints/iter_0000002")), until=4)
    assert again.losses == {step: whole.losses[step] for step in (3, 4)}
    assert whole.losses[1] == plain.losses[1] and whole.losses[4] != plain.losses[4]
    from_plain = run(lowered("moved", load=str(tmp_path / "plain/checkpoints/iter_0000002")), until=4)
    assert from_plain.losses[3] == plain.losses[3], "the fp32 copies of the weights came along"
    assert from_plain.losses[4] == pytest.approx(plain.losses[4], rel=2e-3)
    back = config_of(tmp_path / "back", SMALL, mesh, "bf16", load=str(tmp_path / "whole/checkpoints/iter_0000002"))
    assert run(back, until=3).losses[3] == whole.losses[3]


@pytest.mark.full
def test_moments_are_those_of_their_parameter_with_padding_between_buckets(tmp_path: Path) -> None:
    """Megatron saves a neighbour's values then, and on loading gives each parameter what was saved for it."""
    odd = SMALL.model_copy(update={"hidden_size": 72})
    stayed = run_ranks(trained_in_small_buckets, 2, config_of(tmp_path / "a", odd, LATE_GATHER))[0]
    moved = run(config_of(tmp_path / "b", odd, ONE, load=str(tmp_path / "a")), until=5)
    assert moved.losses == pytest.approx({step: stayed[step] for step in (4, 5)}, rel=1e-6)


def trained_in_small_buckets(config: PretrainConfig) -> dict[int, float]:
    """On a rank: losses, with buckets as small to this model as the usual ones are to a large one."""
    setup.DistributedDataParallelConfig = partial(DistributedDataParallelConfig, bucket_size=20_000)
    with opened(config) as run:
        dense = run.state.optimizer.chained_optimizers[0]
        (lengths,), (unpadded,) = (
            (next(iter(b.values())) for b in dense.per_bucket_numel),
            (next(iter(b.values())) for b in dense.per_bucket_numel_unpadded),
        )
        assert len(lengths) > 1 and lengths[0] > unpadded[0], "no padding, nothing to see"
        run.train(5, save_at=[3])
    return run.losses


@pytest.mark.full
def test_a_state_before_the_first_step_can_be_saved(tmp_path: Path) -> None:
    whole = run(config_of(tmp_path / "whole", SMALL, ONE), until=2)
    run_ranks(saved_at_once, 1, config_of(tmp_path / "parts", SMALL, ONE))
    resumed = run(config_of(tmp_path / "parts", SMALL, ONE), until=2)
    assert resumed.source is not None and resumed.losses == whole.losses


def saved_at_once(config: PretrainConfig) -> None:
    with opened(config) as run:
        run.checkpoints.save()


def test_killed_in_a_step_and_while_saving_a_run_goes_on_bit_equal(tmp_path: Path) -> None:
    whole = run(config_of(tmp_path / "whole", SMALL, TP2_EP2), until=5)
    config = config_of(tmp_path / "killed", SMALL, TP2_EP2)
    checkpoints = tmp_path / "killed/checkpoints"

    assert_killed(killed_in_step_three, 2, config)
    assert [path.name for path in checkpoints.iterdir() if path.is_dir()] == ["iter_0000002"]

    assert_killed(killed_while_saving_step_four, 2, config)
    unfinished = [path.name for path in checkpoints.iterdir() if path.name.startswith("writing_")]
    assert len(unfinished) == 1

    resumed = run(config, until=5)
    assert resumed.source == checkpoints / "iter_0000002"
    assert f"removed {unfinished[0]}, left by a run that was killed" in resumed.lines
    assert not (checkpoints / unfinished[0]).exists()
    assert resumed.losses == {step: whole.losses[step] for step in (3, 4, 5)}


def killed_in_step_three(config: PretrainConfig) -> None:
    """On a rank: a complete checkpoint of step 2, then SIGKILL for rank 1 in the backward pass of step 3."""
    with opened(config) as run:
        run.train(2, save_at=[2])
        run.lines += run.checkpoints.finish()
        if run.state.mesh.world.rank == 1:
            weight = next(run.state.chunks[0].parameters())
            weight.register_hook(lambda _: kill_this_rank())
        run.train(3)


def killed_while_saving_step_four(config: PretrainConfig) -> None:
    """On a rank: SIGKILL for rank 0 when its writer of step 4 has started and not finished."""
    with opened(config) as run:
        run.train(4)
        stop_writers()
        run.checkpoints.save()
        assert len(stopped_writers()) == 1
        if run.state.mesh.world.rank == 0:
            kill_this_rank()
        run.train(5)


def test_an_asynchronous_checkpoint_has_the_weights_of_its_step(tmp_path: Path) -> None:
    """Training continues while the writers are stopped: they must write the state of the save, not a later one."""
    whole = run(config_of(tmp_path / "whole", SMALL_DEEPSEEK, ONE), until=5)
    biases = run_ranks(trained_while_writers_wait, 1, config_of(tmp_path / "run", SMALL_DEEPSEEK, ONE))[0]
    assert not torch.equal(biases["saved"], biases["later"])
    assert biases["saved"].dtype == torch.float32 and biases["saved"].abs().max() > 0
    resumed, bias = run_ranks(resumed_with_bias, 1, config_of(tmp_path / "run", SMALL_DEEPSEEK, ONE))[0]
    assert torch.equal(bias, biases["saved"])
    assert resumed == {step: whole.losses[step] for step in (3, 4, 5)}


def trained_while_writers_wait(config: PretrainConfig) -> dict[str, torch.Tensor]:
    """On a rank: step 2 is saved by a writer that is stopped until step 4 is done; the expert bias then and now."""
    with opened(config) as run:
        router = unwrap(run.state.chunks[0]).decoder.layers[1].mlp.router
        run.train(2)
        saved = router.expert_bias.clone()
        stop_writers()
        run.checkpoints.save()
        writers = stopped_writers()
        assert len(writers) == 1, "a save starts one writer and no other process"
        run.train(4)
        assert not (run.folder.checkpoints / "iter_0000002").exists()
        writers[0].resume()
        later = router.expert_bias.clone()
    assert (run.folder.checkpoints / "iter_0000002").exists()
    return {"saved": saved, "later": later}


def resumed_with_bias(config: PretrainConfig) -> tuple[dict[int, float], torch.Tensor]:
    with opened(config) as run:
        bias = unwrap(run.state.chunks[0]).decoder.layers[1].mlp.router.expert_bias.clone()
        run.train(5)
    return run.losses, bias


@pytest.mark.full
def test_progress_comes_back(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMALL, ONE)
    before = run_ranks(progress_of, 1, config, 2)[0]
    after = run_ranks(progress_of, 1, config, 0)[0]
    assert before == after
    assert before["step"] == 2 and before["consumed_tokens"] > 0
    assert before["consumed_samples"] == 2 * SEQUENCES


def progress_of(config: PretrainConfig, until: int) -> dict[str, int]:
    with opened(config) as run:
        run.train(until)
        run.state.progress.skipped_steps += 7 if until else 0
        run.checkpoints.save()
    return {name: getattr(run.state.progress, name) for name in run.state.progress.__slots__}


@pytest.mark.full
def test_a_resumed_run_obeys_the_config_of_now(tmp_path: Path) -> None:
    """Megatron would take the rate and its bounds from the checkpoint's parameter groups."""
    run(config_of(tmp_path, SMALL, ONE), until=3, save_at=[3])
    config = config_of(tmp_path, SMALL, ONE)
    slower = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 1e-3, "beta2": 0.9})})
    rate, beta2, expected = run_ranks(rate_after_resuming, 1, slower)[0]
    assert rate == pytest.approx(expected) and rate < 1.1e-3
    assert beta2 == 0.9


def rate_after_resuming(config: PretrainConfig) -> tuple[float, float, float]:
    """On a rank: the learning rate and beta2 after resuming, and the rate that the schedule has at this step."""
    with opened(config) as run:
        groups = run.state.optimizer.param_groups
        rates = {group["lr"] for group in groups}
        (betas,) = {tuple(group["betas"]) for group in groups}
        schedule = run.state.schedule
        assert schedule.num_steps == 3
        expected = schedule.get_lr({"max_lr": config.optim.lr, "min_lr": config.optim.min_lr})
    assert len(rates) == 1
    return rates.pop(), betas[1], expected


@pytest.mark.full
@pytest.mark.parametrize("mesh", [TP2_EP2, LATE_GATHER], ids=["tp2-ep2", "dp2-overlap"])
def test_weights_alone_start_a_new_run(mesh: MeshConfig, tmp_path: Path) -> None:
    """Those of the last step, also where ranks gather them only in the next forward pass."""
    run(config_of(tmp_path / "a", SMALL, mesh), until=3, save_at=[3])
    saved_loss, step, _ = run_ranks(first_loss, 2, config_of(tmp_path / "a", SMALL, mesh))[0]
    config = config_of(tmp_path / "b", SMALL, ONE, load=str(tmp_path / "a"), load_optimizer=False)
    loss, fresh_step, source = run_ranks(first_loss, 1, config)[0]
    assert (step, fresh_step) == (3, 0)
    assert source == tmp_path / "a/checkpoints/iter_0000003"
    assert loss == pytest.approx(saved_loss, rel=1e-6)


def first_loss(config: PretrainConfig) -> tuple[float, int, Path | None]:
    """On a rank: return the loss of the first batch with the weights a run begins with, its step and source."""
    with opened(config) as run:
        sums = evaluate(run.state, batch(run.state, 0), NextTokenHead())
    return sums["loss"] / sums["count"], run.state.progress.step, run.source
