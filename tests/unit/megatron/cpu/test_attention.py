"""The compiled attention computes what float64 computes, and a query's result depends on its own keys alone."""

import itertools
import math
import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.megatron import compiled
from mcore_rl.megatron.compiled import Library, causal_attention

LEVELS = {"x86-64": (), "x86-64-v3": ("avx2", "fma", "bmi2"), "x86-64-v4": ("avx512f", "avx512dq", "avx512vl")}
"""Levels of x86-64 with registers of 4, 8 and 16 numbers, and flags of the processors that have them. ARM's have 4."""


def levels(*, here: bool) -> list[str]:
    """Return the levels that this processor has, or those that it has not."""
    if platform.machine() != "x86_64":
        return []
    flags = set(compiled._processor().split())
    return [level for level, needed in LEVELS.items() if (flags >= {*needed}) == here]


def build(level: str, path: Path) -> Path:
    """Build the file as processors of that level have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "OPTIONS", (*compiled.OPTIONS, f"-march={level}"))
        compiled._compile(path)
    return path


@pytest.fixture(
    scope="module", params=["native", *(pytest.param(level, marks=pytest.mark.full) for level in levels(here=True))]
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The file as other processors have it."""
    if request.param == "native":
        return compiled.library()
    return Library(build(request.param, tmp_path_factory.mktemp("build") / "layers.so"))


@pytest.fixture(autouse=True)
def use_build(built: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(compiled, "library", lambda: built)


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp `[B, N, s]` in float64."""
    shared = query.shape[2] // key.shape[2]
    keys, values = (tensor.double().repeat_interleave(shared, 2) for tensor in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query.double(), keys) * scale
    behind = torch.ones(scores.shape[2:], dtype=torch.bool).triu(key.shape[0] - query.shape[0] + 1)
    scores = scores.masked_fill(behind, -math.inf)
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), values), scores.logsumexp(-1)


def operands(
    lengths: tuple[int, int], rows: int, heads: tuple[int, int], widths: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as a layer has them: the values are a part of a wider tensor."""
    mixed = torch.randn(lengths[1], rows, heads[1], sum(widths) + 3, requires_grad=True)
    key, value, _ = mixed.split([*widths, 3], -1)
    query = torch.randn(rows, heads[0], lengths[0], widths[0], requires_grad=True).permute(2, 0, 1, 3)
    return query, key, value


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    """Compare relative to the largest element: sums of products in fp32 are off by a few dozen units of 2^-24.

    Gradients that cancel are differences of sums of 1 and more. The worst of 40 seeds was 2.6e-6.
    """
    assert actual.dtype == torch.float32
    assert (actual.double() - wanted).abs().max() <= 6e-6 * wanted.abs().max().clamp(min=1.0)


@pytest.mark.parametrize(
    ("lengths", "rows", "heads", "widths"),
    [
        ((1, 1), 1, (1, 1), (32, 32)),
        ((1, 70), 2, (4, 2), (32, 32)),
        ((7, 7), 2, (2, 2), (8, 24)),
        ((48, 48), 1, (4, 1), (64, 64)),
        ((65, 65), 2, (8, 4), (32, 32)),
        ((131, 131), 2, (2, 1), (128, 128)),
        ((100, 300), 1, (4, 2), (64, 64)),
        ((37, 50), 1, (2, 1), (20, 12)),
        ((333, 333), 1, (2, 1), (40, 33)),
        ((90, 90), 1, (2, 2), (12, 12)),
        ((90, 90), 1, (2, 1), (4, 28)),
        ((16, 1040), 1, (2, 1), (16, 128)),
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_float64(
    lengths: tuple[int, int], rows: int, heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    query, key, value = operands(lengths, rows, heads, widths)
    query = query * 2  # Some weights are then near 1.
    actual = causal_attention(query, key, value, widths[0] ** -0.5)
    wanted, _ = expected(query, key, value, widths[0] ** -0.5)
    assert actual.is_contiguous()
    weight = torch.randn_like(actual)
    found = torch.autograd.grad((actual * weight).sum(), (query, key, value))
    gradients = torch.autograd.grad((wanted * weight.double()).sum(), (query, key, value))
    for ours, theirs in zip((actual, *found), (wanted, *gradients), strict=True):
        assert_close(ours, theirs.double())


@pytest.mark.matrix("native-packed")
@pytest.mark.parametrize("lengths", [None, (3, 1, 50, 7)], ids=["prefix", "packed"])
def test_every_width_of_heads_has_the_output_and_gradients_of_float64(lengths: tuple[int, ...] | None) -> None:
    """Widths are filled up to what the loops step by; one that is not runs over into the next numbers."""
    keys = 61
    for width in range(1, 129):
        widths = width, width * 37 % 128 + 1
        query, key, value = operands((41 if lengths is None else keys, keys), 1, (2, 1), widths)
        actual = causal_attention(query, key, value, width**-0.5, lengths)
        weight = torch.randn_like(actual)
        found = torch.autograd.grad((actual * weight).sum(), (query, key, value))
        parts = itertools.pairwise((0, *itertools.accumulate(lengths or (keys,))))
        outputs = [
            expected(query if lengths is None else query[a:b], key[a:b], value[a:b], width**-0.5)[0] for a, b in parts
        ]
        wanted = torch.cat(outputs)
        gradients = torch.autograd.grad((wanted * weight.double()).sum(), (query, key, value))
        for ours, theirs in zip((actual, *found), (wanted, *gradients), strict=True):
            assert_close(ours, theirs.double())


@pytest.mark.matrix("native-0", "x86-64-0")
@pytest.mark.parametrize("window", [0, 6, 40])
def test_every_width_of_heads_attends_to_its_window_alone(window: int, built: Library) -> None:
    """A new token, which alone has a compiled window, sees itself and `window` tokens before it."""
    slots, room, groups, shared = 3, 40, 2, 2
    positions_B = torch.tensor([0, 13, room - 1])
    place_T = torch.arange(room)
    is_seen_BT = (place_T <= positions_B[:, None]) & (place_T >= positions_B[:, None] - window)
    for width in range(1, 129):
        value_width = width * 37 % 128 + 1
        query = torch.randn(slots, groups * shared, width)
        keys, values = torch.randn(slots, room, groups, width), torch.randn(slots, room, groups, value_width)
        mixed = torch.empty(slots, groups * shared, value_width)
        sizes = slots, room, groups, shared, width, value_width, window
        built.decode_attention(
            query, keys, values, positions_B, *sizes, width**-0.5, mixed, torch.empty(shared * groups * room)
        )
        every_key, every_value = (each.double().repeat_interleave(shared, 2) for each in (keys, values))
        scores = torch.einsum("bnd,btnd->bnt", query.double(), every_key) * width**-0.5
        weights = scores.masked_fill(~is_seen_BT[:, None], -math.inf).softmax(-1)
        assert_close(mixed, torch.einsum("bnt,btnd->bnd", weights, every_value))


@pytest.mark.full
def test_the_file_is_built_for_the_processors_that_this_is_none_of(tmp_path: Path) -> None:
    """It cannot run here, but its widths, which are those of the registers, are counted at the build."""
    for level in levels(here=False):
        assert build(level, tmp_path / f"{level}.so").stat().st_size > 0


def test_the_log_sum_exp_is_that_of_float64() -> None:
    query, key, value = (tensor.detach() for tensor in operands((90, 130), 2, (4, 2), (32, 32)))
    bounds = (compiled._numbers(0, 90), compiled._numbers(0, 130))
    _, lse = compiled._attended(query, key, value, 0.5, bounds)
    assert_close(lse, expected(query, key, value, 0.5)[1])


def test_a_gradient_is_the_change_of_the_output() -> None:
    """Without autograd's formulas: by the difference of two outputs, whose fp32 rounding is 1e-7 of a step of 1e-2."""
    inputs = [tensor.detach() for tensor in operands((70, 70), 1, (2, 1), (32, 32))]
    weight = torch.randn(70, 1, 2, 32)
    for changed in range(3):
        direction = torch.randn_like(inputs[changed])
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        (causal_attention(*leaves, 0.2) * weight).sum().backward()
        sums = []
        for step in (1e-2, -1e-2):
            moved = [tensor + step * direction if i == changed else tensor for i, tensor in enumerate(inputs)]
            sums.append((causal_attention(*moved, 0.2).double() * weight).sum())
        slope = float(sums[0] - sums[1]) / 2e-2
        assert leaves[changed].grad is not None
        wanted = float((leaves[changed].grad * direction).double().sum())
        assert slope == pytest.approx(wanted, rel=2e-3, abs=2e-2)


def test_exponentials_are_right_to_three_units_in_the_last_place() -> None:
    """A query over two keys whose scores are 0 and x ln 2 gives them the weights 1 / (1 + 2^x) and 2^x / (1 + 2^x).

    The exponential is right to 1 ulp; the sum, its inverse and the product with it round as well.
    """
    x = -torch.cat([torch.rand(4000) * 100, torch.rand(4000), torch.arange(8.0)])
    query = x[None, :, None, None]
    key = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, len(x), 1, 1)
    value = torch.eye(2)[:, None, None].expand(2, len(x), 1, 2)
    weights = causal_attention(query, key, value, math.log(2))[0, :, 0].double()
    powers = torch.exp2(x.double())
    wanted = torch.stack([1 / (1 + powers), powers / (1 + powers)], 1)
    ulp = torch.exp2(wanted.log2().floor() - 23)
    assert ((weights - wanted).abs() / ulp).max() <= 3


@pytest.mark.parametrize("lengths", [(64, 128, 64), (5, 1, 130, 48, 49), (300,), (1, 1, 1), (9, 3, 16, 70)], ids=str)
def test_packed_sequences_are_each_by_itself_bit_for_bit(lengths: tuple[int, ...]) -> None:
    total = sum(lengths)
    inputs = [tensor.detach().requires_grad_() for tensor in operands((total, total), 1, (4, 2), (32, 32))]
    weight = torch.randn(total, 1, 4, 32)
    packed = causal_attention(*inputs, 0.3, lengths)
    gradients = torch.autograd.grad((packed * weight).sum(), inputs)
    for begin, end in itertools.pairwise((0, *itertools.accumulate(lengths))):
        alone = [tensor.detach()[begin:end].requires_grad_() for tensor in inputs]
        output = causal_attention(*alone, 0.3)
        assert torch.equal(output, packed[begin:end])
        of_alone = torch.autograd.grad((output * weight[begin:end]).sum(), alone)
        assert all(torch.equal(a, b[begin:end]) for a, b in zip(of_alone, gradients, strict=True))


def test_a_result_does_not_depend_on_other_rows_or_later_positions() -> None:
    """Bit for bit, with every length of a last tile: forward passes of a batch and of one row agree."""
    query, key, value = (tensor.detach() for tensor in operands((150, 150), 3, (4, 2), (32, 32)))
    whole = causal_attention(query, key, value, 0.3)
    for row in range(3):
        alone = causal_attention(*(tensor[:, row : row + 1] for tensor in (query, key, value)), 0.3)
        assert torch.equal(alone[:, 0], whole[:, row])
    for length in range(1, 150):
        shorter = causal_attention(*(tensor[:length] for tensor in (query, key, value)), 0.3)
        assert torch.equal(shorter, whole[:length])
        last = causal_attention(query[length:], key, value, 0.3)
        assert torch.equal(last, whole[length:])


def test_gradients_do_not_depend_on_other_rows_or_on_what_was_computed_before() -> None:
    inputs = [tensor.detach() for tensor in operands((150, 150), 3, (4, 2), (32, 32))]
    weight = torch.randn(150, 3, 4, 32)

    def gradients(rows: slice) -> tuple[Tensor, ...]:
        leaves = [tensor[:, rows].clone().requires_grad_() for tensor in inputs]
        return torch.autograd.grad((causal_attention(*leaves, 0.3) * weight[:, rows]).sum(), leaves)

    whole = gradients(slice(None))
    torch.full((1_000_000,), math.nan)  # What memory is given out again has in it.
    for row in range(3):
        for ours, theirs in zip(gradients(slice(row, row + 1)), whole, strict=True):
            assert torch.equal(ours[:, 0], theirs[:, row])


def test_keys_behind_the_last_query_that_sees_them_have_no_gradient() -> None:
    query, key, value = operands((20, 20), 1, (1, 1), (32, 32))
    d_key, d_value = torch.autograd.grad(causal_attention(query, key, value, 0.3)[:7].sum(), (key, value))
    assert d_value[:7].all() and not d_value[7:].any() and not d_key[7:].any()


def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    """Each query has one key with a score of 9e8, and is given its value; the others' are 0."""
    key, value = 3e4 * torch.eye(32)[:, None, None], torch.randn(32, 1, 1, 32)
    matching = torch.arange(32) // 2
    query = key[matching]
    bounds = (compiled._numbers(0, 32),) * 2
    output, lse = compiled._attended(query, key, value, 1.0, bounds)
    assert torch.equal(output, value[matching])
    assert (lse.double() / 9e8 - 1).abs().max() < 3e-7


def test_what_is_not_finite_stays_so_and_in_its_row() -> None:
    """A run finds a bad gradient by that."""
    query, key, value = (tensor.detach().clone() for tensor in operands((70, 70), 3, (2, 1), (32, 32)))
    clean = causal_attention(query, key, value, 0.3)
    key[60, 0, 0, 3], value[60, 2, 0, 3] = math.nan, math.inf
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    broken = causal_attention(*leaves, 0.3)
    assert broken[60:, 0].isnan().all() and not broken[60:, 2, :, 3].isfinite().any()
    assert torch.equal(broken[:, 1], clean[:, 1]) and torch.equal(broken[:48, 0], clean[:48, 0])
    assert torch.autograd.grad(broken.sum(), leaves)[1][:, 0].isnan().any()


def test_without_a_gradient_the_same_is_computed() -> None:
    query, key, value = operands((70, 70), 2, (4, 2), (32, 32))
    with torch.no_grad():
        plain = causal_attention(query, key, value, 0.3)
    recorded = causal_attention(query, key, value, 0.3)
    assert torch.equal(plain, recorded) and recorded.requires_grad and not plain.requires_grad
