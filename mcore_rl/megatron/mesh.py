"""The mesh of ranks; the one file that uses Megatron's `parallel_state`."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from mcore_rl.config.mesh import MeshConfig


@dataclass(frozen=True, slots=True)
class Axis:
    """One way to group ranks: the group that this rank belongs to, its rank there, and the group's size."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Groups of this rank on every axis. `dp` excludes context parallelism, `dp_cp` includes it."""

    config: MeshConfig
    groups: ProcessGroupCollection
    world: Axis
    tp: Axis
    pp: Axis
    cp: Axis
    dp: Axis
    dp_cp: Axis
    ep: Axis
    etp: Axis
    expert_dp: Axis
    is_first_stage: bool = field(init=False)
    """Whether this rank embeds tokens."""
    is_last_stage: bool = field(init=False)
    """Whether this rank computes the loss."""
    sequence_parallel: bool = field(init=False)
    """Whether norms and dropout work on 1 / tp of the sequence."""

    def __post_init__(self) -> None:
        decided = {
            "is_first_stage": self.pp.rank == 0,
            "is_last_stage": self.pp.rank == self.pp.size - 1,
            "sequence_parallel": self.config.sequence_parallel and self.tp.size > 1,
        }
        for name, value in decided.items():
            object.__setattr__(self, name, value)


def build_mesh(config: MeshConfig, timeout_s: float = 600.0) -> Mesh:
    """Collective over the world: check the sizes of a mesh and make all its groups; the process group must be up.

    A collective of a group may wait `timeout_s` seconds.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        distributed_timeout_minutes=timeout_s / 60,  # any number of minutes will do
        create_gloo_process_groups=False,  # for optimizers that save by way of main memory, as ours do not
    )
    if torch.cuda.is_available():
        # NCCL connects a group's ranks in its first collective: here all of them are at hand, and nothing is timed.
        # The list is in the order in which all ranks make groups, so that no two wait for each other.
        for group in parallel_state._global_process_group_list or ():
            if group is not None and dist.get_backend(group) != "gloo":  # None stands for the world
                dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    world = dist.group.WORLD
    assert world is not None
    groups = ProcessGroupCollection.use_mpu_process_groups()
    names = {"tp": "tp", "pp": "pp", "cp": "cp", "dp": "dp", "dp_cp": "dp_cp", "ep": "ep", "etp": "expt_tp"}
    axes = {name: _axis(getattr(groups, group)) for name, group in (names | {"expert_dp": "expt_dp"}).items()}
    return Mesh(config=config, groups=groups, world=_axis(world), **axes)


def destroy_mesh() -> None:
    """End the groups, so that another mesh can be built in this process."""
    if dist.is_initialized():
        # Megatron forgets its groups without ending them: their threads and sockets would stay.
        for group in parallel_state._global_process_group_list or ():
            if group is not None:  # None stands for the world
                dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def seed_ranks(seed: int) -> None:
    """Seed weights and dropout so that ranks with other weights draw other numbers, and Python and numpy, which a
    user's code may draw from, on each rank otherwise.
    """
    # Megatron adds offsets for tensor and expert parallelism by itself, for the pipeline it leaves them to the caller.
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    random.seed(seed + dist.get_rank())
    np.random.seed((seed + dist.get_rank()) % 2**32)  # numpy takes no larger seed


def is_first_chunk(chunk: int | None) -> bool:
    """Return whether model chunk `chunk` (None without interleaving) of this rank embeds tokens."""
    return bool(parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk))


def is_last_chunk(chunk: int | None) -> bool:
    """Return whether model chunk `chunk` (None without interleaving) of this rank ends in the output layer."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk))


def layer_groups(*names: str) -> ProcessGroupCollection:
    """Return the groups `names` (such as "tp", "cp") of the present mesh, for a layer that Megatron builds without."""
    return ProcessGroupCollection.use_mpu_process_groups(required_pgs=list(names))


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))
