"""Row order of matrices that Megatron packs: queries, keys and values, or a gate and an up-projection."""

from typing import NamedTuple

from mcore_rl.config.model import ModelConfig


class Rows(NamedTuple):
    """Order of a matrix's rows: `groups` times, the rows of each projection in turn; `sizes` has their numbers."""

    groups: int
    sizes: tuple[int, ...]


def packed_rows(layer: str, num_rows: int, model: ModelConfig) -> Rows:
    """Return the row order of the linear layer of this name, such as "linear_qkv", or of a rank's part of it."""
    if layer == "linear_qkv":
        width = model.head_dim
        sizes: tuple[int, ...] = (model.num_heads // model.num_kv_heads * width, width, width)
    elif layer == "linear_fc1":
        sizes = (num_rows // 2, num_rows // 2)
    else:
        sizes = (num_rows,)
    groups, rest = divmod(num_rows, sum(sizes))
    assert not rest, f"{layer} has {num_rows} rows, no multiple of {sizes}"
    return Rows(groups, sizes)
