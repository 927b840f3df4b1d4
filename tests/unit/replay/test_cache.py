"""Recording, imposing and observing on one rank; what can go wrong there is an error or does no harm."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.errors import ConfigError, RoutingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.routers import replayed_routers, routed_layers
from mcore_rl.metrics.metrics import reduced
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.planning.memory import layer_bytes
from mcore_rl.replay import from_rollouts
from mcore_rl.replay.cache import local_tokens
from mcore_rl.replay.from_rollouts import RolloutRoutes, cache_rollout_routes
from mcore_rl.replay.router_hooks import live_gates
from tests.parallel.parity import assembled
from tests.parallel.replaying import (
    LENGTHS,
    VERSION,
    Case,
    Run,
    names_in_router_order,
    opened,
    perturbed,
    sample_tokens,
    tiny,
)

QWEN = tiny("qwen3_moe")
PADDED = ("padded",)


@pytest.fixture
def run() -> Iterator[Run]:
    with on_one_rank(Case(model="", mesh=MeshConfig(), layouts=PADDED), QWEN) as made:
        yield made


@contextmanager
def on_one_rank(case: Case, model: ModelConfig) -> Iterator[Run]:
    (made,) = opened(case, model)
    yield made
    for router in routers_of(made):
        router.router_replay = None
    destroy_mesh()


def routers_of(run: Run) -> list[Any]:
    return [router for chunk in run.state.chunks for _, router in replayed_routers(chunk)]


def recorded(run: Run) -> dict[int, float]:
    with run.tape() as tape:
        losses = run.evaluate(tape.record())
        tape.finish()
    return losses


def imposed(run: Run) -> dict[str, Any]:
    with run.tape() as tape:
        run.evaluate(tape.impose())
        return reduced(tape.finish())


def perturb(run: Run) -> None:
    with torch.no_grad():
        for router in routers_of(run):
            router.weight.add_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)) / 20)


def test_observing_changes_nothing_and_counts_the_changes(run: Run) -> None:
    recorded(run)
    perturb(run)
    free = run.evaluate()
    with run.tape() as tape:
        assert run.evaluate(tape.observe()) == free
        metrics = reduced(tape.finish())
    before = run.routes()
    run.cache.drop(run.version)
    recorded(run)
    after = run.routes()
    changes = {
        layer: sum(len(set(after[layer][name]) - set(before[layer][name])) for name in before[layer])
        for layer in before
    }
    count = sum(LENGTHS) * run.cache.top_k
    for layer, changed in changes.items():
        assert metrics[f"routes/layer_{layer:02d}/changed_fraction"] == pytest.approx(changed / count)
        disjoint = sum(set(after[layer][name]).isdisjoint(before[layer][name]) for name in before[layer])
        assert metrics[f"routes/layer_{layer:02d}/disjoint_fraction"] == disjoint / sum(LENGTHS)
    assert metrics["routes/disjoint_fraction"] > 0
    assert metrics["routes/changed_fraction"] == pytest.approx(sum(changes.values()) / (4 * count))
    any_changed = {
        name for layer in before for name in before[layer] if set(before[layer][name]) != set(after[layer][name])
    }
    assert metrics["routes/changed_tokens_fraction"] == pytest.approx(len(any_changed) / sum(LENGTHS))


@pytest.mark.full
def test_the_gate_mass_moved_is_that_of_the_gates_that_experts_get(run: Run) -> None:
    before = routers_outputs(run)
    recorded(run)
    perturb(run)
    after = routers_outputs(run)
    with run.tape() as tape:
        run.evaluate(tape.observe())
        metrics = reduced(tape.finish())
    names = torch.tensor(names_in_router_order(run))
    moved = [
        sum(
            float((gates_TE * (used_TE & ~used_before_TE))[names_T >= 0].sum())
            for (_, used_before_TE), (gates_TE, used_TE), names_T in zip(old, new, names, strict=True)
        )
        for old, new in zip(before, after, strict=True)
    ]
    for layer, mass in enumerate(moved):
        found = metrics[f"routes/layer_{layer:02d}/gate_mass_moved"]
        assert found == pytest.approx(mass / sum(LENGTHS), rel=1e-5)
    assert metrics["routes/gate_mass_moved"] == pytest.approx(sum(moved) / len(moved) / sum(LENGTHS), rel=1e-5)
    assert min(moved) > 0


def routers_outputs(run: Run) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each layer and microbatch of a free pass: gates and used experts, as the router gives them to the experts."""
    outputs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in routers_of(run)]
    hooks = [
        router.register_forward_hook(lambda _, inputs, output, here=here: here.append(output))
        for router, here in zip(routers_of(run), outputs, strict=True)
    ]
    run.evaluate()
    for hook in hooks:
        hook.remove()
    return outputs


def test_recording_in_a_pass_with_backward_takes_the_first_forward_only() -> None:
    case = Case(model="", mesh=MeshConfig(), layouts=PADDED, recompute="full")
    with on_one_rank(case, QWEN) as made:
        recorded(made)
        expected = made.routes()
        made.cache.drop(made.version)
        with made.tape() as tape:
            made.gradients(tape.record())
            tape.finish()
        assert made.routes() == expected
        assert {account.recomputed for account in tape.accounts} == {sum(LENGTHS)}


def test_the_gradient_reaches_the_router_through_the_imposed_experts(run: Run) -> None:
    recorded(run)
    perturb(run)
    with run.tape() as tape:
        _, gradients = run.gradients(tape.impose())
        tape.finish()
    (router_LED,) = [x for key, x in assembled([gradients]).items() if key.endswith("router.weight")]
    assert (router_LED.abs().amax(-1) > 0).float().mean() > 0.9


@pytest.mark.parametrize("store", ["device", "pinned"])
def test_where_routes_are_stored_changes_nothing(store: Any) -> None:
    case = Case(model="", mesh=MeshConfig(), layouts=PADDED, replay=ReplayConfig(kind="r2", store=store))
    with on_one_rank(case, QWEN) as made:
        free = recorded(made)
        with made.tape() as tape:
            assert made.evaluate(tape.impose()) == free
            tape.finish()
        made.cache.drop(VERSION)
        assert made.cache.num_bytes == 0


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_in_memory_is_an_error_that_names_layer_and_sample(run: Run, bit: int) -> None:
    """The flipped bit may also make an index that no expert has."""
    recorded(run)
    entry = run.cache.sample(run.version, 5)
    run.cache._storage._blocks[entry.block][entry.first, 0, 0] ^= 1 << bit
    with pytest.raises(RoutingError, match=r"layers \[0\], sample 5 of version 3: the experts that"):
        imposed(run)


def test_routes_of_the_next_token_are_an_error(run: Run) -> None:
    """Forgotten padding for sequence parallelism shifts routes like this."""
    recorded(run)
    run.cache.sample(run.version, 2).first -= 1
    with pytest.raises(RoutingError, match=r"layers \[0, 1, 2, 3\], sample 2 of"):
        imposed(run)


def test_routes_of_another_layer_are_an_error(run: Run) -> None:
    """Layers counted within a chunk or a pipeline stage, not in the model, are confused like this."""
    recorded(run)
    for block in run.cache._storage._blocks.values():
        block[:, [1, 2]] = block[:, [2, 1]]
    with pytest.raises(RoutingError, match=r"layers \[1, 2\], sample 0 of"):
        imposed(run)


def test_routes_of_other_tokens_are_an_error(run: Run) -> None:
    """The checksum covers the token ids that entered the model."""
    recorded(run)
    run.microbatches[1].tokens_Bs[0, 3] += 1
    with pytest.raises(RoutingError, match="sample 2 of version 3"):
        imposed(run)


def test_a_sample_is_recorded_once(run: Run) -> None:
    recorded(run)
    with pytest.raises(RoutingError, match="sample 0 of version 3 has been recorded already"):
        recorded(run)


def test_missing_routes_are_an_error_that_names_the_sample(run: Run) -> None:
    with pytest.raises(RoutingError, match=r"sample 0 of version 3, layers \[0, 1, 2, 3\]: there are no routes"):
        imposed(run)
    assert all(router.router_replay is None for router in routers_of(run))


def test_routes_of_a_pass_that_was_not_finished_are_an_error(run: Run) -> None:
    tape = run.tape()
    run.evaluate(tape.record())
    tape.close()
    with pytest.raises(RoutingError, match=r"sample 0 .* has not finished"):
        imposed(run)


@pytest.mark.full
def test_accounts_that_are_not_checked_are_an_error(run: Run) -> None:
    recorded(run)
    with pytest.raises(AssertionError, match="call finish"), run.tape() as tape:
        run.evaluate(tape.impose())


def test_a_microbatch_that_was_not_run_is_an_error(run: Run) -> None:
    tape = run.tape()
    run.microbatches.pop()
    run.evaluate(tape.record())
    with pytest.raises(RoutingError, match=r"layer 0, microbatch 3 \(samples \[6, 7\]\): no router took"):
        tape.finish()


def test_a_sample_in_two_microbatches_is_an_error(run: Run) -> None:
    run.layouts[1] = run.layouts[0]
    with pytest.raises(RoutingError, match="sample 0 is in 2 microbatches"):
        run.tape().record()


def test_looking_at_a_tape_does_not_spend_it(run: Run) -> None:
    """Whoever inspects an object (a debugger, hasattr) calls its properties: no pass may begin so."""
    tape = run.tape()
    for name in dir(tape):
        getattr(tape, name)
    assert all(router.router_replay is None for router in routers_of(run))
    run.evaluate(tape.record())
    tape.finish()
    assert len(run.cache.samples(run.version)) == len(LENGTHS)


@pytest.mark.full
def test_two_tapes_at_once_are_noticed(run: Run) -> None:
    recorded(run)
    with run.tape() as tape:
        run.evaluate(tape.impose())
        with pytest.raises(AssertionError, match="layer 0 has another tape"):
            run.tape().impose()
        tape.finish()


@pytest.mark.full
def test_a_router_asked_between_passes_is_noticed(run: Run) -> None:
    recorded(run)
    with run.tape() as tape:
        routing = tape.impose()
        with pytest.raises(AssertionError, match="layer 0 was asked outside"):
            run.evaluate()
        run.evaluate(routing)
        tape.finish()


def test_a_decoder_built_twice_is_refused(run: Run) -> None:
    model = unwrap(run.state.chunks[0])
    model.other_layer = another_layer(run)
    with pytest.raises(ConfigError, match=r"two routers of one layer: \[0, 1, 1, 2, 3\]"):
        run.tape()


def another_layer(run: Run) -> Any:
    """Return layer 1 of a second build."""
    config = run.state.config
    (other,) = build_model(QWEN, run.state.mesh, run.state.platform, config.platform)
    return unwrap(other).decoder.layers[1]


@pytest.mark.full
def test_a_layer_that_uses_another_router_than_the_armed_one_is_an_error(run: Run) -> None:
    """The chunk calls a layer that is not among its modules: an orphan router."""
    recorded(run)
    layer, other = unwrap(run.state.chunks[0]).decoder.layers[1], another_layer(run)
    layer.forward = other.forward
    with pytest.raises(RoutingError, match=r"layer 1, microbatch 0 \(samples \[0, 1\]\): no router took"):
        imposed(run)


def test_a_fused_router_is_refused(run: Run) -> None:
    router = routers_of(run)[2]
    router.config = dataclasses.replace(router.config, moe_router_fusion=False)
    router.config.moe_router_fusion = True
    with pytest.raises(ConfigError, match=r"the router of layer 2 .moe_router_fusion=True"):
        run.tape()


def test_a_schedule_that_runs_two_microbatches_by_turns_is_refused(run: Run) -> None:
    routers_of(run)[0].config.overlap_moe_expert_parallel_comm = True
    with pytest.raises(ConfigError, match="two microbatches alternately"):
        run.tape()


def test_a_layer_of_the_model_that_no_rank_has_is_an_error(run: Run) -> None:
    recorded(run)
    unwrap(run.state.chunks[0]).config.moe_layer_freq = [1, 1, 0, 1]
    with pytest.raises(RoutingError, match="layer 2 of the model took the routes of 82 tokens"):
        imposed(run)


def test_layers_of_multi_token_prediction_never_alias_the_models(run: Run) -> None:
    """Megatron 0.19 counts them from 1 again and marks them."""
    chunk, router = run.state.chunks[0], routers_of(run)[3]
    assert routed_layers([chunk]) == (0, 1, 2, 3)
    router.layer_number, router.is_mtp_layer = 1, True
    assert routed_layers([chunk]) == (0, 1, 2)


class Syncs(TorchDispatchMode):
    """Count of the operations that wait for the device: a number is read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.full
def test_no_router_waits_for_the_device(run: Run) -> None:
    recorded(run)
    with Syncs() as free:
        run.evaluate()
    with run.tape() as tape:
        routing = tape.impose()
        with Syncs() as replayed:
            run.evaluate(routing)
        tape.finish()
    # One a microbatch, of a tensor in main memory: whether all of its tokens have routes.
    assert replayed.count - free.count <= len(run.microbatches)


def test_gates_of_the_live_choice_are_normalised(run: Run) -> None:
    scores = torch.tensor([[[2.0, 1.0], [0.5, 0.5]]])
    live = torch.tensor([[[3, 1], [0, 2]]])
    (router,) = routers_of(run)[:1]
    assert torch.allclose(live_gates(scores, live, [router])[:, 0, 0], torch.tensor([0.73105858, 0.26894142]))
    router.score_function, router.expert_bias = "sigmoid", torch.tensor([0.0, 0.5, 0.25, 1.0] + 4 * [0.0])
    gates = live_gates(scores, live, [router])
    assert torch.allclose(gates, torch.tensor([2 / 3, 1 / 3])[:, None, None].expand(2, 1, 2))


@pytest.mark.full
@pytest.mark.parametrize("num_experts", [384, 512])
def test_more_experts_than_a_byte_holds_are_replayed(num_experts: int) -> None:
    case = Case(model="", mesh=MeshConfig(), layouts=PADDED)
    model = tiny("qwen3_moe", num_layers=2, num_experts=num_experts, top_k=8)
    with on_one_rank(case, model) as made:
        free = recorded(made)
        assert made.cache.num_bytes == sum(LENGTHS) * model.num_layers * layer_bytes(model)
        chosen = {k for routes in made.routes().values() for codes in routes.values() for k in codes}
        assert max(chosen) >= 256 and min(chosen) >= 0
        with made.tape() as tape:
            assert made.evaluate(tape.impose()) == free
            assert reduced(tape.finish())["routes/changed_fraction"] == 0


def test_what_an_expert_dropped_is_dropped_again() -> None:
    """With other weights the same choices are dropped, and the gates of the others are live."""
    case = Case(model="", mesh=MeshConfig(), layouts=PADDED, recompute="moe")
    with on_one_rank(case, tiny("qwen3_moe", capacity_factor=1.0)) as made:
        free = recorded(made)
        codes = [k for routes in made.routes().values() for of in routes.values() for k in of]
        assert 0 < sum(code >= 8 for code in codes) < len(codes) / 2
        kept: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda module, inputs, output: kept.append(output[1].clone()))
            for router in routers_of(made)
        ]
        with made.tape() as tape:
            assert made.evaluate(tape.impose()) == free
            tape.finish()
        before, kept[:] = list(kept), []
        perturb(made)
        with made.tape() as tape:
            made.gradients(tape.impose())
            tape.finish()
        for hook in hooks:
            hook.remove()
        # Padding is routed live.
        is_real = [slot.has_routes_t for slot in tape._microbatches for _ in range(4)]
        first = [kept[8 * index + layer] for index in range(4) for layer in range(4)]
        again = [kept[8 * index + 4 + layer] for index in range(4) for layer in reversed(range(4))]
        for mask, expected, forward in zip(is_real, before, first, strict=True):
            assert torch.equal(forward[mask], expected[mask])
        assert sum(int(x.sum()) for x in again) == sum(int(x.sum()) for x in first)


def rollouts(run: Run) -> dict[int, RolloutRoutes]:
    """Return the recorded routes as an engine would."""
    routes = run.routes()
    return {
        sample: RolloutRoutes(
            sample_tokens(sample, 120)[:length],
            torch.tensor(
                [[routes[layer][sample * 1000 + n] for layer in range(4)] for n in range(length)], dtype=torch.uint8
            ),
        )
        for sample, length in enumerate(LENGTHS)
    }


@pytest.mark.parametrize("batch_bytes", [1, from_rollouts.BATCH_BYTES])
def test_routes_of_a_rollout_are_replayed(run: Run, batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are checked sample by sample, or all together."""
    monkeypatch.setattr(from_rollouts, "BATCH_BYTES", batch_bytes)
    free = recorded(run)
    generated = rollouts(run)
    run.cache.drop(VERSION)
    cache_rollout_routes(run.cache, VERSION, generated, run.layouts, run.state.mesh)
    with run.tape() as tape:
        assert run.evaluate(tape.impose()) == free
        assert reduced(tape.finish("rollout_routes"))["rollout_routes/changed_fraction"] == 0


def test_stale_routes_of_an_engine_are_counted(run: Run) -> None:
    """The routes of one token repeated over the five that follow it, as engines did at the seam of two chunks."""
    recorded(run)
    generated = rollouts(run)
    run.cache.drop(VERSION)
    before = cache_rollout_routes(run.cache, VERSION, generated, run.layouts, run.state.mesh)
    generated[4].experts_TLK[3:8] = generated[4].experts_TLK[2]
    # An id that comes twice may well have its routes twice.
    generated[4].tokens_T[5] = generated[4].tokens_T[4]
    after = cache_rollout_routes(run.cache, VERSION, generated, run.layouts, run.state.mesh)
    ids = generated[4].tokens_T[2:8].tolist()
    assert reduced(before) == {"rollout_routes/repeated_fraction": 0.0}
    (metric,) = after
    assert metric.value == sum(one != other for one, other in pairwise(ids)) == 4
    assert metric.count == sum(
        one != other for routes in generated.values() for one, other in pairwise(routes.tokens_T.tolist())
    )


@pytest.mark.matrix("error")
@pytest.mark.parametrize("missing", ["error", "live"])
def test_a_preempted_request_has_no_routes(missing: Any) -> None:
    replay = ReplayConfig(kind="r3", missing=missing)
    case = Case(model="", mesh=MeshConfig(), layouts=PADDED, replay=replay)
    with on_one_rank(case, QWEN) as made:
        free = recorded(made)
        generated = rollouts(made)
        experts_TLK = torch.full(generated[3].experts_TLK.shape, -1, dtype=torch.int16)
        generated[3] = dataclasses.replace(generated[3], experts_TLK=experts_TLK)
        made.cache.drop(VERSION)
        cache_rollout_routes(made.cache, VERSION, generated, made.layouts, made.state.mesh)
        if missing == "error":
            with pytest.raises(RoutingError, match="sample 3 of version 3"):
                imposed(made)
            return
        with made.tape() as tape:
            assert made.evaluate(tape.impose()) == free
            metrics = reduced(tape.finish())
        assert metrics["routes/unknown_tokens"] == LENGTHS[3]
        assert metrics["routes/compared_tokens"] == sum(LENGTHS) - LENGTHS[3]


@pytest.mark.parametrize("store", ["device", "pinned"])
def test_completions_of_a_group_share_the_rows_of_their_prompt(store: Any) -> None:
    """Three samples begin alike, two of them with the same routes: rows are kept once, and each is read right."""
    replay = ReplayConfig(kind="r3", missing="live", store=store)
    with on_one_rank(Case(model="", mesh=MeshConfig(), layouts=PADDED, replay=replay), QWEN) as made:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(len(LENGTHS), max(LENGTHS), 4, 8, generator=generator)
        experts = scores.topk(2).indices.sort(-1).values.short()
        experts[2, :6], experts[4, :6] = experts[0, :6], experts[0, :6]
        experts[4, 3, 1] = torch.tensor([0, 1]) if experts[4, 3, 1, 0] else torch.tensor([5, 6])
        experts[[0, 2], 1] = -1
        ids = torch.arange(max(LENGTHS))
        generated = {
            n: RolloutRoutes(ids[:length] + 100 * (ids[:length] >= 6) * n, experts[n, :length], group=n % 2)
            for n, length in enumerate(LENGTHS)
        }
        cache_rollout_routes(made.cache, VERSION, generated, made.layouts, made.state.mesh)
        # Sample 2 shares six positions with sample 0, one without routes; sample 4 shares the first alone.
        num_rows = sum(LENGTHS) - 2 - 5 - 1
        assert made.cache.num_bytes == num_rows * QWEN.num_layers * layer_bytes(QWEN)
        for layout in made.layouts:
            tokens = local_tokens(layout, made.state.mesh)
            locations = made.cache.locate(VERSION, tokens)
            assert not locations.problems
            codes_tlK = made.cache.read(locations, torch.device("cpu"))
            for t in tokens.is_real_t.nonzero()[:, 0].tolist():
                wanted_lK = experts[tokens.samples[int(tokens.sample_index_t[t])], int(tokens.position_t[t])]
                assert bool(locations.has_routes_t[t]) == bool((wanted_lK >= 0).all())
                assert not locations.has_routes_t[t] or codes_tlK[t].tolist() == wanted_lK.tolist()


def test_a_token_that_was_left_out_is_an_error_that_names_it_unless_it_may_be_missing(run: Run) -> None:
    recorded(run)
    generated = rollouts(run)
    run.cache.drop(VERSION)
    experts_TLK = generated[4].experts_TLK.short()
    experts_TLK[[2, 7]] = -1
    generated[4] = RolloutRoutes(generated[4].tokens_T, experts_TLK)
    cache_rollout_routes(run.cache, VERSION, generated, run.layouts, run.state.mesh)
    message = r'sample 4 of version 3: 2 of its 11 tokens have no routes, the first at position 2\..*missing="live"'
    with pytest.raises(RoutingError, match=message):
        imposed(run)


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: routes.short().index_fill(1, torch.tensor([1]), -1), "layer 1, token 0: .* out of range"),
        (lambda routes: routes[:-1], "the engine returned routes"),
        (lambda routes: routes[:, :, :1], "the engine returned routes"),
        (lambda routes: routes.index_fill(2, torch.tensor([1]), 8), r"layer 0, token 0: .* out of range"),
        (lambda routes: routes[:, :, :1].expand(-1, -1, 2), "layer 0, token 0: .* appears twice"),
    ],
)
def test_malformed_routes_are_refused(run: Run, change: Any, message: str) -> None:
    recorded(run)
    generated = rollouts(run)
    run.cache.drop(VERSION)
    good = generated[4]
    generated[4] = RolloutRoutes(good.tokens_T, change(good.experts_TLK))
    with pytest.raises(RoutingError, match=f"sample 4.*{message}") as error:
        cache_rollout_routes(run.cache, VERSION, generated, run.layouts, run.state.mesh)
    assert str(error.value).count("sample ") == 1  # no other of the samples that were checked with it


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint16])
def test_routes_that_are_no_integers_are_refused(run: Run, dtype: torch.dtype) -> None:
    """They ended in an error of torch; of `uint16`, which torch does not compare, too."""
    recorded(run)
    generated = rollouts(run)
    run.cache.drop(VERSION)
    good = generated[4]
    generated[4] = RolloutRoutes(good.tokens_T, good.experts_TLK.to(dtype))
    message = f"sample 4: the engine returned routes as {str(dtype).removeprefix('torch.')}; indices of experts"
    with pytest.raises(RoutingError, match=f"{message} are integers: uint8, int8, int16, int32 or int64"):
        cache_rollout_routes(run.cache, VERSION, generated, run.layouts, run.state.mesh)


def test_routes_in_bytes_of_many_experts_are_refused() -> None:
    case = Case(model="", mesh=MeshConfig(), layouts=PADDED)
    with on_one_rank(case, tiny("qwen3_moe", num_layers=2, num_experts=384)) as made:
        wrapped = RolloutRoutes(torch.zeros(13, dtype=torch.int64), torch.zeros(13, 2, 2, dtype=torch.uint8))
        with pytest.raises(RoutingError, match="indices of 384 experts wrap around"):
            cache_rollout_routes(made.cache, VERSION, {0: wrapped}, made.layouts, made.state.mesh)


def test_perturbing_changes_only_some_weights() -> None:
    weights = {"a.router.weight": torch.zeros(4, 4), "b.weight": torch.zeros(4)}
    changed = perturbed(weights)
    assert changed["a.router.weight"].any() and not changed["b.weight"].any()
