"""A Slurm cluster: what its nodes have, how a job asks for them, and how Python is reached there."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.section import Section, Text


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
    """Option that asks for GPUs: `--gpus-per-node=8`, `--gres=gpu:8`, or not at all, where a node comes with them."""
    gpu_type: Text | None = None
    """Type of GPU, as in `--gpus-per-node=h100:8`; `none`: any."""
    mail_user: Text | None = None
    """Address for mail about jobs; `none`: no mail."""
    mail_type: str = "END,FAIL,REQUEUE,TIME_LIMIT_90"
    """Events that are mailed to mail_user, as sbatch names them."""
    options: tuple[str, ...] = ()
    """Further `#SBATCH` lines, as "--comment=moe"."""


class NodeConfig(Section):
    """One node."""

    gpus: NonNegativeInt = 8
    """GPUs of a node, each with one rank; 0: ranks are processes on the cores."""
    ranks: PositiveInt | None = None
    """Ranks of a node without GPUs; `none` where there are GPUs."""
    device: Text | None = None
    """Kind of GPU, as `mcore-rl plan` knows it (A100, H100, H200, B200, GB200, MI300X, ...); `none`: not known, so that
    memory and schedule are planned, and no time."""
    link_domain: PositiveInt | Literal["auto"] = "auto"
    """GPUs that NVLink connects; `auto`: those of the node, and 72 of an NVL72."""
    nic_gbit_per_s: PositiveFloat | Literal["auto"] = "auto"
    """Network bandwidth for each GPU in Gbit/s; `auto`: as systems with this device have it."""
    gpu_memory_gib: NonNegativeFloat = 80.0
    """Memory of one GPU in GiB."""
    reserved_gib: NonNegativeFloat = 6.0
    """GiB of a GPU's memory that are not for tensors: CUDA's context, buffers of NCCL and DeepEP, fragmentation."""
    cores: PositiveInt | None = None
    """Cores of a node that its tasks share; `none`: as Slurm gives them."""
    bind: bool = True
    """Bind each rank to its share of the cores near its GPU, and order the GPUs by NUMA node, so that tensor-parallel
    neighbours share one; only on exclusive nodes (slurm.exclusive)."""
    memory_gib: PositiveInt | Literal["all"] = "all"
    """Main memory of a node in GiB; `all`: all that the node has (`--mem=0`)."""

    @cached_property
    def ranks_per_node(self) -> int:
        """Ranks that a job starts on a node."""
        return self.gpus or self.ranks or 0


class RatesConfig(Section):
    """Speeds that a run of this cluster has reached, for the times of plans (`mcore-rl plan --calibrate RUN`)."""

    source: Text | None = None
    """Run that the others are from; `none`: published runs, and ranges as wide as their errors."""
    host_layer_s: NonNegativeFloat | None = None
    """Seconds that the host takes to start one MoE layer's forward pass; `none`: that of published runs."""
    speed: PositiveFloat = 1.0
    """Factor on the parts of the device's peaks that published runs reach."""
    imbalance: Annotated[float, Field(ge=1)] | None = None
    """Tokens sent to the experts of the fullest rank of an expert-parallel group, as a multiple of the mean; `none`: it
    is not known, and plans say what several would cost."""
    rollout: PositiveFloat | None = None
    """Measured / planned seconds of a rollout; `none`: it is planned as a lower bound, as the next two."""
    logprobs: PositiveFloat | None = None
    """Measured / planned seconds of the passes for logprobs and values."""
    updates: PositiveFloat | None = None
    """Measured / planned seconds of the updates of a rollout batch."""


class ContainerConfig(Section):
    """The container that ranks run in, if any."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """Program that runs the container; `pyxis`: enroot by srun's --container options; `apptainer`: `apptainer exec`."""
    image: Text | None = None
    """Image: a file that all nodes see (.sqsh, .sif), or a reference such as docker://registry#name:tag."""
    mounts: tuple[str, ...] = ()
    """Mounts as from:to[:flags]. The folder of submission and the run's are mounted under their own names in any
    case."""
    options: tuple[str, ...] = ()
    """Further options of srun (pyxis) or of `apptainer exec`, one argument each."""
    timeout_s: PositiveInt = 1800
    """Seconds in which a node must have set up the image (a download, a conversion) before its checks begin."""


class PythonConfig(Section):
    """Commands that find the right Python on a node."""

    setup: tuple[str, ...] = ()
    """Lines of bash before every command on a node: `module load`, `source .../activate`, `conda activate`. They run
    with `set -e`: where a line fails the node is unfit, and where it fails on every node the job ends."""
    command: str = "python"
    """Command that starts Python after `setup`, in the container where there is one."""


class PathsConfig(Section):
    """Folders that a job may write to besides its run_dir."""

    scratch: Text | None = None
    """Folder on the node's own disk, made on each node and given as TMPDIR; the path may hold $SLURM_JOB_ID; `none`:
    TMPDIR stays as it is."""
    cache: Text | None = None
    """Folder of compiled kernels (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR); `none`: as these programs choose."""


class ChecksConfig(Section):
    """Checks of the nodes before ranks start. A node that fails is excluded and the job requeued."""

    node: bool = True
    """Count the GPUs, compare their memory, and measure the bandwidth of an all-reduce over all ranks."""
    min_bandwidth_gbps: PositiveFloat | None = None
    """Slowest all-reduce that passes, in Gbit/s of bus bandwidth; `none`: it is only reported."""
    timeout_s: PositiveInt = 300
    """Seconds that the checks of a node may take; setting up a container's image is not among them."""
    pre_node: tuple[str, ...] = ()
    """Lines of bash, run once on every node before the job; a status that is not 0 makes the node fail."""
    post_node: tuple[str, ...] = ()
    """Lines of bash, run once on every node after each attempt; their status is only reported."""


class SurvivalConfig(Section):
    """Restarts of a job over time limits and failures."""

    starter: Literal["torchrun", "srun"] = "srun"
    """Program that starts ranks; `srun`: one task per rank, which has all of a preemption's grace time to save;
    `torchrun`: one task per node, which starts its ranks, and kills them signal_s seconds after a preemption (after 30
    s where torch has no `--shutdown-timeout`)."""
    signal_s: PositiveInt = 600
    """Seconds before the time limit at which the run is asked to save; it should be more than a step and a save
    take."""
    max_attempts: PositiveInt = 3
    """Attempts in a row that fail without a new checkpoint before the job gives up."""
    max_crashes: PositiveInt = 50
    """Crashes and hangs of a job in all, also those after a new checkpoint, before it gives up."""
    bad_node_crashes: PositiveInt = 3
    """Crashes that begin on one node, among the job's last `bad_node_attempts` attempts, before the job excludes it."""
    bad_node_attempts: PositiveInt = 10
    """Attempts back to which crashes of a node count against it."""
    spares: NonNegativeInt = 0
    """Nodes of a training's allocation beside those that --nodes names, which take the place of nodes that fail: the
    run then resumes at once, without the queue. When too few nodes are left, the job is requeued."""


class ClusterConfig(Section):
    """One cluster, as `--cluster CLUSTER.toml` names it."""

    name: str = "cluster"
    """Name of the cluster in messages."""
    environment: dict[str, str] = {}  # noqa: RUF012  # pydantic gives every instance its own
    """Environment variables of all ranks: the interconnect's (NCCL, UCX), CUDA_DEVICE_MAX_CONNECTIONS. They are
    written to the job script; keys and passwords belong in `environment_file`."""
    environment_file: Text | None = None
    """File of NAME=value lines for keys (WANDB_API_KEY, HF_TOKEN). The job reads it when it starts and nothing copies
    it; only its owner may read it (chmod 600), and it lies outside the run's folder."""
    slurm: SlurmConfig = SlurmConfig()
    node: NodeConfig = NodeConfig()
    container: ContainerConfig = ContainerConfig()
    python: PythonConfig = PythonConfig()
    paths: PathsConfig = PathsConfig()
    checks: ChecksConfig = ChecksConfig()
    survival: SurvivalConfig = SurvivalConfig()
    rates: RatesConfig = RatesConfig()
