"""The conformance kit on a toy program whose faults are known."""

import pytest
import torch
from torch import Tensor

from mcore_rl.testing.conformance import ReplayPass, ReplayResult, RoutedModel, conformance, format_problems

MODEL = RoutedModel(num_layers=3, num_experts=8, top_k=2)
LENGTHS = (5, 9, 5)


class Toy:
    """Layers of experts that multiply; a fault is the name of what goes wrong in it."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __call__(self, mesh: str, passes):
        return [self.result(mesh, one) for one in passes]

    def result(self, mesh: str, one: ReplayPass) -> ReplayResult:
        if one.routes is not None and self.fault != "takes everything":
            problems = [*format_problems(one.routes, MODEL)] + [
                "length" for x, length in zip(one.routes, LENGTHS, strict=True) if len(x) != length
            ]
            # One row for all tokens shows in the routes alone, and may be refused.
            if problems:
                return ReplayResult(error=f"refused on {mesh}: {problems[0]}")
        generator = torch.Generator().manual_seed(1)
        weight_LDE = torch.randn(MODEL.num_layers, 4, MODEL.num_experts, generator=generator)
        value_LE = torch.rand(MODEL.num_layers, MODEL.num_experts, generator=generator)
        tokens = [torch.randn(length, 4, generator=generator) for length in LENGTHS]
        if one.weights == "new":
            weight_LDE = weight_LDE + torch.randn(weight_LDE.shape, generator=generator)
        weight_LDE.requires_grad_()
        logprobs, routes = [], []
        for index, x_TD in enumerate(tokens):
            scores_TLE = torch.einsum("td,lde->tle", x_TD, weight_LDE)
            live_TLK = scores_TLE.topk(MODEL.top_k).indices
            routes.append(live_TLK)
            experts_TLK = live_TLK if one.routes is None else self.imposed(mesh, one.routes[index], live_TLK)
            experts_TLK = experts_TLK[: len(x_TD)].clamp(0, MODEL.num_experts - 1)
            gates_TLK = scores_TLE.gather(2, experts_TLK).softmax(-1)
            if self.fault == "dead routers":
                gates_TLK = gates_TLK.detach() + 0 * gates_TLK
            logprobs.append((gates_TLK * value_LE.expand_as(scores_TLE).gather(2, experts_TLK)).sum((1, 2)))
        gradients: dict[str, Tensor] = {}
        if one.backward:
            torch.cat(logprobs).square().sum().backward()
            gradients = {"router.weight": weight_LDE.grad}
        return ReplayResult(logprobs=tuple(x.detach() for x in logprobs), routes=tuple(routes), gradients=gradients)

    def imposed(self, mesh: str, experts_TLK: Tensor, live_TLK: Tensor) -> Tensor:
        if self.fault == "imposes nothing":
            return live_TLK
        if self.fault == "another layer on the second mesh" and mesh == "two":
            return experts_TLK.roll(1, 1)
        return experts_TLK


def failed(fault: str, **options):
    return {(row.group, row.case) for row in conformance(Toy(fault), MODEL, ["one", "two"], **options).failures}


def test_a_right_program_has_no_failure_and_a_row_for_everything():
    found = conformance(Toy(), MODEL, ["one", "two"], faults={"x": Toy("another layer on the second mesh"), "y": Toy()})
    verdicts = {row.case: row.verdict for row in found.rows if row.group == "faults"}
    assert [row.case for row in found.failures] == ["x"] and verdicts["y"] == "harmless"
    lines = found.table().splitlines()
    assert len(lines) == 2 + len(found.rows) and all(line.count("|") == 6 for line in lines)
    assert {row.verdict for row in found.rows if row.case == "an expert twice"} == {"refused"}
    assert {row.verdict for row in found.rows if row.case == "experts in another order"} == {"harmless"}


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("imposes nothing", ("meshes", "impose: other numbers than live routes")),
        ("imposes nothing", ("damage", "layers in reverse")),
        ("takes everything", ("damage", "an expert twice")),
        ("takes everything", ("damage", "one layer short")),
        ("dead routers", ("meshes", "impose: routers learn")),
        ("another layer on the second mesh", ("meshes", "impose: other weights give the first mesh's gradients")),
        ("another layer on the second mesh", ("damage", "shifted by one token")),
    ],
)
def test_faults_of_a_program_are_found(fault, case):
    assert case in failed(fault)


def test_an_engine_that_only_records_is_asked_for_nothing_else():
    found = conformance(Toy("imposes nothing"), MODEL, ["one", "two"], imposes=False)
    assert not found.failures and len(found.rows) == 3


def test_routes_that_no_router_makes_are_named():
    right = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:2] for i in range(12)])
    right = right.view(4, 3, 2)
    assert list(format_problems((right,), MODEL)) == []
    twice = right.clone()
    twice[2, 1] = 5
    for wrong, reason in (
        (right[:, :2], "of shape [4, 2, 2], not [T, 3, 2]"),
        (right.float(), "are no indices"),
        (right.bool(), "are no indices"),
        (twice, "token 2, layer 1: an expert of [5, 5] appears twice"),
        (right + 8, "token 0, layer 0"),
        (right[:1].expand(4, 3, 2), "all 4 tokens have the same routes"),
    ):
        (problem,) = format_problems((wrong,), MODEL)
        assert reason in problem
    wide = RoutedModel(num_layers=3, num_experts=300, top_k=2)
    (problem,) = format_problems((right.to(torch.uint8),), wide)
    assert "300 experts wrap around" in problem
