"""The kernels of routing, computed by Triton's interpreter, beside Megatron's own function and the hooks of a tape.

Chosen experts are equal; gates and gradients are in float32 on both sides, with exponentials of two libraries: 1e-6.
"""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function as by_megatron

from mcore_rl.backend.gpu import routing
from mcore_rl.replay.router_hooks import ChunkMicrobatch, RouterHook

TOKENS, EXPERTS, TOP_K = 300, 24, 3
KINDS = {
    "softmax of the chosen": {},
    "softmax of all": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid with a bias": {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, EXPERTS)},
    "groups of experts": {
        "score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, EXPERTS), "num_groups": 4, "group_topk": 2,
        "scaling_factor": 1.5,
    },
}  # fmt: skip


class Routers:
    """The part of a chunk's routers that a hook asks."""

    layers, has_capacity = (1,), False

    def __init__(self, microbatch, is_forward):
        self.microbatch, self.is_forward = microbatch, is_forward

    def current(self, column):
        return self.microbatch, self.is_forward

    def distinct(self, column, experts_tK):
        return experts_tK


def example(tokens=TOKENS, experts=EXPERTS):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(tokens, experts, generator=generator).mul_(3)
    imposed = torch.stack([torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(tokens)])
    return logits, imposed, torch.randn(tokens, experts, generator=generator)


def results(route, logits, pull, top_k=TOP_K, **kind):
    logits = logits.clone().requires_grad_()
    gates, routed = route(logits, top_k, **kind)
    (gradient,) = torch.autograd.grad((gates * pull).sum(), logits)
    return gates.detach(), routed, gradient


def assert_equal(found, wanted):
    assert torch.equal(found[1], wanted[1]) and found[1].dtype == torch.bool
    torch.testing.assert_close((found[0], found[2]), (wanted[0], wanted[2]), rtol=1e-5, atol=1e-6)
    assert not found[0][~found[1]].any()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_gates_choices_and_gradients_are_megatrons(kind):
    logits, _, pull = example()
    assert_equal(results(routing.route, logits, pull, **kind), results(by_megatron, logits, pull, **kind))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_the_gate_of_one_expert_is_megatrons(score_function):
    logits, _, pull = example()
    kind = {"top_k": 1, "score_function": score_function, "use_pre_softmax": True}
    assert_equal(results(routing.route, logits, pull, **kind), results(by_megatron, logits, pull, **kind))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("imposes", "is_forward", "has_live"),
    [(False, True, False), (True, True, False), (True, False, False), (True, True, True)],
)
def test_a_tape_records_and_imposes_the_same_experts_scores_and_gates(kind, imposes, is_forward, has_live):
    """Recording, replay, replay in a recomputation, and replay in which some tokens are routed live."""
    logits, imposed, pull = example()
    outcomes = []
    for route in (routing.route, by_megatron):
        microbatch = ChunkMicrobatch(
            index=0,
            num_experts=EXPERTS,
            imposed_ltK=imposed[None] if imposes else None,
            is_live_t1=(torch.arange(TOKENS) % 3 == 0)[:, None] if has_live else None,
            live_ltK=torch.full((1, TOKENS, TOP_K), -1),
            cached_ltK=None,
            scores_ltK=torch.zeros(1, TOKENS, TOP_K),
        )
        hook = RouterHook(Routers(microbatch, is_forward), 0)
        found = results(route, logits, pull, router_replay=hook, **kind)
        outcomes.append((found, microbatch.live_ltK, microbatch.scores_ltK))
    (by_kernel, live, scores), (wanted, wanted_live, wanted_scores) = outcomes
    assert_equal(by_kernel, wanted)
    # Which experts a tape stores and in which order, and the scores of which it makes gates, to the last bit.
    assert torch.equal(live, wanted_live) and torch.equal(scores, wanted_scores)
    assert (live >= 0).all() == is_forward
    if imposes and not has_live:
        assert torch.equal(by_kernel[1].nonzero()[:, 1].view(TOKENS, TOP_K), imposed.sort(1).values)


def test_the_largest_are_torchs_and_of_equal_ones_the_leftmost():
    logits, _, _ = example(tokens=7, experts=200)
    found, wanted = routing.top(logits, 8), torch.topk(logits, 8)
    assert torch.equal(found[0], wanted.values) and torch.equal(found[1], wanted.indices)
    assert routing.top(torch.zeros(2, 20), 3)[1].tolist() == [[0, 1, 2]] * 2
    odd = torch.tensor([[0.0, torch.nan, -torch.inf, 1.0], [-torch.inf] * 4])
    assert routing.top(odd, 3)[1].tolist() == [[1, 3, 0], [0, 1, 2]]
    assert routing.top(torch.zeros(0, 20), 3)[1].shape == (0, 3)
