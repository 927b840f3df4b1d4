"""Settings whose meaning depends on the mesh: valid, and another mesh trains differently."""

from collections.abc import Iterator

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig


def mesh_dependences(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a sentence for each setting that means something else on another mesh; the config has passed its checks."""
    moe, train = config.model.moe, config.train
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
