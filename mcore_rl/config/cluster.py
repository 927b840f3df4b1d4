"""A Slurm cluster: what its nodes have, how a job asks for them, and how Python is reached there."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from mcore_rl.config.section import Section


class SlurmConfig(Section):
    """What a job asks Slurm for; an empty text leaves the choice to Slurm."""

    partition: str = ""
    """The partition, or several with commas."""
    account: str = ""
    """Whom the time is charged to."""
    qos: str = ""
    """The quality of service."""
    constraint: str = ""
    """Features that nodes must have."""
    time: str = "1-00:00:00"
    """Limit of one attempt, as minutes, hours:minutes:seconds or days-hours:minutes:seconds; a run takes as many
    attempts as it needs."""
    exclusive: bool = True
    """No other job on the nodes."""
    gpus_by: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for: `--gpus-per-node=8`, `--gres=gpu:8`, or not at all, where a node comes with them."""
    gpu_type: str = ""
    """As in `--gpus-per-node=h100:8`; empty: none is named."""
    options: tuple[str, ...] = ()
    """Further `#SBATCH` lines, as "--comment=moe"."""


class NodeConfig(Section):
    """One node."""

    gpus: NonNegativeInt = 8
    """GPUs, each with one rank; 0: ranks are processes on the cores."""
    ranks: NonNegativeInt = 0
    """Ranks of a node without GPUs; 0 where there are GPUs."""
    gpu_memory_gib: NonNegativeFloat = 80.0
    """Memory of one GPU."""
    reserved_gib: NonNegativeFloat = 6.0
    """Of it, what is not for tensors: CUDA's context, buffers of NCCL and DeepEP, fragmentation."""
    cores: NonNegativeInt = 0
    """Cores of a node that its tasks share; 0: as Slurm gives them."""
    memory_gib: NonNegativeInt = 0
    """Main memory; 0: all of the node's (`--mem=0`)."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks that a job starts on a node."""
        return self.gpus or self.ranks


class ContainerConfig(Section):
    """The container that ranks run in, if any."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """`pyxis`: enroot by srun's --container options; `apptainer`: `apptainer exec`."""
    image: str = ""
    """A file that all nodes see (.sqsh, .sif), or a reference such as docker://registry#name:tag."""
    mounts: tuple[str, ...] = ()
    """from:to[:flags]. The folder of submission and the run's are mounted under their own names in any case."""
    options: tuple[str, ...] = ()
    """Further options of srun (pyxis) or of `apptainer exec`, one a word."""


class PythonConfig(Section):
    """How the right Python is found."""

    setup: tuple[str, ...] = ()
    """Lines of bash before every command on a node: `module load`, `source .../activate`, `conda activate`."""
    command: str = "python"
    """What starts Python after them, in the container where there is one."""


class PathsConfig(Section):
    """Where a job may write besides its run_dir."""

    scratch: str = ""
    """A folder of the node's own, made on each node and given as TMPDIR; may hold $SLURM_JOB_ID. Empty: it stays."""
    cache: str = ""
    """Where compiled kernels are kept (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR); empty: they choose."""


class ChecksConfig(Section):
    """Whether nodes are fit, looked at before ranks start. A node that fails is excluded and the job requeued."""

    node: bool = True
    """Count the GPUs, ask for their memory, and add up numbers over all ranks with the bandwidth that this had."""
    min_bandwidth_gbps: NonNegativeFloat = 0.0
    """Slowest all-reduce that is fit, in Gbit/s of bus bandwidth; 0: it is only told."""
    timeout_s: PositiveInt = 300
    """A node that has not answered by then is not fit."""
    pre_node: tuple[str, ...] = ()
    """Lines of bash, run once on every node before the job; a status that is not 0 makes the node unfit."""
    post_node: tuple[str, ...] = ()
    """Lines of bash, run once on every node after each attempt; their status is only told."""


class SurvivalConfig(Section):
    """How a job is carried over limits and failures."""

    starter: Literal["torchrun", "srun"] = "torchrun"
    """`torchrun`: one task a node, which starts its ranks; `srun`: one task a rank."""
    signal_s: PositiveInt = 600
    """Seconds ahead of the time limit at which the run is asked to save; more than a step and a save take."""
    max_attempts: PositiveInt = 3
    """Attempts in a row that fail without a new checkpoint before the job gives up."""


class ClusterConfig(Section):
    """One cluster, as `--cluster CLUSTER.toml` names it."""

    name: str = "cluster"
    """For messages."""
    environment: dict[str, str] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Environment variables of all ranks: the interconnect's (NCCL, UCX), CUDA_DEVICE_MAX_CONNECTIONS."""
    slurm: SlurmConfig = SlurmConfig()
    node: NodeConfig = NodeConfig()
    container: ContainerConfig = ContainerConfig()
    python: PythonConfig = PythonConfig()
    paths: PathsConfig = PathsConfig()
    checks: ChecksConfig = ChecksConfig()
    survival: SurvivalConfig = SurvivalConfig()
