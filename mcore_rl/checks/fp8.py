"""Checks that a model's 8-bit products have sizes that TransformerEngine multiplies.

Megatron pads the tokens of experts (`get_fp8_align_size`) but not widths or the tokens of other layers:
TransformerEngine refuses unsuitable sizes in the first forward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.families import family_of


@dataclass(frozen=True, slots=True)
class Width:
    """One side of a weight."""

    name: str
    """Field, or product of fields."""
    size: int
    ranks: int = 1
    """Number of ranks over which it is cut."""
    axis: str = "tp"
    """Field of the mesh with that number."""


def fp8_violations(
    model: ModelConfig,
    mesh: MeshConfig,
    platform: PlatformConfig,
    micro_batch: int,
    seq_length: int,
    field: str,
) -> Iterator[str]:
    """Yield a sentence for each width, or number of tokens on a rank, that 8-bit products do not accept.

    Args:
        model: The model.
        mesh: The mesh.
        platform: The platform, with fp8 or without.
        micro_batch: Sequences of a forward pass.
        seq_length: Positions of a sequence.
        field: Field that sets `seq_length`.
    """
    multiple = platform.fp8_multiple
    if multiple == 1:
        return
    recipe = f'platform.fp8_recipe="{platform.fp8_recipe}"'
    remedy = ""
    if platform.fp8_recipe == "auto":
        recipe += ", which is mxfp8 on Blackwell,"
        remedy = ' or, for other GPUs and multiples of 16, another recipe than "auto" and "mxfp8"'
    for width in _widths(model, mesh):
        here, rest = divmod(width.size, width.ranks)
        if rest or not here % multiple:  # the checks of the mesh refuse a width that does not divide
            continue
        cut = f" / mesh.{width.axis}={width.ranks} = {here}" if width.ranks > 1 else ""
        yield (
            f"{width.name} = {width.size}{cut} is not a multiple of {multiple}, as {recipe} needs of the widths on a "
            f'rank. Make it {_near(width.size, multiple * width.ranks)}, or set platform.fp8="none"{remedy}.'
        )
    slices = mesh.cp * (mesh.tp if mesh.sequence_parallel else 1)
    tokens, rest = divmod(micro_batch * seq_length, slices)
    if not rest and tokens % multiple:
        unit = multiple * slices
        near = _near(seq_length, unit // gcd(unit, micro_batch))
        yield (
            f"{field}={seq_length} x train.micro_batch={micro_batch} on {slices} ranks are {tokens} tokens each, not a "
            f"multiple of {multiple}, as {recipe} needs. Make {field} {near}, or "
            f'set platform.fp8="none"{remedy}.'
        )


def _widths(model: ModelConfig, mesh: MeshConfig) -> Iterator[Width]:
    """Yield the sides of all weights that TransformerEngine multiplies; the embedding, the output and the router are
    not among them.
    """
    family, mla, moe = family_of(model), model.mla, model.moe
    yield Width("model.hidden_size", model.hidden_size)
    if family.is_latent:
        if mla.q_lora_rank is not None:
            yield Width("model.mla.q_lora_rank", mla.q_lora_rank)
        yield Width("model.mla.kv_lora_rank", mla.kv_lora_rank)
        yield Width("model.mla.kv_lora_rank + qk_rope_head_dim", mla.kv_lora_rank + mla.qk_rope_head_dim)
        for name, size in (
            ("(qk_nope_head_dim + qk_rope_head_dim)", mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            ("(qk_nope_head_dim + v_head_dim)", mla.qk_nope_head_dim + mla.v_head_dim),
            ("v_head_dim", mla.v_head_dim),
        ):
            yield Width(f"model.num_heads x model.mla.{name}", model.num_heads * size, mesh.tp)
    else:
        groups = max(model.num_kv_heads, mesh.tp)  # a rank has at least one
        yield Width("model.num_heads x model.head_dim", model.num_heads * model.head_dim, mesh.tp)
        yield Width(
            "(model.num_heads + 2 x model.num_kv_heads) x model.head_dim",
            (model.num_heads + 2 * groups) * model.head_dim,
            mesh.tp,
        )
    if not all(model.moe_layers):
        yield Width("model.ffn_hidden_size", model.ffn_hidden_size, mesh.tp)
    if model.is_moe:
        yield Width("model.moe.ffn_hidden_size", moe.ffn_hidden_size, mesh.etp, "etp")
    if moe.shared_experts and model.is_moe:
        yield Width("the shared experts' width", moe.shared_width, mesh.tp)


def _near(size: int, multiple: int) -> str:
    """Return the multiples around `size`, for a message."""
    below = size // multiple * multiple
    return " or ".join(str(near) for near in (below, below + multiple) if near)
