"""Compiled layers compute what torch's do: whole models of every family, and experts in the cases of a router."""

import ctypes
import platform as machine
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.compiled import library
from mcore_rl.megatron.mesh import Mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_model
from mcore_rl.model.layers.attention import packed_params
from mcore_rl.model.layers.cpu import self_attention
from mcore_rl.model.layers.cpu.experts import (
    CompiledExperts,
    CompiledRMSNorm,
    CompiledZeroCenteredRMSNorm,
    assign,
    swiglu_experts,
)
from mcore_rl.model.layers.cpu.self_attention import CompiledAttention, split_heads
from tests.tiny_models import TINY

FUSED = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("dots1", "seed_oss", "solar_open"),
}
"""Families whose heads are split, normalized and rotated in one pass."""


def built(family: str, mesh: Mesh, **settings: object) -> nn.Module:
    config = PlatformConfig.model_validate(settings)
    platform = start(config)
    assert platform.layers == settings.get("layers", "cpu")
    return build_model(TINY[family], mesh, platform, config)[0]


def logits_and_gradients(
    chunk: nn.Module, tokens_BS: Tensor, lengths: tuple[int, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the mean of squared logits; of a packed row where there are lengths."""
    positions_BS = torch.cat([torch.arange(length) for length in lengths or (tokens_BS.shape[1],)])
    packed = packed_params(lengths, torch.device("cpu")) if lengths else None
    logits = chunk(tokens_BS, positions_BS.expand_as(tokens_BS), None, packed_seq_params=packed)
    logits.square().mean().backward()
    gradients = {name: weight.grad for name, weight in chunk.named_parameters() if weight.grad is not None}
    return logits.detach(), gradients


@pytest.mark.matrix("deepseek_v3-()", "deepseek_v2-()", "deepseek_v32-()", "qwen3-()")
@pytest.mark.parametrize("lengths", [(), (5, 12, 1, 6), (24,)], ids=str)
@pytest.mark.parametrize("family", sorted(TINY))
def test_a_model_computes_what_it_does_with_torchs_layers(
    family: str, lengths: tuple[int, ...], one_rank: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return split_heads(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(self_attention, "split_heads", counted)
    seed_ranks(1)  # the same weights and tokens whichever tests came before: terms of small gradients cancel
    plain, compiled = (built(family, one_rank, layers=layers) for layers in ("torch", "cpu"))
    compiled.load_state_dict(plain.state_dict())
    tokens_BS = torch.randint(0, TINY[family].vocab_size, (1 if lengths else 2, 24))
    wanted, wanted_gradients = logits_and_gradients(plain, tokens_BS, lengths)
    assert not calls
    found, found_gradients = logits_and_gradients(compiled, tokens_BS, lengths)
    assert len(calls) == (TINY[family].num_layers if family in FUSED else 0)
    kinds = {type(module) for module in compiled.modules()}
    assert kinds & {CompiledRMSNorm, CompiledZeroCenteredRMSNorm}
    assert any(issubclass(kind, CompiledAttention) for kind in kinds)
    assert (CompiledExperts in kinds) == TINY[family].is_moe
    # Gated delta nets amplify the rounding of all layers before them.
    times = 300 if "delta" in TINY[family].mixers else 1
    assert (found - wanted).norm() <= times * 1e-6 * wanted.norm()
    assert found_gradients.keys() == wanted_gradients.keys()
    whole = torch.cat([gradient.flatten() for gradient in wanted_gradients.values()])
    assert (torch.cat([gradient.flatten() for gradient in found_gradients.values()]) - whole).norm() <= times * 1e-6 * (
        whole.norm()
    )
    for name, gradient in wanted_gradients.items():
        # Both are in fp32: terms of the gradient of a head's norm cancel, and each rounding counts for more there.
        assert (found_gradients[name] - gradient).norm() <= times * 3e-6 * gradient.norm(), name


@pytest.mark.matrix("deepseek_v2", "deepseek_v3", "deepseek_v32", "mixtral", "solar_open")
@pytest.mark.parametrize("family", sorted(TINY))
def test_rounded_products_change_a_model_by_their_rounding(family: str, one_rank: Mesh) -> None:
    """Eight bits of each operand; experts are chosen by what changes so, and another one would change more."""
    exact, rounded = (built(family, one_rank, layers="cpu", bf16_products=rounds) for rounds in (False, True))
    rounded.load_state_dict(exact.state_dict())
    tokens_BS = torch.randint(0, TINY[family].vocab_size, (2, 24))
    wanted, found = (logits_and_gradients(chunk, tokens_BS, ())[0] for chunk in (exact, rounded))
    per_token_BS = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 1e-4 < per_token_BS.median() < (2e-1 if "delta" in TINY[family].mixers else 2e-2)


def routed(num_tokens: int, num_experts: int, per_token: int) -> Tensor:
    chosen = torch.rand(num_tokens, num_experts).topk(per_token).indices
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True)


def experts_of(routed_TE: Tensor, *, rounds: bool = False) -> Callable[..., Tensor]:
    """Return `swiglu_experts` for a router's choice."""
    expert_N, token_N = routed_TE.t().nonzero(as_tuple=True)
    index_N = token_N * routed_TE.shape[1] + expert_N
    assignment = assign(token_N, index_N, routed_TE.sum(0).tolist())
    return lambda *operands: swiglu_experts(*operands, assignment, rounds=rounds)


def operands_of(num_tokens: int, num_experts: int, width: int = 24, inner: int = 20) -> list[Tensor]:
    """Inputs, gates and both weights."""
    tensors = (
        torch.randn(num_tokens, width),
        torch.rand(num_tokens, num_experts),
        torch.randn(num_experts, 2 * inner, width) / 5,
        torch.randn(num_experts, width, inner) / 5,
    )
    return [tensor.requires_grad_() for tensor in tensors]


def in_float64(routed_TE: Tensor, input: Tensor, gates: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    gate_up = torch.einsum("td,efd->tef", input.double(), fc1.double())
    gate, up = gate_up.chunk(2, -1)
    active = nn.functional.silu(gate) * up
    return torch.einsum("tef,edf,te->td", active, fc2.double(), gates.double() * routed_TE)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 4), (90, 4), (1300, 3), (40, 64)])
def test_experts_of_a_router_are_those_of_float64(num_tokens: int, num_experts: int) -> None:
    """Also more than one block, and experts without a token."""
    routed_TE, operands = routed(num_tokens, num_experts, 2), operands_of(num_tokens, num_experts)
    actual, expected = experts_of(routed_TE)(*operands), in_float64(routed_TE, *operands)
    weight = torch.randn_like(actual)
    found = torch.autograd.grad((actual * weight).sum(), operands)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), operands)
    for ours, theirs in zip((actual, *found), (expected, *wanted), strict=True):
        assert (ours.double() - theirs.double()).abs().max() <= 4e-6 * theirs.abs().max()
    with torch.no_grad():
        assert torch.equal(experts_of(routed_TE)(*operands), actual)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(90, 4), (1300, 3), (40, 64)])
def test_rounded_experts_are_those_of_float64(num_tokens: int, num_experts: int) -> None:
    """Within what rounding of operands changes, in which the gates' products and all sums have no part."""
    routed_TE, operands = routed(num_tokens, num_experts, 2), operands_of(num_tokens, num_experts)
    actual, unrounded = (experts_of(routed_TE, rounds=rounds)(*operands) for rounds in (True, False))
    found, wanted = (torch.autograd.grad(out.square().sum(), operands) for out in (actual, unrounded))
    for ours, exact in zip((actual, *found), (unrounded, *wanted), strict=True):
        assert (ours - exact).abs().max() <= 2**-5 * exact.abs().max()
    assert (actual - unrounded).abs().max() > 2**-12 * unrounded.abs().max()
    # Inputs and first weights that bf16 has: what is left are the rounded activations, each times its gate.
    x, _, w1, w2 = (operand.detach().bfloat16().double() for operand in operands)
    gate, up = torch.einsum("td,efd->tef", x, w1).chunk(2, -1)
    active = nn.functional.silu(gate) * up * operands[1].detach()[..., None]
    exact_TD = torch.einsum("tef,edf,te->td", active.bfloat16().double(), w2, routed_TE.double())
    # One activation in 2,000 lies so near the middle of two bf16 that fp32 rounds it to the other, which its whole row
    # shows; rows have 40.
    error_TD = (actual - exact_TD).abs() / exact_TD.abs().max()
    assert error_TD.max() < 2**-8 and (error_TD < 1e-6).double().mean() > 0.75


def test_experts_keep_what_is_not_finite_and_their_result_is_the_same_again() -> None:
    """A run finds a bad gradient by that, and a resume is bit-equal by this."""
    experts, (input, *others) = experts_of(routed(50, 4, 2)), [one.detach() for one in operands_of(50, 4)]
    once = experts(input, *others)
    assert torch.equal(once, experts(input, *others))
    input[7, 3], input[9] = float("nan"), 1e30
    broken = experts(input, *others)
    assert broken[7].isnan().all() and not broken[9].isfinite().all()
    kept = [row for row in range(50) if row not in (7, 9)]
    assert torch.equal(broken[kept], once[kept])


def test_experts_make_no_denormal_numbers_of_ordinary_ones() -> None:
    """Each would cost an Intel processor 150 cycles: the activation of a layer took seven times as long."""
    underflow = {"x86_64": 0x10, "aarch64": 0x08}[machine.machine()]  # FE_UNDERFLOW
    libm = ctypes.CDLL("libm.so.6")
    operands, experts = operands_of(60, 4, 32, 12), experts_of(routed(60, 4, 2))
    library()
    libm.feclearexcept(underflow)
    experts(*operands).square().sum().backward()
    assert not libm.fetestexcept(underflow)
    assert (torch.tensor(1e-30) * 1e-10 < 1e-38).item() and libm.fetestexcept(underflow)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_model_in_another_type_is_an_error(dtype: torch.dtype, one_rank: Mesh) -> None:
    chunk, tokens_BS = built("qwen3_moe", one_rank).to(dtype), torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ctypes.ArgumentError, match=r"compute in fp32, and a tensor is torch\.\w+: .*layers"):
        logits_and_gradients(chunk, tokens_BS, ())
