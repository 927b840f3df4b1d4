"""Chunks of any size, of rectangles with steps and exchanged axes, make the same tensor; so do checksums."""

import pytest
import torch
from torch import Tensor

from mcore_rl.convert.copying.tensors import TargetTensor, chunks_of, fill
from mcore_rl.families.weight_map import AxisRange, Copies, Region, RegionCopy, composed
from mcore_rl.storage.checksums import PartChecksum

EXPERTS, HIDDEN, WIDTH = 3, 5, 4


class Memory:
    """A source of tensors that are there."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        out.copy_(self.tensors[name][tuple(slice(*span) for span in where)].reshape(out.shape))

    def prefetch(self, name: str, where: Region) -> None:
        pass

    def checksum(self, name: str, where: Region) -> PartChecksum | None:
        return None


def fused() -> tuple[Tensor, Tensor, list[RegionCopy]]:
    """gpt_oss's experts: gate and up in turn and transposed; what Megatron has of them; the copies."""
    theirs = torch.randn(EXPERTS, HIDDEN, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    ours = torch.stack([torch.cat([expert[:, 0::2].T, expert[:, 1::2].T]) for expert in theirs])[None]
    copies = [
        RegionCopy(
            (AxisRange(0, 1), AxisRange(e, e + 1), AxisRange(half * WIDTH, (half + 1) * WIDTH), AxisRange(0, HIDDEN)),
            "theirs",
            (AxisRange(e, e + 1), AxisRange(0, HIDDEN), AxisRange(half, 2 * WIDTH, 2)),
            transposed=True,
        )
        for e in range(EXPERTS)
        for half in (0, 1)
    ]
    return theirs, ours, copies


def assembled(name: str, like: Tensor, copies: list[RegionCopy], source: Memory, limit: int) -> Tensor:
    target = TargetTensor(name=name, shape=tuple(like.shape), dtype=torch.float32, copies=Copies(copies))
    return torch.cat([fill(chunk, source).reshape(-1) for chunk in chunks_of(target, limit)]).view(like.shape)


@pytest.mark.parametrize("limit", [1, 24, 40, 70, 10_000])
def test_chunks_of_any_size_make_the_tensor_in_both_directions(limit: int) -> None:
    theirs, ours, copies = fused()
    assert torch.equal(assembled("ours", ours, copies, Memory({"theirs": theirs}), limit), ours)
    back = [RegionCopy(copy.where, "ours", copy.into, copy.transposed) for copy in copies]
    assert torch.equal(assembled("theirs", theirs, back, Memory({"ours": ours}), limit), theirs)
    around = composed(back, {"ours": Copies(copies)})
    assert torch.equal(assembled("theirs", theirs, around, Memory({"theirs": theirs}), limit), theirs)


def test_what_no_copy_covers_is_zeros() -> None:
    copy = RegionCopy((AxisRange(1, 3), AxisRange(0, 2)), "theirs", (AxisRange(0, 2), AxisRange(0, 2)))
    source = Memory({"theirs": torch.ones(2, 2)})
    assert assembled("ours", torch.empty(4, 2), [copy], source, 8).tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
