"""Products in which each row's result is independent of the other rows, so that engine and trainer agree in every bit.

A library chooses kernels, with other orders of sums, by the number of rows: a generation step has one for each
completion, a training pass one for each token. On a CPU, `InvariantProducts` computes in tiles of fixed size and
`attention` takes keys in blocks of fixed length; both are slow. On a GPU the package `batch_invariant_ops` replaces
torch's products.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mcore_rl.errors import ConfigError

TILE_ROWS = 16
"""Rows of a product that the library gets at once."""
KEY_BLOCK = 64
"""Keys that a query's scores, and their products with values, are computed for at once."""
GPU_PACKAGE = "batch_invariant_ops"


class InvariantProducts(TorchDispatchMode):
    """Computes the matrix products inside `with` in tiles of TILE_ROWS rows, forwards and backwards.

    On a GPU, where products are replaced, it only divides batched products into these.
    """

    def __init__(self, *, is_cuda: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = {torch.ops.aten.bmm.default: _each} if is_cuda else PRODUCTS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, or the tiled form of a product."""
        product = self._products.get(func)
        return func(*args, **(kwargs or {})) if product is None else product(*args, **(kwargs or {}))


def is_on() -> bool:
    """Return whether products are batch-invariant in this process."""
    return any(isinstance(mode, InvariantProducts) for mode in _get_current_dispatch_mode_stack())


def switch_on(*, is_cuda: bool, is_deterministic: bool) -> None:
    """Make the products of this process batch-invariant from now on. Raises ConfigError if there is a GPU without the
    package of kernels, or torch may choose kernels with results that depend on timing.
    """
    if is_cuda:
        if not is_deterministic:
            raise ConfigError(
                "platform.batch_invariant=true on a GPU with platform.deterministic=false, which allows kernels whose "
                "result depends on timing. Set platform.deterministic=true."
            )
        if find_spec(GPU_PACKAGE) is None:
            raise ConfigError(
                "platform.batch_invariant=true on a GPU needs kernels whose result for a row does not depend on the "
                f"other rows, and the package {GPU_PACKAGE} is not installed. Install it, or set "
                "platform.batch_invariant=false."
            )
        import_module(GPU_PACKAGE).enable_batch_invariant_mode()
    if not is_on():
        InvariantProducts(is_cuda=is_cuda).__enter__()  # type: ignore[no-untyped-call]


def _mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    num_rows = left_MK.shape[0]
    if not num_rows or not right_KN.shape[1]:
        return left_MK.new_zeros(num_rows, right_KN.shape[1])
    # A fixed layout of the operands, because a library chooses its kernel by that too.
    right_KN = right_KN.contiguous()
    padded = pad(left_MK, (0, 0, 0, -num_rows % TILE_ROWS)).contiguous()
    return torch.cat([torch.mm(tile, right_KN) for tile in padded.split(TILE_ROWS)])[:num_rows]


def _addmm(bias: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * _mm(left_MK, right_KN) + beta * bias


def _bmm(left_BMK: Tensor, right_BKN: Tensor) -> Tensor:
    if not len(left_BMK):
        return left_BMK.new_zeros(0, left_BMK.shape[1], right_BKN.shape[2])
    return torch.stack([_mm(left_MK, right_KN) for left_MK, right_KN in zip(left_BMK, right_BKN, strict=True)])


def _each(left_BMK: Tensor, right_BKN: Tensor) -> Tensor:
    return torch.stack([torch.mm(*pair) for pair in zip(left_BMK, right_BKN, strict=True)])


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Products of groups of rows `[N, K]` with a matrix each, `[E, K, N']`; in a weight's gradient N is summed over."""
    ends = offs.tolist()
    groups = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    if right.dim() == 3:
        return torch.cat([_mm(left[rows], matrix) for rows, matrix in zip(groups, right, strict=True)])
    return torch.stack([_mm(left[:, rows], right[rows]) for rows in groups])


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm.default: _mm,
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.bmm.default: _bmm,
}
if hasattr(torch.ops.aten, "_grouped_mm"):
    PRODUCTS[torch.ops.aten._grouped_mm.default] = _grouped_mm


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Return the output `[s, B, N, Dv]` of queries `[s, B, N, D]` over keys `[S, B, G, D]` and values `[S, B, G, Dv]`.

    Keys after a query's last visible key do not change a bit of its output. `visible` is bool, broadcast to `[B, N, s,
    S]`; each query needs at least one key.
    """
    length, batch, heads, _ = query.shape
    num_keys, groups = key.shape[0], key.shape[2]
    rest = -num_keys % KEY_BLOCK

    def by_group(x: Tensor) -> Tensor:
        """Return `[s, B, N, D]` as `[B * G, N / G * s, D]`."""
        return x.permute(1, 2, 0, 3).reshape(batch, groups, -1, x.shape[3]).flatten(0, 1)

    queries = by_group(query) * scale
    keys, values = (pad(by_group(x), (0, 0, 0, rest)) for x in (key, value))
    # The sum of the weights is one more column of the values: a product like the others.
    values = torch.cat([values, values.new_ones(*values.shape[:2], 1)], 2)
    hidden = ~visible.expand(batch, heads, length, num_keys).reshape(batch * groups, -1, num_keys)
    hidden = pad(hidden, (0, rest), value=True)
    scores = torch.cat([torch.bmm(queries, part.transpose(1, 2)) for part in keys.split(KEY_BLOCK, 1)], 2)
    scores = scores.masked_fill(hidden, -torch.inf)
    # A maximum does not depend on its order, and hidden keys have weights of exactly 0, which add nothing.
    weights = (scores - scores.detach().amax(2, keepdim=True)).exp()
    mixed = queries.new_zeros(())
    for weights_part, values_part in zip(weights.split(KEY_BLOCK, 2), values.split(KEY_BLOCK, 1), strict=True):
        mixed = mixed + torch.bmm(weights_part, values_part)
    output = mixed[..., :-1] / mixed[..., -1:]
    return output.view(batch, heads, length, -1).permute(2, 0, 1, 3)
