"""Settings that depend on the mesh: they are valid, but train differently on another mesh."""

from collections.abc import Iterator

from mcore_rl.config.model import MoEConfig
from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig


def mesh_dependences(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a sentence for each setting that has a different meaning on another mesh; the config has passed its
    checks.
    """
    moe, train = config.model.moe, config.train
    if config.model.is_moe and isinstance(config, RlRunConfig):
        yield from _packed_by_tokens(moe, "rl.update.max_tokens_per_microbatch")
    elif config.model.is_moe and isinstance(config, PreferenceRunConfig):
        yield from _packed_by_tokens(moe, "data.tokens_per_microbatch")
    if not (config.model.is_moe and moe.balance == "global_aux_loss" and moe.aux_loss_coeff):
        return
    dp = world_size // config.mesh.model_parallel
    reason = (
        'model.moe.balance="global_aux_loss" evens out the load over the micro-batches of a step so far, on all '
        f"{dp} data-parallel ranks"
    )
    if isinstance(config, RlRunConfig):
        yield (
            f"{reason}: the first micro-batches of a step see little of it, and another mesh.dp or packing trains "
            'differently. "seq_aux_loss" does not depend on either.'
        )
        return
    num_microbatches = train.global_batch // (train.micro_batch * dp)
    if num_microbatches > 1:
        yield (
            f"{reason}: with {num_microbatches} micro-batches a step on each rank the first sees 1/{num_microbatches} "
            f"of the batch, and another mesh.dp or train.micro_batch trains differently. With train.micro_batch="
            f'{train.micro_batch * num_microbatches} it is the whole batch; "seq_aux_loss" does not depend on the mesh.'
        )


def _packed_by_tokens(moe: MoEConfig, field: str) -> Iterator[str]:
    """Yield each setting that depends on which sequences share a microbatch, for microbatches packed up to `field`
    tokens; otherwise the rows of a micro-batch are the same on every mesh.
    """
    packs = f"and another mesh or {field} packs others together and trains"
    if moe.balance == "aux_loss" and moe.aux_loss_coeff:
        yield (
            f'model.moe.balance="aux_loss" evens out the load of each microbatch, {packs} slightly differently. '
            '"seq_aux_loss" depends on neither, nor does model.moe.aux_loss_coeff=0.'
        )
    if moe.capacity_factor is not None:
        yield (
            f"model.moe.capacity_factor={moe.capacity_factor:g} drops the tokens that experts have no room for in a "
            f"microbatch, {packs} differently. Unset, it depends on neither."
        )
