"""A Slurm cluster: the hardware of its nodes, the options of its jobs, and how Python is started on a node."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.section import ByKind, Section, Text


class SlurmConfig(Section):
    """Options of a job; `none` leaves the choice to Slurm."""

    partition: Text | None = None
    """Partition, or several with commas between them."""
    account: Text | None = None
    """Account that is charged for the job."""
    qos: Text | None = None
    """Quality of service, as sbatch's `--qos`."""
    constraint: Text | None = None
    """Features that the nodes must have."""
    time: str = "1-00:00:00"
    """Time limit of one attempt, as minutes, hours:minutes:seconds or days-hours:minutes:seconds. A run takes as many
    attempts as it needs."""
    exclusive: bool = True
    """Keep other jobs off the nodes."""
    gpus_by: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """Option that requests GPUs: `--gpus-per-node=8`, `--gres=gpu:8`, or none if nodes always come with their GPUs."""
    gpu_type: Text | None = None
    """Type of GPU, as in `--gpus-per-node=h100:8`; `none`: any type."""
    mail_user: Text | None = None
    """Address that mail about jobs goes to; `none`: no mail."""
    mail_type: str = "END,FAIL,REQUEUE,TIME_LIMIT_90"
    """Events that are mailed to mail_user, by their names in sbatch."""
    options: tuple[str, ...] = ()
    """Additional `#SBATCH` lines, such as "--comment=moe"."""


class NodeConfig(Section):
    """The hardware of a node."""

    gpus: NonNegativeInt = 8
    """GPUs per node, each with a rank; 0: ranks are processes on the CPU cores."""
    ranks: PositiveInt | None = None
    """Ranks per node, on nodes without GPUs; `none` on nodes with GPUs."""
    device: Text | None = None
    """GPU model by its name in `mcore-rl plan` (A100, H100, H200, B200, GB200, MI300X, ...); `none`: unknown, and plans
    have memory and schedule but no times."""
    link_domain: PositiveInt | Literal["auto"] = "auto"
    """Number of GPUs connected by NVLink; `auto`: all GPUs of a node, or 72 for an NVL72."""
    nic_gbit_per_s: PositiveFloat | Literal["auto"] = "auto"
    """Network bandwidth per GPU in Gbit/s; `auto`: the usual value for systems with this device."""
    gpu_memory_gib: NonNegativeFloat = 80.0
    """Memory per GPU in GiB."""
    reserved_gib: NonNegativeFloat = 6.0
    """GPU memory in GiB that tensors cannot use: CUDA context, NCCL and DeepEP buffers, fragmentation."""
    cores: PositiveInt | None = None
    """Cores per node, shared by the node's tasks; `none`: as many as Slurm assigns."""
    bind: bool = True
    """Bind each rank to its share of the cores near its GPU, and order the GPUs by NUMA node, so that tensor-parallel
    neighbours share a NUMA node; only on exclusive nodes (slurm.exclusive)."""
    memory_gib: PositiveInt | Literal["all"] = "all"
    """Main memory per node in GiB; `all`: all of the node's memory (`--mem=0`)."""

    @cached_property
    def ranks_per_node(self) -> int:
        """Number of ranks that a job starts on each node."""
        return self.gpus or self.ranks or 0


class RatesConfig(Section):
    """Speeds measured by a run on this cluster, which plans use for their times (`mcore-rl plan --calibrate RUN`)."""

    source: Text | None = None
    """Run that measured the other values; `none`: plans use published runs, with ranges as wide as their errors."""
    host_layer_s: NonNegativeFloat | None = None
    """Seconds that the host takes to launch the forward pass of an MoE layer; `none`: the value from published runs."""
    speed: PositiveFloat = 1.0
    """Factor on the fraction of the device's peaks that published runs reach."""
    imbalance: Annotated[float, Field(ge=1)] | None = None
    """Tokens on the fullest rank of an expert-parallel group, as a multiple of the mean; `none`: unknown, and plans
    show the cost of several values."""
    rollout: PositiveFloat | None = None
    """Measured / planned seconds of a rollout; `none` (also for the next two): the planned time is a lower bound."""
    logprobs: PositiveFloat | None = None
    """Measured / planned seconds of the passes for logprobs and values."""
    updates: PositiveFloat | None = None
    """Measured / planned seconds of the updates of a rollout batch."""


class ContainerSection(Section):
    """The container that ranks run in, if any."""

    kind: str
    """Program that runs the container. `none`: no container. `pyxis`: enroot, through srun's --container options.
    `apptainer`: `apptainer exec`."""


class NoContainer(ContainerSection):
    """Ranks run outside containers."""

    kind: Literal["none"] = "none"


class ContainerConfig(ContainerSection):
    """A container."""

    kind: Literal["pyxis", "apptainer"]
    image: Text
    """Image: a file that all nodes see (.sqsh, .sif), or a reference such as docker://registry#name:tag."""
    mounts: tuple[str, ...] = ()
    """Mounts as from:to[:flags]. The working folder and the run's folder are always mounted, under their own names."""
    options: tuple[str, ...] = ()
    """Additional options of srun (pyxis) or of `apptainer exec`, one argument each."""
    timeout_s: PositiveInt = 1800
    """Seconds that a node may take to set up the image (download, conversion) before its checks begin."""


class PythonConfig(Section):
    """Commands that find the right Python on a node."""

    setup: tuple[str, ...] = ()
    """Lines of bash to run before every command on a node: `module load`, `source .../activate`, `conda activate`. They
    run with `set -e`: a node where a line fails is unfit, and if a line fails on every node, the job ends."""
    command: str = "python"
    """Command that starts Python after `setup`, inside the container if `container.kind` is set."""


class PathsConfig(Section):
    """Folders that a job may write to, in addition to its run_dir."""

    scratch: Text | None = None
    """Folder on the node's own disk, created on each node and exported as TMPDIR; the path may contain $SLURM_JOB_ID.
    `none`: TMPDIR is unchanged."""
    cache: Text | None = None
    """Cache folder for compiled kernels (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR); `none`: their defaults."""


class ChecksConfig(Section):
    """Checks of the nodes before ranks start. A node that fails is excluded, and the job is requeued."""

    node: bool = True
    """Count the GPUs, compare their memory, and measure the bandwidth of an all-reduce over all ranks."""
    min_bandwidth_gbps: PositiveFloat | None = None
    """Minimum all-reduce bandwidth, in Gbit/s of bus bandwidth; `none`: the bandwidth is only reported."""
    timeout_s: PositiveInt = 300
    """Seconds that the checks of a node may take, without the setup of a container image."""
    pre_node: tuple[str, ...] = ()
    """Lines of bash that run once on every node before the job; a non-zero status fails the node."""
    post_node: tuple[str, ...] = ()
    """Lines of bash that run once on every node after each attempt; their status is only reported."""


class SurvivalConfig(Section):
    """Restarts of a job over time limits and failures."""

    starter: Literal["torchrun", "srun"] = "srun"
    """Program that starts the ranks. `srun`: a task per rank, which can save during all of a preemption's grace time.
    `torchrun`: a task per node, which starts its ranks and kills them signal_s seconds after a preemption (30 s if
    torch has no `--shutdown-timeout`)."""
    signal_s: PositiveInt = 600
    """Seconds before the time limit at which the run is asked to save; longer than a step plus a save."""
    max_attempts: PositiveInt = 3
    """Number of consecutive failed attempts without a new checkpoint after which the job gives up."""
    max_crashes: PositiveInt = 50
    """Total number of crashes and hangs after which the job gives up, even with new checkpoints between them."""
    bad_node_crashes: PositiveInt = 3
    """Crashes that begin on a node in the last `bad_node_attempts` attempts after which the job excludes it."""
    bad_node_attempts: PositiveInt = 10
    """Number of latest attempts whose crashes count against a node."""
    spares: NonNegativeInt = 0
    """Number of spare nodes in the allocation of a training, in addition to --nodes. If a node fails, a spare replaces
    it and the run resumes at once, without the queue. If too few nodes are left, the job is requeued."""


class ClusterConfig(Section):
    """A cluster, as `--cluster CLUSTER.toml` names it."""

    name: str = "cluster"
    """Name of the cluster in messages."""
    environment: dict[str, str] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Environment variables of all ranks, such as CUDA_DEVICE_MAX_CONNECTIONS or settings of NCCL and UCX. They are
    written to the job script: keep keys and passwords in `environment_file`."""
    environment_file: Text | None = None
    """File of NAME=value lines for keys (WANDB_API_KEY, HF_TOKEN). The job reads it at its start and never copies it.
    Only its owner may read it (chmod 600), and it must be outside the run's folder."""
    slurm: SlurmConfig = SlurmConfig()
    node: NodeConfig = NodeConfig()
    container: Annotated[NoContainer | ContainerConfig, ByKind()] = NoContainer()
    python: PythonConfig = PythonConfig()
    paths: PathsConfig = PathsConfig()
    checks: ChecksConfig = ChecksConfig()
    survival: SurvivalConfig = SurvivalConfig()
    rates: RatesConfig = RatesConfig()
