"""Memory that leaves the device between phases: views stay, bits come back."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mcore_rl.train.offload import StoredBytes, WaitingMemory, piece_sizes

CPU = torch.device("cpu")


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("num_bytes", [0, 1, 2**20, 2**20 + 1, 5 * 2**20 + 3, 17 * 2**30, 17 * 2**30 + 12_345_678])
def test_page_locked_memory_is_cut_so_that_torch_rounds_up_less_than_a_mebibyte(num_bytes: int) -> None:
    sizes = list(piece_sizes(num_bytes))
    # torch's allocator of page-locked memory takes the next power of two for each piece.
    taken = sum(1 << (size - 1).bit_length() for size in sizes)
    assert sum(sizes) == num_bytes <= taken < num_bytes + 2**20


def test_bytes_in_pieces_come_back_as_they_were() -> None:
    source, target = torch.randn(700_001, dtype=torch.float64), torch.zeros(700_001, dtype=torch.float64)
    stored = StoredBytes(source.nbytes, "host", CPU)
    stored.put(source)
    stored.get(target)
    assert torch.equal(source, target) and stored.num_bytes == 8 * 700_001


def test_bytes_leave_and_come_back_under_the_views_of_them() -> None:
    flat, other = torch.randn(1000), torch.randn(7, dtype=torch.bfloat16)
    view, part = flat[100:400].view(30, 10), flat.detach()[5:6]
    before = flat.clone(), other.clone(), view.clone()
    memory = WaitingMemory(lambda: [view, part, other, torch.empty(0)], "host", CPU)
    memory.leave()
    assert nbytes([flat, other]) == 0
    with memory.present(), memory.present():
        assert torch.equal(flat, before[0]) and torch.equal(other, before[1]) and torch.equal(view, before[2])
        view.add_(1)
    assert nbytes([flat, other]) == 0
    with memory.present():
        assert torch.equal(view, before[2] + 1) and torch.equal(flat[:100], before[0][:100])
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    # Out, in, out, in, out: a flat buffer once, not once for each view of it.
    assert memory.moved_bytes == 5 * (4000 + 14)


def test_what_never_changes_is_stored_once_and_scratch_never() -> None:
    constant, scratch = torch.arange(9.0), torch.ones(9)
    memory = WaitingMemory(lambda: [constant], "host", CPU, changes=False)
    space = WaitingMemory(lambda: [scratch], "host", CPU, is_scratch=True)
    for _ in range(3):
        memory.leave()
        space.leave()
        assert nbytes([constant, scratch]) == 0
        with memory.present(), space.present():
            assert constant.tolist() == list(range(9)) and scratch.untyped_storage().nbytes() == 36
    assert (memory.moved_bytes, space.moved_bytes) == (4 * 36, 0)


def test_on_the_device_nothing_moves() -> None:
    tensor = torch.ones(3)
    memory = WaitingMemory(lambda: [tensor], "device", CPU)
    memory.leave()
    with memory.present():
        assert tensor.tolist() == [1, 1, 1]
    assert (tensor.tolist(), memory.moved_bytes) == ([1, 1, 1], 0)
