"""What an update of the policy is does not depend on mesh, packing or microbatches."""

import functools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.replay import ReplayConfig, ReplayKind
from mcore_rl.config.rl.loss import AnyLoss, PtxConfig, UpdateConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, TrainConfig
from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.step.losses import policy_loss
from mcore_rl.rl.step.objective import policy_objective
from tests.parallel.parity import MESHES, Tensors, assembled, random_weights
from tests.parallel.rl_steps import (
    SIZE,
    cached_bytes,
    expert_biases,
    moved_parameters,
    rollout_of,
    router_shifts,
    routing_splits,
    run_config,
    sampled_positions,
    splits_by_hand,
    token_advantages,
    updates,
    with_overflow,
    without_gradients,
)
from tests.ranks import run_ranks
from tests.sections import advantage_config, loss_config
from tests.tiny_models import TINY, shallow
from tests.unit.rl.ragged import PADDED, tokens_of
from tests.unit.rl.ragged import batch as ragged_batch

EVERY_AXIS = ("tp2", "pp2", "pp2-vpp2", "ep2", "cp2", "dp2", "tp2-pp2", "cp2-dp2-overlapped")
MODELS = TINY | {f"{name}-shallow": shallow(TINY[name]) for name in ("qwen3_moe", "deepseek_v3")}
MODELS["deepseek_v3-mtp"] = MODELS["deepseek_v3-shallow"].model_copy(update={"mtp_layers": 1})
CHANGES: list[dict[str, Any]] = [
    {"kind": "grpo", "kl_coeff": 0.1, "entropy_coeff": 0.01},
    {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    {"kind": "kimi_k2", "kl_coeff": 0.1, "kl_in": "reward"},
    {"kind": "cispo", "importance_sampling": "truncate"},
    {"kind": "grpo", "aggregation": "token_mean"},
    {"kind": "gspo_token", "advantage": "steps"},
    {"kind": "rspo", "router_shift_floor": 0.01},
]
ROWS = {"short": 24, "long": 96}
REPRESENTATIVE = [("deepseek_v3", "tp2"), ("deepseek_v3", "pp2-vpp2")]
LOGITS_CHUNKS = {"tp2-pp2": 7, "cp2-dp2-overlapped": 5}
"""Positions that have logits at a time on some meshes; on one rank all of a microbatch have them."""


def config_of(
    model: str,
    mesh: MeshConfig,
    max_tokens_per_microbatch: int = ROWS["long"],
    replay: ReplayKind = "none",
    **changes: Any,
) -> RlRunConfig:
    update = UpdateConfig(max_tokens_per_microbatch=max_tokens_per_microbatch, **changes)
    optim = OptimConfig(lr=1e-3, schedule="constant", clip_grad=0.3)
    return run_config(MODELS[model], mesh, replay, optim, loss=loss_config(), update=update)


def model_of(model: str, mesh: str) -> str:
    return model if MESHES[mesh].pp > 1 else f"{model}-shallow"


@functools.cache
def weights(model: str, seed: int) -> Tensors:
    config = config_of(model, MeshConfig())
    return random_weights(config.model_copy(update={"train": TrainConfig(seed=seed)}))


def reports_of(config: RlRunConfig, model: str, folder: Path) -> list[list[dict[str, float]]]:
    """What all ranks tell alike."""
    work = (config, weights(model, 1), weights(model, 2), folder, CHANGES)
    ranks = run_ranks(updates, config.mesh.smallest_world, *work)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@functools.cache
def alone(model: str, folder: Path, replay: ReplayKind = "none") -> list[list[dict[str, float]]]:
    return reports_of(config_of(model, MeshConfig(), replay=replay), model, folder / model / replay)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def assert_same(ours: list[list[dict[str, float]]], theirs: list[list[dict[str, float]]]) -> None:
    for change, mine, reference in zip(CHANGES, ours, theirs, strict=True):
        for step, (one, other) in enumerate(zip(mine, reference, strict=True)):
            for name, value in other.items():
                # Sums that cancel (a loss of centred advantages) are measured against numbers of size 1. The largest
                # log ratio is of one token, of two fp32 logprobs of which each is a multiple of 2^-21 = 4.8e-7.
                allowed = 4 * 2**-21 if name.startswith("max/") else 1e-6
                assert one[name] == pytest.approx(value, rel=1e-6, abs=allowed), (change, step, name)


@pytest.mark.full
@pytest.mark.parametrize(("model", "mesh"), [*[("qwen3_moe", mesh) for mesh in EVERY_AXIS], *REPRESENTATIVE])
def test_updates_do_not_depend_on_the_mesh(model: str, mesh: str, folder: Path, tmp_path: Path) -> None:
    model = model_of(model, mesh)
    config = config_of(model, MESHES[mesh])
    chunk = LOGITS_CHUNKS.get(mesh, "auto")
    platform = PlatformConfig(layers="torch", precision="fp32", logits_chunk_tokens=chunk)
    config = config.model_copy(update={"platform": platform})
    assert_same(reports_of(config, model, tmp_path), alone(model, folder))


@pytest.mark.matrix("r3-cp2")
@pytest.mark.parametrize(
    ("replay", "mesh"), [("r2", "tp2-pp2"), ("r2", "ep2"), ("r3", "tp2"), ("r3", "pp2-vpp2"), ("r3", "cp2")]
)
def test_updates_under_replayed_routes_do_not_depend_on_the_mesh(
    replay: ReplayKind, mesh: str, folder: Path, tmp_path: Path
) -> None:
    """Of R3 the routes are random ones: nothing but replay could choose them."""
    model = model_of("qwen3_moe", mesh)
    reference = alone(model, folder, replay)
    assert_same(reports_of(config_of(model, MESHES[mesh], replay=replay), model, tmp_path), reference)
    free = alone(model, folder)
    # Ten times what meshes may differ by.
    assert reference[0][1]["loss"] != pytest.approx(free[0][1]["loss"], rel=1e-5), "routes were not imposed"


@pytest.mark.full
def test_under_r3_the_expert_bias_counts_the_engines_experts() -> None:
    """By hand from the rollout, on all axes at once: no padding counts, and recomputation counts nothing twice."""
    config = config_of("deepseek_v3", MeshConfig(cp=2, pp=2, ep=2), replay="r3")
    config = config.model_copy(update={"platform": PlatformConfig(layers="torch", precision="fp32", recompute="full")})
    initial = weights("deepseek_v3", 1)
    biases = assembled(run_ranks(expert_biases, config.mesh.smallest_world, config, initial))
    groups = rollout_of(config, 0, 1).groups
    routes = [completion.experts_TLK for p in sorted(groups) for completion in groups[p].completions]
    model, half = config.model, len(routes) // 2
    assert len(biases) == sum(model.moe_layers)
    for column, name in enumerate(sorted(biases)):
        wanted_E = torch.zeros(model.moe.num_experts)
        for minibatch in (routes[:half], routes[half:]):
            experts = torch.cat([one[:, column].flatten() for one in minibatch if one is not None])
            counts_E = experts.bincount(minlength=model.moe.num_experts).double()
            wanted_E += model.moe.expert_bias_rate * (counts_E.mean() - counts_E).sign()
        assert wanted_E.any()
        assert biases[name].flatten().tolist() == pytest.approx(wanted_E.tolist(), abs=1e-7), name


PARTS = {
    "rollout/mismatch_kl_{}_routes_nats": "rollout/layer_{:02d}/mismatch_kl_routing_nats",
    "policy/kl_old_{}_routes_nats": "policy/layer_{:02d}/kl_old_routing_nats",
    "policy/ratio_variance_{}_routes": "policy/layer_{:02d}/ratio_variance_routing",
}
"""What is divided, with live or the same routes -> the part of a layer."""


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_the_mismatches_are_divided_by_their_routes(mesh: str) -> None:
    """Updates measure one of the two themselves: under R3 with the engine's routes, without replay with live ones."""
    found = {}
    for kind in ("r3", "none"):
        replay = ReplayConfig(kind=kind, max_disagreement=None, observe_rollout=True, split_layers=64)
        alone, many = [
            config_of("qwen3_moe", on, epochs=2).model_copy(update={"replay": replay})
            for on in (MeshConfig(), MESHES[mesh])
        ]
        initial = weights("qwen3_moe", 1)
        (found[kind],) = run_ranks(routing_splits, 1, alone, initial)
        for rank in run_ranks(routing_splits, 2, many, initial):
            wholes = {name: value for name, value in found[kind].items() if "/layer_" not in name}
            assert {name: rank[name] for name in wholes} == pytest.approx(wholes, rel=1e-5)
            # The part of a layer is a difference of two such numbers.
            for whole, part in PARTS.items():
                for name in (part.format(layer) for layer in range(TINY["qwen3_moe"].num_layers)):
                    digits = 1e-5 * found[kind][whole.format("live")]
                    assert rank[name] == pytest.approx(found[kind][name], abs=digits), name
    for kind, routes, others in (("r3", "same", "live"), ("none", "live", "same")):
        split = found[kind]
        for measured, name in (
            ("mismatch_kl", "rollout/mismatch_kl_{}_routes_nats"),
            ("kl_old", "policy/kl_old_{}_routes_nats"),
            ("ratio_variance", "policy/ratio_variance_{}_routes"),
        ):
            assert split[name.format(routes)] == pytest.approx(split[f"update/{measured}"], rel=1e-5)
            assert split[name.format(others)] != pytest.approx(split[f"update/{measured}"], rel=1e-4)
    # The parts of the layers are all that routing does, and were compared between the meshes above.
    for split in found.values():
        for whole, part in PARTS.items():
            parts = [split[part.format(layer)] for layer in range(TINY["qwen3_moe"].num_layers)]
            assert all(parts)
            assert sum(parts) == pytest.approx(split[whole.format("live")] - split[whole.format("same")])
    # The engine's routes and the weights are the same in both.
    for routes in ("live", "same"):
        name = f"rollout/mismatch_kl_{routes}_routes_nats"
        assert found["r3"][name] == pytest.approx(found["none"][name], rel=1e-6)


@pytest.mark.full
def test_the_part_of_a_layer_is_what_its_live_routes_add_to_those_of_the_layers_before() -> None:
    replay = ReplayConfig(kind="none", max_disagreement=None, observe_rollout=True, split_layers=64)
    config = config_of("qwen3_moe", MeshConfig()).model_copy(update={"replay": replay})
    (found,) = run_ranks(splits_by_hand, 1, config, weights("qwen3_moe", 1))
    by_hand, split = found["by_hand"], found["split"]
    layers = config.model.num_layers
    assert split["rollout/mismatch_kl_same_routes_nats"] == pytest.approx(by_hand[0], rel=1e-5)
    assert split["rollout/mismatch_kl_live_routes_nats"] == pytest.approx(by_hand[layers], rel=1e-5)
    parts = [split[f"rollout/layer_{layer:02d}/mismatch_kl_routing_nats"] for layer in range(layers)]
    for layer, part in enumerate(parts):
        # Logprobs differ by their last bits, and the two KL by 5e-6 of themselves.
        assert part == pytest.approx(by_hand[layer + 1] - by_hand[layer], abs=1e-5 * by_hand[0])
    assert max(map(abs, parts)) > 2e-4 * by_hand[0], "the largest part is above what rounding does"


def test_routes_of_an_engine_that_are_like_none_of_the_trainer_end_the_run(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", MeshConfig(), replay="r3")
    config = config.model_copy(update={"replay": ReplayConfig(kind="r3")})
    with pytest.raises(AssertionError, match=r"RoutingError: .* no expert in common .* layer 0: \d\d\.\d% of"):
        run_ranks(updates, 1, config, weights("qwen3_moe", 1), {}, tmp_path, [{}])


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["1", "dp2", "cp2", "pp2"])
def test_tokens_get_the_z_scores_of_the_steps_that_end_there_or_later(mesh: str) -> None:
    config = config_of("qwen3_moe", MESHES[mesh])
    rl = config.rl.model_copy(update={"advantage": advantage_config(kind="steps", eps=0.01)})
    config = config.model_copy(update={"rl": rl})
    rollout = rollout_of(config, 0, 1)
    wanted = {}
    for group, steps_GI in enumerate(rollout.steps_PGI):
        values = [step.value for steps in steps_GI for step in steps]
        mean, spread = statistics.mean(values), statistics.stdev(values) + 0.01
        for place, steps in enumerate(steps_GI):
            shape = rollout.shapes[group * SIZE + place]
            for t, position in enumerate(sampled_positions(shape) if shape.is_trained else ()):
                later = sum((step.value - mean) / spread for step in steps if step.end >= t)
                wanted[group * SIZE + place, position] = later
    ranks = run_ranks(token_advantages, config.mesh.smallest_world, config)
    found = [one for rank in ranks for one in rank]
    assert len(found) == len(wanted)
    assert {(sample, t): x for sample, t, x in found} == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.full
def test_updates_do_not_depend_on_how_completions_are_packed(folder: Path, tmp_path: Path) -> None:
    short = config_of("qwen3_moe", MeshConfig(), ROWS["short"])
    assert_same(reports_of(short, "qwen3_moe", tmp_path), alone("qwen3_moe", folder))


@pytest.mark.full
def test_the_first_update_has_ratios_of_one_and_later_ones_have_not(folder: Path) -> None:
    for change, reports in zip(CHANGES, alone("qwen3_moe", folder), strict=True):
        first, second = reports
        assert first["ratio_minus_1"] == first["ratio_minus_1_squared"] == first["kl_old"] == 0.0, change
        assert first["max/log_ratio"] == first["max/minus_log_ratio"] == 0.0
        assert second["kl_old"] > 1e-9, change


SHIFTED = loss_config(kind="grpo", router_shift=True, router_shift_floor=0.01)


@pytest.mark.matrix("r2")
@pytest.mark.parametrize(
    ("model", "replay", "loss", "ptx"),
    [
        ("qwen3_moe", "none", SHIFTED, PtxConfig()),
        ("deepseek_v3", "r2", SHIFTED, PtxConfig()),
        (
            *("qwen3_moe", "r2", loss_config(kind="rspo", router_shift_floor=0.01)),
            PtxConfig(coeff=0.5, files=("conversations",), sequences=2),
        ),
    ],
    ids=["free", "r2", "rspo-with-texts"],
)
def test_the_router_shift_is_that_of_the_routers_scores_of_the_old_experts(
    model: str, replay: ReplayKind, loss: AnyLoss, ptx: PtxConfig
) -> None:
    """By hand from what the routers' gates compute; the deepseek_v3 has sigmoids, a bias, groups, a dense layer. Texts
    that are mixed into updates have no old policy, and no part in it.
    """
    config = config_of(model, MeshConfig(), replay=replay)
    config = config.model_copy(update={"rl": config.rl.model_copy(update={"loss": loss, "ptx": ptx})})
    (found,) = run_ranks(router_shifts, 1, config, weights(model, 1))
    assert found["on-policy"] == 1.0
    assert found["reported"] == pytest.approx(found["by hand"], rel=1e-6) and found["by hand"] < 0.999


@pytest.mark.full
def test_old_logprobs_of_a_pass_before_are_those_of_the_update_itself(folder: Path, tmp_path: Path) -> None:
    """With a second epoch the first minibatch needs them from a pass: its ratios are exactly 1 all the same."""
    config = config_of("qwen3_moe", MeshConfig(), epochs=2)
    initial, other = weights("qwen3_moe", 1), weights("qwen3_moe", 2)
    (reports,) = run_ranks(updates, 1, config, initial, other, tmp_path, CHANGES[:1])[0]
    once = alone("qwen3_moe", folder)[0]
    assert reports[:2] == once
    assert len(reports) == 4
    assert reports[2]["kl_old"] > 0.0


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["1", "ep2"])
def test_sampled_old_logprobs_need_no_routes(mesh: str, folder: Path, tmp_path: Path) -> None:
    """The KL of the first update is then what a trainer's pass reports as the mismatch with the rollout."""
    config = config_of("qwen3_moe", MESHES[mesh], old_logprobs="rollout")
    initial, other = weights("qwen3_moe", 1), weights("qwen3_moe", 2)
    ranks = run_ranks(updates, config.mesh.smallest_world, config, initial, other, tmp_path, [{"kind": "gspo"}])
    first, second = ranks[0][0]
    trainer = alone("qwen3_moe", folder)[0][0]
    assert first["kl_old"] == pytest.approx(trainer["mismatch_kl"], rel=1e-6)
    assert first["mismatch_kl"] == 0.0 and second["kl_old"] > 0.0


@pytest.mark.full
def test_the_kl_to_an_equal_reference_is_nothing(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", MeshConfig())
    same = weights("qwen3_moe", 1)
    (reports,) = run_ranks(updates, 1, config, same, same, tmp_path, CHANGES[:1])[0]
    assert reports[0]["kl_reference"] == 0.0
    assert reports[1]["kl_reference"] > 1e-9


@pytest.mark.full
def test_layers_of_multi_token_prediction_stay_and_no_reduction_waits_for_them(tmp_path: Path) -> None:
    """Weight decay once moved them, and with overlap the second update failed: they have no gradient."""
    model, mesh = "deepseek_v3-mtp", MeshConfig(dp=2, overlap_grad_reduce=True, overlap_param_gather=True)
    (moved,) = run_ranks(moved_parameters, 1, config_of(model, MeshConfig()))
    kept = [name for name, has_moved in moved.items() if name.endswith(".weight") and not has_moved]
    assert kept == [name for name in moved if name.endswith(".weight") and ".mtp." in name]
    assert_same(reports_of(config_of(model, mesh), model, tmp_path), alone(model, tmp_path))


@pytest.mark.full
def test_frozen_routers_and_their_biases_stay_and_all_else_learns() -> None:
    config = config_of("deepseek_v3", MeshConfig())
    for frozen in (False, True):
        rl = config.rl.model_copy(update={"freeze_router": frozen})
        (moved,) = run_ranks(moved_parameters, 1, config.model_copy(update={"rl": rl}))
        trained = {name: has_moved for name, has_moved in moved.items() if ".decoder." in name}
        router = {name: has_moved for name, has_moved in trained.items() if ".router." in name}
        router = {name: has_moved for name, has_moved in router.items() if "tokens_per_expert" not in name}
        assert {name.rsplit(".", 1)[1] for name in router} == {"weight", "expert_bias"}
        for kind in ("weight", "expert_bias"):
            # Two steps of a bias, each by a sign, can cancel out in one layer.
            assert any(has_moved for name, has_moved in router.items() if name.endswith(kind)) != frozen
        assert all(moved[name] for name in trained if name.endswith("linear_fc1.weight") or ".linear_proj." in name)


@pytest.mark.matrix("r3")
@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
def test_an_overflow_is_a_skipped_step_and_no_fault_of_routing(replay: ReplayKind) -> None:
    """train.max_skipped is the policy for it, and each step after it is as good as before."""
    config = config_of("qwen3_moe-shallow", MeshConfig(), replay=replay)
    (found,) = run_ranks(with_overflow, 1, config, weights("qwen3_moe-shallow", 1))
    assert found == [(True, 1), (False, 1)]


@pytest.mark.full
def test_an_update_whose_loss_reaches_no_parameter_ends_the_run() -> None:
    """Without an advantage a gradient of 0 is right."""
    config = config_of("qwen3_moe-shallow", MeshConfig())
    (found,) = run_ranks(without_gradients, 1, config, weights("qwen3_moe-shallow", 1))
    assert found["no advantage"] == found["cut, no advantage"] == "gradient norm 0.0"
    for case in ("cut", "detached"):
        assert "a gradient of exactly 0: nothing is trained" in found[case]


@pytest.mark.full
@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_routes_of_a_rollout_are_forgotten_with_it(replay: ReplayKind) -> None:
    """Else a run's memory would grow with each rollout, with no number that is wrong."""
    config = config_of("qwen3_moe-shallow", MeshConfig(), replay=replay, epochs=2)
    (found,) = run_ranks(cached_bytes, 1, config, weights("qwen3_moe-shallow", 1))
    assert found[0] > 0
    assert found == [found[0]] * 3


LOSSES = [
    loss_config(
        kind=kind,
        entropy_coeff=0.1,
        kl_coeff=0.1,
        **(
            {}
            if mismatch is None
            else {"importance_sampling": mismatch, "importance_sampling_low": 0.9, "importance_sampling_high": 1.1}
        ),
    )
    for kind, mismatch in [
        ("grpo", "mask"),
        ("gspo", "sequence_mask"),
        ("gspo_token", "truncate"),
        ("rspo", "sequence_truncate"),
        ("kimi_k2", None),
        ("cispo", "sequence_truncate"),
    ]
]


def on_a_part(cp):
    """Sums, maxima and the gradient of every config from this rank's part of each row."""
    part = torch.arange(PADDED).chunk(cp.size)[cp.rank]
    results = []
    for config in LOSSES:
        rows = ragged_batch()
        leaf = rows["logprobs"].requires_grad_()
        whole = tokens_of(rows, config.aggregation_in_use)
        mine = {
            name: values_T.unflatten(0, (-1, PADDED))[:, part].flatten()
            for name in whole.__slots__
            if name.endswith("_T") and (values_T := getattr(whole, name)) is not None
        }
        tokens = type(whole)(**mine, lengths_N=whole.lengths_N)
        loss = policy_loss(tokens, policy_objective(config), cp)
        (gradient,) = torch.autograd.grad(loss.loss, leaf)
        numbers = [{name: float(x) for name, x in values.items()} for values in (loss.sums, loss.maxima)]
        results.append((*numbers, gradient))
    return results


def on_a_rank():
    return on_a_part(Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size()))


def test_context_parallelism_changes_neither_loss_nor_gradient():
    alone = on_a_part(Axis(None, 0, 1))
    ranks = run_ranks(on_a_rank, 2)
    for (sums, maxima, gradient), *parts in zip(alone, *ranks, strict=True):
        assert {name: sum(part[0][name] for part in parts) for name in sums} == pytest.approx(sums, rel=1e-12)
        assert {name: max(part[1][name] for part in parts) for name in maxima} == maxima
        torch.testing.assert_close(sum(part[2] for part in parts), gradient, rtol=1e-12, atol=1e-15)
        assert gradient.abs().max() > 0
