"""The scripts themselves, as files in tests/golden/launch. After a change that is meant, renew them and read the diff:

RENEW_GOLDEN=1 python -m pytest tests/unit/launch/test_scripts.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.checks.cluster import set_by_launch
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import kind_of, load_config
from mcore_rl.config.pipeline import ConversionStage
from mcore_rl.launch.job import render
from mcore_rl.launch.planning import Allowances, JobOptions, plan_conversion, plan_training
from tests.unit.launch.conftest import ROOT

GOLDEN = ROOT / "tests/golden/launch"
RENEW = bool(os.environ.get("RENEW_GOLDEN"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
ALL = JobOptions(
    array="0-3%2", dependency="afterok:17", exclude="n[1-2]", nodelist="n[3-9]", reservation="week", qos="high",
    time="8:00:00", mail_user="me@example.org", mail_type="FAIL",
)  # fmt: skip
SERVERS = JobOptions(servers=2, server_command="serve --port 8000")
CASES = {
    "h100_pretrain": ("example_h100", "qwen3_30b_a3b/pretrain.toml", 16, JobOptions()),
    "a100_sft": ("example_a100_apptainer", "qwen3_30b_a3b/sft.toml", 8, JobOptions()),
    "venv_grpo": ("example_venv", "qwen3_235b_a22b/grpo_r2.toml", 16, JobOptions()),
    "venv_array": ("example_venv", "qwen3_30b_a3b/gspo.toml", 4, ALL),
    "h100_servers": ("example_h100", "qwen3_30b_a3b/gspo.toml", 4, SERVERS),
    "h100_rl_servers": ("example_h100", "qwen3_30b_a3b/gspo.toml", 4, JobOptions(servers=2)),
    "cpu_pretrain": ("example_cpu", "tiny_moe/pretrain.toml", 2, JobOptions()),
    "cpu_spares": ("example_cpu", "tiny_moe/pretrain.toml", 2, JobOptions()),
}


def cluster_of(name, overrides=()):
    return load_config(ClusterConfig, ROOT / f"launch/clusters/{name}.toml", overrides)


def script(case):
    allowances = Allowances(absent=True)
    if case == "h100_convert":
        stage = ConversionStage(arguments=("export", "runs/a b", "out/model", "--workers", "8"))
        plan = plan_conversion(
            stage, Path("runs/pipeline"), cluster_of("example_h100"), options=JobOptions(), allowances=allowances
        )
        return render(plan.job)
    cluster, recipe, nodes, options = CASES[case]
    path = ROOT / "launch/recipes" / recipe
    program = kind_of(path)
    served = ["rl.engine.kind=vllm", "rl.engine.tensor_parallel=4"] if case == "h100_rl_servers" else []
    config = load_config(PROGRAMS[program].config, path, served)
    own = ["survival.spares=1"] if case == "cpu_spares" else []
    settings = cluster_of(cluster, own)
    return render(plan_training(program, config, settings, nodes, options=options, allowances=allowances).job)


@pytest.fixture(params=[*CASES, "h100_convert"])
def case(request, home):
    return request.param


def test_every_script_is_as_it_was_when_people_last_read_it(case, home):
    text = script(case).replace(str(home), "/home/user/moe")
    golden = GOLDEN / f"{case}.sbatch"
    if RENEW:
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert on_one_line(text) == on_one_line(golden.read_text())


def on_one_line(script):
    """Each array of the script on one line: where it is wrapped depends on how long the paths of this machine are."""
    return script.replace("=(\n  ", "=(").replace("\n  ", " ")


@pytest.mark.matrix("a100_sft")
def test_every_script_passes_shellcheck_together_with_job_sh(case, tmp_path):
    path = tmp_path / f"{case}.sh"
    path.write_text(script(case))
    done = subprocess.run([str(SHELLCHECK), "-x", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(path.read_text().splitlines()) <= 120


def test_directives_come_before_the_first_command_since_sbatch_stops_reading_there(case):
    lines = [line for line in script(case).splitlines() if line.strip()]
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first:])
    assert any(line.startswith("#SBATCH --nodes") for line in lines[:first])


SHORT = (
    "-a --array, -A --account, -C --constraint, -c --cpus-per-task, -D --chdir, -d --dependency, -e --error, "
    "-F --nodefile, -G --gpus, -J --job-name, -k --no-kill, -m --distribution, -N --nodes, -n --ntasks, -o --output, "
    "-p --partition, -q --qos, -s --oversubscribe, -t --time, -W --wait, -w --nodelist, -x --exclude"
)
"""Short options of `sbatch --help` in Slurm 22.05 that contradict a launch."""


def test_a_cluster_may_set_no_option_that_a_script_has(case):
    text, written = script(case).partition("#SBATCH hetjob")[0], cluster_of("example_h100").slurm
    options = re.findall(r"^#SBATCH (--[\w-]+)(?:=(.*))?$", text, re.MULTILINE)
    own = [option for option in options if option not in (("--comment", "mcore_rl"),)]
    assert len(own) > 9 and not [option for option in own if not set_by_launch(*option, written)]


def test_a_short_option_is_refused_as_its_long_one_is():
    slurm = cluster_of("example_h100").slurm
    for short, long in (pair.split() for pair in SHORT.split(", ")):
        assert set_by_launch(short, "x", slurm) == set_by_launch(long, "x", slurm) != ""


def test_the_golden_files_are_those_of_the_cases():
    assert {path.stem for path in GOLDEN.iterdir()} == {*CASES, "h100_convert"}
