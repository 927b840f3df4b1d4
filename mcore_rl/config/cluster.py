"""A Slurm cluster: the hardware of its nodes, the options of its jobs, and how Python is started on a node."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.section import ByKind, Section, Text


class SlurmConfig(Section):
    """Options of a job; `none` leaves the choice to Slurm."""

    partition: Text | None = None
    """Partition, or several with commas."""
    account: Text | None = None
    """Account that the time is charged to."""
    qos: Text | None = None
    """Quality of service."""
    constraint: Text | None = None
    """Features that nodes must have."""
    time: str = "1-00:00:00"
    """Time limit of one attempt, as minutes, hours:minutes:seconds or days-hours:minutes:seconds; a run takes as many
    attempts as it needs."""
    exclusive: bool = True
    """Allow no other job on the nodes."""
    gpus_by: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """Option that requests GPUs: `--gpus-per-node=8`, `--gres=gpu:8`, or none, if nodes come with their GPUs."""
    gpu_type: Text | None = None
    """Type of GPU, as in `--gpus-per-node=h100:8`; `none`: any type."""
    mail_user: Text | None = None
    """Address for mail about jobs; `none`: no mail."""
    mail_type: str = "END,FAIL,REQUEUE,TIME_LIMIT_90"
    """Events to mail to mail_user, by sbatch's names."""
    options: tuple[str, ...] = ()
    """Additional `#SBATCH` lines, such as "--comment=moe"."""


class NodeConfig(Section):
    """The hardware of a node."""

    gpus: NonNegativeInt = 8
    """GPUs per node, with a rank for each; 0: ranks are processes on the CPU cores."""
    ranks: PositiveInt | None = None
    """Ranks per node, for nodes without GPUs; `none` for nodes with GPUs."""
    device: Text | None = None
    """GPU model, as `mcore-rl plan` knows it (A100, H100, H200, B200, GB200, MI300X, ...); `none`: unknown, so that
    plans cover memory and schedule but not time."""
    link_domain: PositiveInt | Literal["auto"] = "auto"
    """Number of GPUs connected by NVLink; `auto`: all GPUs of a node, or 72 for an NVL72."""
    nic_gbit_per_s: PositiveFloat | Literal["auto"] = "auto"
    """Network bandwidth per GPU in Gbit/s; `auto`: the usual bandwidth of systems with this device."""
    gpu_memory_gib: NonNegativeFloat = 80.0
    """Memory per GPU in GiB."""
    reserved_gib: NonNegativeFloat = 6.0
    """GPU memory in GiB that tensors cannot use: CUDA context, buffers of NCCL and DeepEP, fragmentation."""
    cores: PositiveInt | None = None
    """Cores per node, shared by the node's tasks; `none`: as many as Slurm assigns."""
    bind: bool = True
    """Bind each rank to its share of the cores near its GPU, and order the GPUs by NUMA node, so that tensor-parallel
    neighbours are on the same NUMA node; only on exclusive nodes (slurm.exclusive)."""
    memory_gib: PositiveInt | Literal["all"] = "all"
    """Main memory per node in GiB; `all`: all of the node's memory (`--mem=0`)."""

    @cached_property
    def ranks_per_node(self) -> int:
        """Number of ranks that a job starts on each node."""
        return self.gpus or self.ranks or 0


class RatesConfig(Section):
    """Speeds measured in a run on this cluster, used for the times in plans (`mcore-rl plan --calibrate RUN`)."""

    source: Text | None = None
    """Run in which the other values were measured; `none`: plans use published runs, with ranges as wide as their
    errors."""
    host_layer_s: NonNegativeFloat | None = None
    """Seconds that the host takes to launch the forward pass of an MoE layer; `none`: the value of published runs."""
    speed: PositiveFloat = 1.0
    """Factor on the fractions of the device's peaks that published runs reach."""
    imbalance: Annotated[float, Field(ge=1)] | None = None
    """Tokens sent to the experts of the fullest rank of an expert-parallel group, as a multiple of the mean; `none`:
    unknown, and plans show the cost of several values."""
    rollout: PositiveFloat | None = None
    """Measured / planned seconds of a rollout; `none` (also in the next two fields): the planned time is a lower
    bound."""
    logprobs: PositiveFloat | None = None
    """Measured / planned seconds of the passes for logprobs and values."""
    updates: PositiveFloat | None = None
    """Measured / planned seconds of the updates of a rollout batch."""


class ContainerSection(Section):
    """The container that ranks run in, if any."""

    kind: str
    """Program that runs the container; `none`: no container; `pyxis`: enroot, through srun's --container options;
    `apptainer`: `apptainer exec`."""


class NoContainer(ContainerSection):
    """Ranks run outside containers."""

    kind: Literal["none"] = "none"


class ContainerConfig(ContainerSection):
    """A container."""

    kind: Literal["pyxis", "apptainer"]
    image: Text
    """Image: a file visible to all nodes (.sqsh, .sif), or a reference such as docker://registry#name:tag."""
    mounts: tuple[str, ...] = ()
    """Mounts as from:to[:flags]. The working folder and the run's are always mounted, under their own names."""
    options: tuple[str, ...] = ()
    """Additional options of srun (pyxis) or of `apptainer exec`, one argument each."""
    timeout_s: PositiveInt = 1800
    """Seconds within which a node must set up the image (download, conversion) before its checks begin."""


class PythonConfig(Section):
    """Commands that find the right Python on a node."""

    setup: tuple[str, ...] = ()
    """Lines of bash to run before every command on a node: `module load`, `source .../activate`, `conda activate`. They
    run with `set -e`: a node on which a line fails is unfit, and if a line fails on every node, the job ends."""
    command: str = "python"
    """Command that starts Python after `setup`, inside the container if `container.kind` is set."""


class PathsConfig(Section):
    """Folders, in addition to its run_dir, that a job may write to."""

    scratch: Text | None = None
    """Folder on the node's own disk, created on each node and exported as TMPDIR; the path may contain $SLURM_JOB_ID;
    `none`: TMPDIR is unchanged."""
    cache: Text | None = None
    """Cache folder for compiled kernels (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR); `none`: the defaults of these
    programs."""


class ChecksConfig(Section):
    """Checks of the nodes before ranks start. A node that fails is excluded and the job requeued."""

    node: bool = True
    """Count the GPUs, compare their memory, and measure the bandwidth of an all-reduce over all ranks."""
    min_bandwidth_gbps: PositiveFloat | None = None
    """Lowest all-reduce bandwidth that passes, in Gbit/s of bus bandwidth; `none`: the bandwidth is only reported."""
    timeout_s: PositiveInt = 300
    """Seconds that the checks of a node may take, not counting the set-up of a container image."""
    pre_node: tuple[str, ...] = ()
    """Lines of bash, run once on every node before the job; a non-zero status fails the node."""
    post_node: tuple[str, ...] = ()
    """Lines of bash, run once on every node after each attempt; their status is only reported."""


class SurvivalConfig(Section):
    """Restarts of a job over time limits and failures."""

    starter: Literal["torchrun", "srun"] = "srun"
    """Program that starts ranks; `srun`: one task per rank, which can save during all of a preemption's grace time;
    `torchrun`: one task per node, which starts its ranks and kills them signal_s seconds after a preemption (after 30 s
    if torch has no `--shutdown-timeout`)."""
    signal_s: PositiveInt = 600
    """Seconds before the time limit at which the run is asked to save; should be longer than a step and a save."""
    max_attempts: PositiveInt = 3
    """Consecutive failed attempts without a new checkpoint after which the job gives up."""
    max_crashes: PositiveInt = 50
    """Total number of crashes and hangs of a job, even with new checkpoints in between, after which it gives up."""
    bad_node_crashes: PositiveInt = 3
    """Number of crashes that began on a node, within the job's last `bad_node_attempts` attempts, after which the job
    excludes the node."""
    bad_node_attempts: PositiveInt = 10
    """Number of recent attempts in which crashes count against a node."""
    spares: NonNegativeInt = 0
    """Spare nodes in a training's allocation, in addition to --nodes, that replace nodes that fail: the run then
    resumes at once, without the queue. If too few nodes are left, the job is requeued."""


class ClusterConfig(Section):
    """One cluster, as `--cluster CLUSTER.toml` names it."""

    name: str = "cluster"
    """Name of the cluster in messages."""
    environment: dict[str, str] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Environment variables of all ranks, such as interconnect settings (NCCL, UCX) or CUDA_DEVICE_MAX_CONNECTIONS.
    They are written to the job script; keys and passwords belong in `environment_file`."""
    environment_file: Text | None = None
    """File of NAME=value lines for keys (WANDB_API_KEY, HF_TOKEN). The job reads it when it starts, and nothing copies
    it. Only its owner may read it (chmod 600), and it must be outside the run's folder."""
    slurm: SlurmConfig = SlurmConfig()
    node: NodeConfig = NodeConfig()
    container: Annotated[NoContainer | ContainerConfig, ByKind()] = NoContainer()
    python: PythonConfig = PythonConfig()
    paths: PathsConfig = PathsConfig()
    checks: ChecksConfig = ChecksConfig()
    survival: SurvivalConfig = SurvivalConfig()
    rates: RatesConfig = RatesConfig()
