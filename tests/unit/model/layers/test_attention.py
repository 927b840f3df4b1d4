import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.layers.attention import KeyValueCache, SDPAttention, gathered_order, packed_params
from mcore_rl.model.layers.cache import StepTokens
from mcore_rl.model.layers.cpu.self_attention import CompiledAttention
from tests.unit.model.layers import oracles
from tests.unit.model.layers.oracles import assert_close, gradients, small_config

LENGTHS = (128, 576, 37)
Layer = Callable[..., SDPAttention]


@pytest.fixture(params=[SDPAttention, CompiledAttention])
def layer(request: pytest.FixtureRequest) -> Layer:
    """Makes attention of torch's functions, and compiled attention."""

    def make(options: dict[str, Any] | None = None, **changes: object) -> SDPAttention:
        attention: SDPAttention = request.param(
            small_config(**changes), 1, AttnMaskType.causal, "self", **options or {}
        )
        return attention

    return make


def heads(length: int, rows: int = 2, num_heads: int = 4, width: int = 8) -> Tensor:
    return torch.randn(length, rows, num_heads, width, requires_grad=True)


def assert_equal_attention(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    expected = expected.flatten(-2)
    assert_close(actual, expected, 2e-6)
    pairs = zip(gradients(actual, inputs), gradients(expected, inputs), strict=True)
    for ours, theirs in pairs:
        assert_close(ours, theirs, 5e-6)


def assert_closed_form(
    attention: SDPAttention,
    sizes: tuple[int, int, int, int],
    groups: int,
    window: int | None = None,
    scale: float = 8**-0.5,
) -> None:
    """Compare output and gradients with the closed form's; sizes are of queries, keys, and both widths."""
    num_queries, num_keys, width, value_width = sizes
    query, key = heads(num_queries, width=width), heads(num_keys, num_heads=groups, width=width)
    value, sinks_N = heads(num_keys, num_heads=groups, width=value_width), attention.softmax_offset
    visible = oracles.causal(num_queries, num_keys, window)
    expected = oracles.attention(query, key, value, visible, scale, sinks_N)
    inputs = [query, key, value] + ([] if sinks_N is None else [sinks_N])
    assert_equal_attention(attention(query, key, value, None), expected, inputs)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_causal_attention_is_that_of_the_closed_form(one_rank: Mesh, layer: Layer, length: int, groups: int) -> None:
    assert_closed_form(layer(), (length, length, 8, 8), groups)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(64, 192), (1, 50), (13, 40)])
def test_fewer_queries_than_keys_are_the_last_positions(
    one_rank: Mesh, layer: Layer, num_queries: int, num_keys: int
) -> None:
    assert_closed_form(layer(), (num_queries, num_keys, 8, 8), 2)


@pytest.mark.full
@pytest.mark.parametrize("value_width", [6, 12])
@pytest.mark.parametrize("length", LENGTHS)
def test_values_may_have_another_width_than_keys(one_rank: Mesh, layer: Layer, length: int, value_width: int) -> None:
    attention = layer({"softmax_scale": 0.7, "k_channels": 10, "v_channels": value_width})
    assert_closed_form(attention, (length, length, 10, value_width), 4, scale=0.7)


@pytest.mark.parametrize("window", [1, 5, 1000])
def test_a_window_hides_what_is_further_back(one_rank: Mesh, layer: Layer, window: int) -> None:
    assert_closed_form(layer(window_size=(window, 0)), (128, 128, 8, 8), 2, window)


def test_a_window_is_as_wide_as_in_megatrons_attention(one_rank: Mesh, layer: Layer) -> None:
    config = small_config(window_size=(5, 0))
    query, key, value = heads(24), heads(24, num_heads=2), heads(24, num_heads=2)
    expected = DotProductAttention(config, 1, AttnMaskType.causal, "self")(query, key, value, None)
    assert_close(layer(window_size=(5, 0))(query, key, value, None), expected, 2e-6)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(128, 128), (37, 37), (13, 40)])
def test_sinks_take_their_share_of_the_softmax(
    one_rank: Mesh, layer: Layer, num_queries: int, num_keys: int, window: int | None
) -> None:
    attention = layer(softmax_type="learnable", window_size=None if window is None else (window, 0))
    assert attention.softmax_offset is not None
    assert_closed_form(attention, (num_queries, num_keys, 8, 8), 2, window)


def test_sinks_are_those_of_megatrons_attention_and_saved_as_such(one_rank: Mesh, layer: Layer) -> None:
    config = small_config(softmax_type="learnable")
    megatrons = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    query, key, value = heads(24), heads(24, num_heads=2), heads(24, num_heads=2)
    ours = layer(softmax_type="learnable")
    ours.load_state_dict(megatrons.state_dict())
    assert_close(ours(query, key, value, None), megatrons(query, key, value, None), 2e-6)
    metadata = {"dp_cp_group": one_rank.groups.dp_cp}
    saved = [module.sharded_state_dict("attention.", (), metadata) for module in (ours, megatrons)]
    assert saved[0].keys() == saved[1].keys() == {"attention.softmax_offset"}
    assert ours.softmax_offset.tensor_model_parallel is True


MANY = (9, 3, 16, 70, 2, 70, 64, 10, 65, 1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [(64, 128, 64), (5, 1, 130, 64), (40,), MANY], ids=str)
def test_packed_sequences_do_not_see_one_another(
    one_rank: Mesh, layer: Layer, lengths: tuple[int, ...], window: int | None
) -> None:
    num_tokens = sum(lengths)
    query, key, value = heads(num_tokens), heads(num_tokens, num_heads=2), heads(num_tokens, num_heads=2)
    visible = torch.block_diag(*[oracles.causal(n, n, window) for n in lengths]).bool()
    row = [tensor[:, 0] for tensor in (query, key, value)]
    expected = oracles.attention(*(tensor[:, :1] for tensor in (query, key, value)), visible, 8**-0.5)
    packed = packed_params(lengths, torch.device("cpu"))
    attention = layer(window_size=None if window is None else (window, 0))
    actual = attention(*row, None, packed_seq_params=packed)
    assert_equal_attention(actual, expected[:, 0], [query, key, value])


def test_lengths_of_a_packed_row_are_not_read_from_the_device(one_rank: Mesh, layer: Layer) -> None:
    packed = packed_params((5, 3), torch.device("meta"))  # whose values cannot be read
    row = [heads(8)[:, 0] for _ in range(3)]
    assert layer()(*row, None, packed_seq_params=packed).shape == (8, 32)


def test_gathered_parts_are_found_in_their_natural_order() -> None:
    lengths, ranks = (8, 16), 2
    natural = torch.arange(24)
    chunks = [sequence.chunk(2 * ranks) for sequence in natural.split(lengths)]
    parts = [
        torch.cat([chunk for one in chunks for chunk in (one[rank], one[2 * ranks - 1 - rank])])
        for rank in range(ranks)
    ]
    gathered = torch.cat(parts)
    assert torch.equal(gathered[gathered_order(lengths, ranks)], natural)


def test_dropout_drops_its_share_and_keeps_the_mean(one_rank: Mesh, layer: Layer) -> None:
    attention = layer(attention_dropout=0.25)
    value = torch.ones(37, 50, 4, 8)
    query = torch.zeros(37, 50, 4, 8)
    first = attention(query, query, value, None).view(37, -1)
    assert first.mean() == pytest.approx(1.0, abs=0.02)
    # The first query sees one key: its weight is dropped, or enlarged.
    torch.testing.assert_close(first[0].unique(), torch.tensor([0.0, 4 / 3]))
    assert (first[0] == 0).float().mean() == pytest.approx(0.25, abs=0.06)
    attention.eval()
    torch.testing.assert_close(attention(query, query, value, None).view(37, -1), torch.ones_like(first))


@pytest.mark.parametrize("length", LENGTHS)
def test_bf16_differs_by_rounding_only(one_rank: Mesh, length: int) -> None:
    inputs = [heads(length, num_heads=n).detach().bfloat16().requires_grad_() for n in (4, 2, 2)]
    expected = oracles.attention(*inputs, oracles.causal(length, length), 8**-0.5).flatten(-2)
    actual = SDPAttention(small_config(), 1, AttnMaskType.causal, "self")(*inputs, None)
    pairs = zip((actual, *gradients(actual, inputs)), (expected, *gradients(expected, inputs)), strict=True)
    # torch rounds the weights before their product with the values, and the gradient of the output is in bf16, too.
    for ours, theirs in pairs:
        assert_close(ours, theirs, 2**-6)


def test_gradients_are_right_in_every_combination_of_group_and_row(one_rank: Mesh, layer: Layer) -> None:
    """Each query head reads the group that is its own, each row its own keys."""
    query, key, value = heads(64, rows=2), heads(64, rows=2, num_heads=2), heads(64, rows=2, num_heads=2)
    output = layer()(query, key, value, None).view(64, 2, 4, 8)
    for row, head in itertools.product(range(2), range(4)):
        (d_key,) = torch.autograd.grad(output[:, row, head].sum(), key, retain_graph=True)
        touched = d_key.abs().sum((0, 3)) > 0
        expected = torch.zeros(2, 2, dtype=torch.bool)
        expected[row, head // 2] = True
        assert torch.equal(touched, expected)


@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize(("width", "value_width"), [(8, 8), (33, 17)])
def test_a_new_token_attends_to_its_own_slot(
    one_rank: Mesh, layer: Layer, window: int | None, width: int, value_width: int
) -> None:
    """Slots are of other lengths, and what older completions have left behind them is not read."""
    positions = [0, 5, 11]
    keys, values = torch.randn(5, 14, 2, width), torch.randn(5, 14, 2, value_width)
    for slot, position in enumerate(positions):
        keys[slot, position + 1 :], values[slot, position + 1 :] = 1e3, 1e3
    query, key, value = (torch.randn(4, 1, 4, width), torch.randn(4, 1, 2, width), torch.randn(4, 1, 2, value_width))
    attention = layer(window_size=None if window is None else (window, 0))
    step = StepTokens(
        ids_T=torch.zeros(4, dtype=torch.int64),
        slots_T=torch.tensor([0, 1, 2, -1]),  # the last one is padding
        positions_T=torch.tensor([*positions, 0]),
        num_decode=3,
        longest=12,
        spans=(),
    )
    attention.cache = KeyValueCache(keys, values, step)
    with torch.no_grad():
        mixed = attention(query, key, value, None)
    for slot, position in enumerate(positions):
        seen_keys, seen_values = keys[slot, : position + 1, None], values[slot, : position + 1, None]
        assert torch.equal(seen_keys[-1, 0], key[slot, 0])
        visible = oracles.causal(1, position + 1, window)
        expected = oracles.attention(query[slot][None], seen_keys, seen_values, visible, 8**-0.5)
        assert_close(mixed[slot], expected[0].flatten(-2), 2e-6)
    assert not mixed[3].any()
