"""The gated delta rule is transformers', packed or apart, in parts, or token by token."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from mcore_rl.megatron.kernels import gated_delta_by
from mcore_rl.model.layers import delta as delta_rule
from mcore_rl.model.layers.delta import causal_conv, causal_conv_step, chunk_grid, gated_delta, gated_delta_step

LENGTHS = (5, 200, 64, 1, 130, 65, 63, 128)
"""Around multiples of a chunk, in no order."""
CPU = torch.device("cpu")
GROUPS, HEADS, KEY, VALUE = 2, 4, 16, 24


def operands(num_tokens: int, decay: float = 3.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator)

    query, key, value = normal(GROUPS, KEY), normal(GROUPS, KEY), normal(HEADS, VALUE)
    decays, betas = (torch.rand(num_tokens, HEADS, generator=generator) for _ in range(2))
    return [tensor.requires_grad_() for tensor in (query, key, value, -decay * decays, betas)]


def of_transformers(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs and states of each sequence alone, by transformers' recurrence."""
    outputs, states = [], []
    for query, key, value, decay, beta in zip(*(tensor.split(LENGTHS) for tensor in tensors), strict=True):
        repeated = [heads.repeat_interleave(HEADS // GROUPS, 1)[None] for heads in (query, key)]
        output, state = theirs.torch_recurrent_gated_delta_rule(
            *repeated,
            value[None],
            g=decay[None],
            beta=beta[None],
            initial_state=None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outputs.append(output[0])
        states.append(state)
    return torch.cat(outputs), torch.cat(states)


def error(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).detach().norm() / wanted.detach().norm())


def gradients(output: Tensor, states: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    scales = torch.linspace(-1, 1, output.numel()).view_as(output)
    return torch.autograd.grad((output * scales).sum() + states.square().sum(), tensors)


def test_packed_sequences_have_the_outputs_states_and_gradients_of_transformers() -> None:
    tensors = operands(sum(LENGTHS))
    ours, wanted = gated_delta(*tensors, chunk_grid(LENGTHS, CPU)), of_transformers(tensors)
    assert max(map(error, ours, wanted)) <= 3e-6
    found = zip(gradients(*ours, tensors), gradients(*wanted, tensors), strict=True)
    assert max(error(*pair) for pair in found) <= 1e-5


def test_keys_and_queries_that_are_not_made_unit_vectors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor.detach() for tensor in operands(sum(LENGTHS))]
    monkeypatch.setattr(delta_rule, "unit", lambda heads: heads)
    output, _ = gated_delta(*tensors, chunk_grid(LENGTHS, CPU))
    assert not error(output, of_transformers(tensors)[0]) <= 1e-2


@torch.no_grad()
def test_a_sequence_in_two_parts_is_the_whole() -> None:
    tensors = operands(200)
    whole, after = gated_delta(*tensors, chunk_grid((200,), CPU))
    for cut in (1, 63, 64, 70, 199):
        first, states = gated_delta(*(tensor[:cut] for tensor in tensors), chunk_grid((cut,), CPU))
        rest = chunk_grid((200 - cut,), CPU)
        second, states = gated_delta(*(tensor[cut:] for tensor in tensors), rest, states)
        assert error(torch.cat([first, second]), whole) <= 5e-6 and error(states, after) <= 5e-6


@torch.no_grad()
def test_token_by_token_is_the_whole() -> None:
    tensors = operands(130)
    whole, after = gated_delta(*tensors, chunk_grid((130,), CPU))
    states, steps = torch.zeros(1, HEADS, KEY, VALUE), []
    for place in range(130):
        output, states = gated_delta_step(*(tensor[place : place + 1] for tensor in tensors), states)
        steps.append(output)
    assert error(torch.cat(steps), whole) <= 5e-6 and error(states, after) <= 5e-6


def test_strong_decay_has_finite_gradients() -> None:
    """The logarithm of a chunk's decay is far below the range of exp."""
    tensors = operands(256, decay=120.0)
    output, states = gated_delta(*tensors, chunk_grid((256,), CPU))
    assert all(bool(tensor.isfinite().all()) for tensor in gradients(output, states, tensors))


def test_the_convolution_sees_its_own_sequence_only_and_hands_on_its_last_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs_TC, weight_CW = (torch.randn(*shape, generator=generator) for shape in ((sum(LENGTHS), 6), (6, 4)))
    ours, last = causal_conv(inputs_TC, weight_CW, chunk_grid(LENGTHS, CPU))
    apart = [
        theirs.causal_conv1d_fn(part.T[None], weight_CW, activation="silu")[0].T for part in inputs_TC.split(LENGTHS)
    ]
    assert error(ours, torch.cat(apart)) <= 1e-6
    # A sequence of one token: two zeros before it, then it.
    assert torch.equal(last[3, -1], inputs_TC[269]) and not last[3, :-1].any()
    # Each sequence goes on by two tokens, at once and one after the other.
    more = torch.randn(2 * len(LENGTHS), 6, generator=generator)
    together, after = causal_conv(more, weight_CW, chunk_grid((2,) * len(LENGTHS), CPU), last)
    first, between = causal_conv_step(more[0::2], weight_CW, last)
    second, at_end = causal_conv_step(more[1::2], weight_CW, between)
    assert error(torch.stack([first, second], 1).flatten(0, 1), together) <= 1e-6
    assert torch.equal(at_end, after)


def test_layers_of_a_pass_share_one_copy_of_the_sequences_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the host's numbers on a device is a copy that a layer would wait for."""
    grid = chunk_grid((3, 5), CPU)
    assert chunk_grid((3, 5), CPU) is grid and grid.bounds_R1.tolist() == [0, 3, 8]
    inputs_TC, weight_CW, before = torch.rand(8, 2), torch.rand(2, 4), torch.rand(2, 3, 2)
    heads, gates_TH = torch.rand(8, 2, 4), torch.rand(8, 2)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a copy from the host"))
    causal_conv(inputs_TC, weight_CW, grid, before)
    given = []

    def kernel(*heads: torch.Tensor, cu_seqlens: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(cu_seqlens)
        return heads[2], heads[2]

    gated_delta_by(kernel, heads, heads, heads, gates_TH, gates_TH, grid.bounds_R1, None)
    assert given[0] is grid.bounds_R1
