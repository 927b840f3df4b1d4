import json
import os

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import dump_config, load_config
from tests.unit.launch.conftest import ROOT


@pytest.fixture
def launched(home):
    """The folder of a run that was launched as job 12 on a cluster with pyxis."""
    folder = home / "runs/a/launch/0"
    folder.mkdir(parents=True)
    fields = ("program", "name", "cluster", "time", "code")
    numbers = {"nodes": 2, "ranks_per_node": 8, "job": "12"}
    (folder / "submission.json").write_text(json.dumps(dict.fromkeys(fields, "x") | numbers))
    cluster = load_config(ClusterConfig, ROOT / "launch/clusters/example_h100.toml")
    (folder / "cluster.toml").write_text(dump_config(cluster))
    return folder


@pytest.mark.parametrize("job", ["12", "runs/a"])
def test_a_command_runs_beside_the_job_in_the_container_of_its_steps(launched, slurm, job):
    slurm.says("squeue", "12|N/A|RUNNING|None|n[1-2]\n")
    slurm.says("scontrol", f"JobId=12 JobName=a Command={launched}/job.sbatch WorkDir=/home/user NodeList=n1\n")
    assert main(["attach", job, "--node", "n2", "--", "nvidia-smi", "--list-gpus"]) == 0
    step = "--jobid=12 --overlap --nodes=1 --ntasks=1 --cpu-bind=none --mpi=none --nodelist=n2"
    step += " --container-name=mcore_rl_12"
    expected = f"{step} --container-workdir={os.getcwd()} bash -c exec nvidia-smi --list-gpus\n"
    assert slurm.asked("srun") == expected


def test_an_apptainer_and_the_lines_of_set_up_come_before_the_shell(launched, slurm):
    slurm.says("squeue", "12|N/A|RUNNING|None|n[1-2]\n")
    cluster = load_config(ClusterConfig, ROOT / "launch/clusters/example_a100_apptainer.toml")
    (launched / "cluster.toml").write_text(dump_config(cluster))
    assert main(["attach", "runs/a"]) == 0
    first, second = slurm.asked("srun").splitlines()
    assert first.endswith("bash -c module load apptainer")
    assert second.startswith("exec apptainer exec --nv --bind ") and second.endswith("/pytorch.sif bash")


@pytest.mark.parametrize(
    ("squeue", "job", "message"),
    [
        ("12|N/A|PENDING|Resources|\n", "12", "job 12 is PENDING (Resources): a shell needs a job that runs"),
        ("", "12", "job 12 is not in the queue"),
        ("", "13", "job 13 is not one of `mcore-rl launch`"),
        ("", "runs/b", "runs/b is neither the id of a job nor a run that was launched"),
    ],
)
def test_a_job_that_does_not_run_or_is_not_ours_is_refused(launched, slurm, capsys, squeue, job, message):
    slurm.says("squeue", squeue)
    if job == "12":
        slurm.says("scontrol", f"JobId=12 JobName=a Command={launched}/job.sbatch WorkDir=/home/user\n")
    assert main(["attach", job]) == 2
    assert message in capsys.readouterr().err and slurm.asked("srun") == ""
