import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading

import pytest

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.cli import main
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.errors import ConfigError
from mcore_rl.launch.planning import Checked, PlannedJob
from mcore_rl.launch.submit import Code, _submit
from tests.conversion import saved
from tests.unit.launch.conftest import ROOT, job_script

RECIPE = ROOT / "launch/recipes/tiny_moe/pretrain.toml"
CPU = ROOT / "launch/clusters/example_cpu.toml"
H100 = ROOT / "launch/clusters/example_h100.toml"
DATA = 'data.train=["data/train"]'


def launch(*words, recipe=RECIPE, cluster=CPU, nodes=("--nodes", "1")):
    words = [str(recipe), "--cluster", str(cluster), *nodes, *words]
    return main(["launch", "--allow-dirty", *words])


def test_a_launch_keeps_script_config_cluster_and_code_beside_the_run_and_prints_the_jobs_id(home, slurm, capsys):
    assert launch(DATA, "optim.lr=0.5") == 0
    assert capsys.readouterr().out == "101\n"
    folder = home / "runs/tiny_moe/launch/0"
    assert slurm.submitted == [folder / "job.sbatch"]
    assert (home / "runs/tiny_moe/logs").is_dir()
    config = load_config(PROGRAMS["pretrain"].config, folder / "config.toml")
    # A job passes over a damaged checkpoint, unless the config says otherwise.
    written = [DATA, "optim.lr=0.5", f"run_dir={home}/runs/tiny_moe", "checkpoint.on_damaged=previous"]
    assert config == load_config(PROGRAMS["pretrain"].config, RECIPE, written)
    script = (folder / "job.sbatch").read_text()
    assert str(folder / "config.toml") in script and str(folder / "code") in script
    assert (folder / "code/mcore_rl/programs/pretrain.py").exists() and (folder / "cluster.toml").exists()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (folder / "commit.txt").read_text().startswith(head)
    submission = json.loads((folder / "submission.json").read_text())
    assert (submission["job"], submission["program"], submission["nodes"]) == ("101", "pretrain", 1)


def test_a_dry_run_shows_the_script_where_data_and_container_are_not_there(home, slurm, capsys):
    assert launch("--dry-run", "data.train=gone", cluster=H100) == 0
    shown = capsys.readouterr()
    assert "#SBATCH --gpus-per-node=8" in shown.out
    assert "warning: data.train names the file gone.bin, which does not exist" in shown.err
    assert 'warning: container.image="/shared/images/pytorch.sqsh" does not exist' in shown.err


def test_a_check_whose_job_ends_without_a_report_names_its_log(home, slurm, capsys):
    assert launch("--check") == 2
    log = home / "runs/tiny_moe/check/logs/101.log"
    assert f"job 101 has ended without a report of its nodes. {log} says why" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: fatal: Could not establish a configuration source",
    ],
)
def test_a_dry_run_without_a_controller_warns_and_a_launch_is_refused(answer, home, slurm, capsys):
    slurm.install("sbatch", f"#!/bin/sh\necho '{answer}' >&2\nexit 1\n")
    assert launch(DATA, "--dry-run") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash -p")
    assert f"warning: Slurm was not asked when the job would start: sbatch reached no controller: {answer}" in shown.err
    assert launch(DATA) == 2
    assert "SlurmUnreachableError" in capsys.readouterr().err


def test_a_dry_run_that_the_controller_refuses_is_an_error(home, slurm, capsys):
    slurm.install("sbatch", "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    assert launch(DATA, "--dry-run") == 2
    assert "sbatch refused: sbatch: error: invalid partition" in capsys.readouterr().err


def test_without_sbatch_the_script_is_shown_nothing_is_written_and_the_status_is_2(home, slurm, capsys):
    slurm.lacks("sbatch")
    before = sorted(home.rglob("*"))
    assert launch(DATA) == 2
    shown = capsys.readouterr()
    assert "sbatch is not on the PATH" in shown.err and shown.out.startswith("#!/bin/bash -p")
    assert sorted(home.rglob("*")) == before
    assert launch(DATA, "--dry-run") == 0
    assert capsys.readouterr().out == shown.out


def test_what_sbatch_refuses_is_told_in_its_words_and_leaves_no_launch(home, slurm, capsys):
    (slurm.folder / "refuses").write_text("partition=cpu")
    assert launch(DATA) == 2
    assert "sbatch refused: sbatch: error: Batch job submission failed: Invalid partition" in capsys.readouterr().err
    assert not [path for path in (home / "runs/tiny_moe/launch").iterdir() if path.is_dir()]


def test_what_the_user_says_of_the_job_reaches_slurm(home, slurm):
    wishes = {
        "job-name": "--name=mine",
        "time": "--time=1:00:00",
        "array": "--array=0-3%2",
        "dependency": "--dependency=afterok:9",
        "exclude": "--exclude=n[1-2]",
        "nodelist": "--nodelist=n[3-9]",
        "reservation": "--reservation=maintenance",
        "partition": "--partition=long",
        "account": "--account=theirs",
        "qos": "--qos=high",
    }
    assert launch(DATA, *wishes.values()) == 0
    directives = re.findall(r"^#SBATCH --([\w-]+)=(.*)$", slurm.submitted[0].read_text(), re.MULTILINE)
    for name, word in wishes.items():
        assert (name, word.partition("=")[2]) in directives
    assert ("kill-on-invalid-dep", "yes") in directives


def test_servers_are_a_second_part_of_the_job_with_the_clusters_gpus(home, slurm, capsys, tmp_path):
    text = H100.read_text().replace("/shared/images/pytorch.sqsh", "docker://images/pytorch")
    (tmp_path / "cluster.toml").write_text(text)
    words = ["--servers", "2", "--server-command", "serve --port 8000", "--dry-run", DATA]
    words += ["--server-field", "log.project"]
    assert launch(*words, cluster=tmp_path / "cluster.toml") == 0
    trainer, _, servers = capsys.readouterr().out.partition("#SBATCH hetjob\n")
    assert "#SBATCH --nodes=1" in trainer and "#SBATCH --nodes=2" in servers
    assert "#SBATCH --partition=gpu" in servers and "#SBATCH --gpus-per-node=8" in servers
    assert "serve --port 8000" in servers and "log.project=" in servers


def test_the_field_for_the_hosts_is_also_set_for_servers_that_the_job_starts(home, slurm, capsys):
    words = ["--servers", "2", "--dry-run", "rl.engine.kind=vllm", "model.family=qwen3_moe"]
    assert launch(*words, "--server-field", "log.project", recipe=RECIPE.with_name("grpo.toml"), cluster=H100) == 0
    script = capsys.readouterr().out
    assert "rl.engine.urls=" in script and "log.project=" in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--servers", "2"], "--servers 2 needs --server-command"),
        (["--server-command", "serve"], "need --servers N"),
        (["--servers", "1", "--server-command", "s", "--server-field", "log.projet"], "Did you mean log.project?"),
        (["--array", "0-3", "--array-field", "train.sed"], "Did you mean train.seed?"),
        (
            ["--array", "0-3", "--array-field", "run_dir"],
            "--array-field run_dir: the job sets run_dir itself, to <run_di",
        ),
        (["mesh.tp=3"], "on 1 nodes of 4 ranks"),
        (["mesh.ep=3"], "is not a multiple of mesh.ep=3"),
        (["mesh.tpp=3"], "Did you mean mesh.tp?"),
        (["data.train=[]"], "data.train is empty"),
        (['data.train=["data/gone"]'], "data.train names the file data/gone.bin, which does not exist"),
        (["checkpoint.load=runs/gone"], "checkpoint.load names the checkpoint runs/gone, which does not exist"),
        (["run_dir=/dev/null/x"], "cannot be written"),
        (["--time", "1:00"], "signal_s=120"),
        (["--time", "1:00:00\n#SBATCH --uid=0"], "the time limit '1:00:00\\n#SBATCH --uid=0' is no duration"),
        (["--time", "soon"], "the time limit 'soon' is no duration"),
        (["run_dir=runs/100%j"], "has a %, which sbatch replaces"),
        (["run_dir=runs/try#3"], "cannot stand in an #SBATCH line"),
    ],
)
def test_what_would_fail_later_is_refused_before_anything_is_submitted(words, message, home, slurm, capsys):
    assert launch(DATA, *words) == 2
    assert message in capsys.readouterr().err and slurm.submitted == []


@pytest.mark.parametrize(
    ("name", "value", "by"),
    [
        ("SBATCH_TIMELIMIT", "7", "slurm.time"),
        ("SBATCH_NO_REQUEUE", "1", "survival.max_attempts"),
        ("SBATCH_EXPORT", "NONE", "environment"),
        ("SBATCH_PARTITION", "debug", "slurm.partition"),
    ],
)
def test_a_variable_that_sbatch_prefers_to_the_script_is_refused(name, value, by, home, slurm, capsys, monkeypatch):
    """So it does with all of them; seen with SBATCH_TIMELIMIT of Slurm 22.05."""
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")  # the cluster's file leaves that open
    monkeypatch.setenv("SBATCH_WAIT_ALL_NODES", "1")
    assert launch(DATA, "--dry-run") == 0
    monkeypatch.setenv(name, value)
    assert launch(DATA) == 2 and slurm.submitted == []
    assert f"{name}={value} of this shell would replace what `mcore-rl launch` sets by {by}" in capsys.readouterr().err


def test_a_job_inherits_nothing_of_the_job_that_it_is_launched_from(home, slurm, monkeypatch):
    """An interactive step has SLURM_CPU_BIND and the like, from which srun would take options in the new job."""
    (slurm.bin / "env").symlink_to("/usr/bin/env")
    sbatch = slurm.bin / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("echo", f"env >{slurm.folder}/environment; echo", 1))
    given = {"SLURM_CPU_BIND": "mask_cpu:0x8", "SLURM_MPI_TYPE": "pmix", "SRUN_DEBUG": "3", "SLURM_CONF": "/etc/a.conf"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    assert launch(DATA, "--dry-run") == 0
    names = {line.partition("=")[0] for line in (slurm.folder / "environment").read_text().splitlines()}
    assert names & given.keys() == {"SLURM_CONF"}


@pytest.mark.full
def test_a_hugging_face_folder_is_imported_before_jobs_load_it(home, slurm, capsys):
    saved("qwen3_moe", home / "my model", num_experts=8, num_attention_heads=4, num_key_value_heads=2)
    words = [DATA, f"model.path={home}/my model"]
    assert launch(*words) == 2
    command = re.search(r"imported once, before jobs load it: mcore-rl (.*)", capsys.readouterr().err)[1]
    arguments = shlex.split(command)
    assert arguments[:3] == ["convert", "import", f"{home}/my model"] and not slurm.submitted
    assert arguments[3].startswith(f"{home}/runs/imports/my model-")
    assert main(arguments) == 0
    assert launch(*words) == 0 and slurm.submitted


def test_tensor_parallelism_across_nodes_is_refused_unless_it_is_allowed(home, slurm, capsys):
    wide = ["mesh.tp=8", "model.num_heads=8", "model.num_kv_heads=8"]
    assert launch(DATA, *wide, nodes=("--nodes", "2")) == 2
    assert "mesh.tp=8 does not lie inside a node of 4 ranks" in capsys.readouterr().err
    assert launch(DATA, *wide, "--allow-tp-across-nodes", nodes=("--nodes", "2")) == 0
    assert "warning: mesh.tp=8 does not lie inside" in capsys.readouterr().err


def test_a_disk_that_is_too_small_for_the_run_is_warned_of(home, slurm, capsys, monkeypatch):
    usage = shutil.disk_usage(home)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=2**20))
    assert launch(DATA, "--dry-run") == 0
    message = capsys.readouterr().err
    assert re.search(r"disk, estimated: (\S+ [GM]iB) \(\d checkpoints of .*\)\n", message)
    assert re.search(r"warning: the run will take .* of disk, and \S+ has 1\.0 MiB free", message)


def test_experts_across_nodes_are_warned_of(home, slurm, capsys):
    assert launch(DATA, "mesh.ep=8", nodes=("--nodes", "2")) == 0
    assert "warning: mesh.ep=8 (x etp=1) goes over nodes of 4 ranks" in capsys.readouterr().err


@pytest.mark.full
def test_an_estimate_above_the_gpus_memory_is_refused_with_its_parts_unless_forced(home, slurm, capsys, tmp_path):
    text = H100.read_text().replace("/shared/images/pytorch.sqsh", "docker://images/pytorch")
    (tmp_path / "cluster.toml").write_text(text)
    words = [DATA, 'data.valid=["data/valid"]']
    qwen3 = {"recipe": ROOT / "launch/recipes/qwen3_30b_a3b/pretrain.toml", "cluster": tmp_path / "cluster.toml"}
    assert launch(*words, **qwen3) == 2
    message = capsys.readouterr().err
    assert re.search(r"estimate is 7\d\.\d GiB .*\(weights 8\.2, .*but a GPU of h100 has 74 GiB for it", message)
    # Forwards and backwards: one step of recomputation more is the smallest change that fits.
    assert re.search(r'(?s)nearest that pass the checks and fit.*\n  1: platform\.recompute="full"\n', message)
    assert launch(*words, "--force", **qwen3) == 0
    assert "warning: the estimate is" in capsys.readouterr().err
    assert launch(*words, "run_dir=runs/two", nodes=("--nodes", "2"), **qwen3) == 0


def test_a_container_that_is_not_there_is_refused(home, slurm, capsys):
    assert launch(DATA, cluster=H100) == 2
    assert 'container.image="/shared/images/pytorch.sqsh" does not exist. Make it' in capsys.readouterr().err


def test_data_that_the_container_does_not_see_is_told_with_the_mount_that_is_missing(home, slurm, capsys, tmp_path):
    text = H100.read_text().replace("/shared/images/pytorch.sqsh", "docker://images/pytorch")
    (tmp_path / "cluster.toml").write_text(text)
    for ending in (".bin", ".idx"):
        (tmp_path / f"text{ending}").touch()
    words = [f'data.train=["{tmp_path}/text"]']
    assert launch(*words, cluster=tmp_path / "cluster.toml") == 2
    assert f'Add it to container.mounts, as "{tmp_path}:{tmp_path}"' in capsys.readouterr().err
    text = text.replace('mounts = ["', f'mounts = ["{tmp_path}:{tmp_path}", "')
    (tmp_path / "cluster.toml").write_text(text)
    assert launch(*words, cluster=tmp_path / "cluster.toml") == 0


def small_job(home, folder):
    for package in ("mcore_rl", "launch"):
        (home / "code" / package).mkdir(parents=True, exist_ok=True)
    run_dir = home / "runs/a"
    job = job_script(name="a", program="p", module="m", arguments=(), run_dir=str(run_dir), work_dir=str(home))
    checked = Checked(lines=(), warnings=())
    files = {"config.toml": "a = 1\n"}
    plan = PlannedJob(folder=run_dir / "launch" / folder, job=job, files=files, checked=checked)
    return plan, Code(home / "code", "", ())


@pytest.mark.full
def test_of_two_launches_at_once_one_submits_and_keeps_its_files(home, slurm, monkeypatch):
    monkeypatch.setattr("mcore_rl.storage.files.LOCK_POLL_S", 0.002)
    monkeypatch.setattr("mcore_rl.launch.submit.render", lambda job: "script")
    slurm.says("squeue", "".join(f"{job}|N/A|PENDING||\n" for job in range(101, 201)))
    plan, code = small_job(home, "0")
    refused = []

    def attempt():
        try:
            _submit(plan, code)
        except ConfigError as error:
            refused.append(str(error))

    for tries in range(1, 101):
        both = [threading.Thread(target=attempt) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert len(slurm.submitted) == tries and len(refused) == tries
        assert f"is in use by job {100 + tries}, which is PENDING" in refused[-1]
        kept = {path.name for path in plan.folder.iterdir()}
        assert kept == {"job.sbatch", "job.sh", "config.toml", "commit.txt", "code", "submission.json"}
        shutil.rmtree(plan.folder)


def test_a_folder_of_another_launch_is_left_alone(home, slurm):
    plan, code = small_job(home, "0")
    plan.folder.mkdir(parents=True)
    (plan.folder / "job.sbatch").write_text("theirs")
    with pytest.raises(ConfigError, match="was made by another launch meanwhile"):
        _submit(plan, code)
    assert (plan.folder / "job.sbatch").read_text() == "theirs" and slurm.submitted == []


def test_a_job_whose_record_cannot_be_written_is_cancelled(home, slurm, monkeypatch):
    plan, code = small_job(home, "0")

    def full(folder, submission):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr("mcore_rl.launch.submit.record", full)
    with pytest.raises(ConfigError, match="No space left"):
        _submit(plan, code)
    assert slurm.asked("scancel").split() == ["101"] and not plan.folder.exists()


def modes(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()}


@pytest.mark.full
def test_files_of_a_launch_have_the_permissions_of_their_sources(home, slurm, tmp_path):
    base, cluster = tmp_path / "base.toml", tmp_path / "cluster.toml"
    base.write_text(f'extends = "{CPU}"\nenvironment = {{ API_KEY = "secret" }}\n')
    base.chmod(0o600)
    cluster.write_text('extends = "base.toml"\n')
    before = os.umask(0o022)
    try:
        assert launch(DATA, cluster=cluster) == 0
        assert launch(DATA, "run_dir=runs/b") == 0
    finally:
        os.umask(before)
    private, public = (modes(path.parent) for path in slurm.submitted)
    assert "secret" in slurm.submitted[0].read_text()
    assert (private["job.sbatch"], private["cluster.toml"], private["config.toml"]) == (0o600, 0o600, 0o644)
    assert (public["job.sbatch"], public["cluster.toml"]) == (0o644, 0o644)


def with_keys(tmp_path, path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(f'extends = "{CPU}"\nenvironment_file = "{path}"\n')
    return cluster


def test_keys_are_read_by_the_job_and_are_in_no_file_of_the_launch(home, slurm, tmp_path):
    keys = tmp_path / "keys.env"
    keys.write_text("# of mine\nWANDB_API_KEY=a=b $(touch evil) 'c'\n\nHF_TOKEN=x")
    keys.chmod(0o600)
    assert launch(DATA, cluster=with_keys(tmp_path, keys)) == 0
    folder = slurm.submitted[0].parent
    assert not [path for path in folder.glob("*") if path.is_file() and "$(touch" in path.read_text()]
    assert f"environment_file={keys}\n" in slurm.submitted[0].read_text()
    script, end = (folder / "job.sh").read_text(), 'done <"$environment_file"'
    reading = script[script.index("while IFS= read -r line") : script.index(end)]
    show = f'environment_file={keys}\n{reading}{end}\nprintf "%s|" "$WANDB_API_KEY" "$HF_TOKEN"; /usr/bin/env'
    shown = subprocess.run(["bash", "-c", show], capture_output=True, text=True, cwd=tmp_path).stdout
    assert shown.startswith("a=b $(touch evil) 'c'|x|") and "\nHF_TOKEN=x\n" in shown
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("where", "mode", "text", "message"),
    [
        ("keys.env", 0o644, "A=secret\n", "can be read by others (mode 644). Take that away: chmod 600"),
        ("home/runs/tiny_moe/keys.env", 0o600, "A=secret\n", "lies in the run's folder"),
        ("keys.env", 0o600, "A=secret\nexport B=secret\n", "line 2 is not NAME=value"),
        (
            "keys.env",
            0o600,
            "A=1\r\nB=secret\r\n",
            "line 1 has a carriage return of Windows or a NUL. Take it out: tr -d '\\r\\000'.",
        ),
        ("keys.env", 0o600, "A=1\nB=sec\0ret\n", "line 2 has a carriage return"),
        ("keys.env", 0o600, None, "cannot be read: it is a folder, pipe or device"),
        ("gone/keys.env", None, "", "cannot be read"),
    ],
)
def test_a_file_of_keys_that_is_not_safe_is_refused(where, mode, text, message, home, slurm, capsys, tmp_path):
    keys = tmp_path / where
    if mode is not None:
        keys.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(keys) if text is None else keys.write_bytes(text.encode())
        keys.chmod(mode)
    assert launch(DATA, cluster=with_keys(tmp_path, keys)) == 2
    shown = capsys.readouterr().err
    assert message in shown and "secret" not in shown and slurm.submitted == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("PYTHONPATH", 'Add to it in python.setup: "export PYTHONPATH=$PYTHONPATH:/shared/rewards".'),
        ("PYTHONHOME", "would change what Python imports. Take it out."),
        ("LD_PRELOAD", "Export it in python.setup."),
        ("PATH", "Export it in python.setup."),
        ("SLURM_MPI_TYPE", "set a field of [slurm], as slurm.options."),
        ("MASTER_ADDR", "is set by the job. Take it out."),
        ("LOCAL_RANK", "is set by the job. Take it out."),
        ("MCORE_RL_FAILURES", "is set by the job. Take it out."),
        ("TMPDIR", "Set paths.scratch."),
        ("TRITON_CACHE_DIR", "Set paths.cache."),
        ("BASH_ENV", "is the job script's shell's. Take it out."),
        ("run", "begins with a small letter, as the job script's own variables do. Take it out."),
    ],
)
def test_a_variable_that_the_job_needs_is_refused_by_both_doors_before_anything_is_submitted(
    name, remedy, home, slurm, capsys, tmp_path
):
    keys = tmp_path / "keys.env"
    keys.write_text(f"HF_TOKEN=secret\n{name}=secret\n")
    keys.chmod(0o600)
    assert launch(DATA, cluster=with_keys(tmp_path, keys)) == 2
    by_file = capsys.readouterr().err
    (tmp_path / "table.toml").write_text(f'extends = "{CPU}"\nenvironment = {{ {name} = "secret" }}\n')
    assert launch(DATA, cluster=tmp_path / "table.toml") == 2
    by_table = capsys.readouterr().err
    assert f'keys.env": line 2 sets {name}, which ' in by_file and f"environment.{name} " in by_table
    for shown in (by_file, by_table):
        assert remedy in shown and "secret" not in shown
    assert slurm.submitted == [] and not (home / "runs").exists()


def test_a_run_whose_fence_names_a_live_job_is_refused(home, slurm, capsys):
    run = home / "runs/tiny_moe"
    run.mkdir(parents=True)
    (run / "writer.json").write_text(json.dumps({"job": "77", "number": 0, "host": "n1", "pid": 1, "born": 1}))
    slurm.says("squeue", "77|N/A|RUNNING||n1\n")
    assert launch(DATA) == 2
    assert "is in use by job 77, which is RUNNING. Wait" in capsys.readouterr().err and "77" in slurm.asked("squeue")
    (slurm.folder / "squeue").unlink()
    slurm.fails("squeue", "slurm_load_jobs error: Invalid job id specified")
    assert launch(DATA) == 0


@pytest.mark.full
def test_the_program_is_known_by_the_configs_fields_or_its_name_or_is_chosen(home, slurm, capsys):
    (home / "mine.toml").write_text(f'extends = "{RECIPE}"\ndata.train = ["data/train"]\n')
    assert launch(recipe=home / "mine.toml") == 0
    assert "mcore_rl.programs.pretrain" in slurm.submitted[-1].read_text()
    (home / "any.toml").write_text(f'extends = "{RECIPE.with_name("model.toml")}"\ndata.train = ["data/train"]\n')
    assert launch(recipe=home / "any.toml") == 2
    assert "any.toml could be a config of pretrain, sft, rm or dpo" in capsys.readouterr().err
    assert launch("--program", "pretrain", "mesh.dp=auto", recipe=home / "any.toml") == 0
    assert launch(recipe=CPU) == 2
    assert "is a config of cluster, which is no job" in capsys.readouterr().err
    (home / "sft_long.toml").write_text(
        f'extends = "{RECIPE.with_name("sft.toml")}"\ndata.train = ["data/train.jsonl"]\ncheckpoint.load = "data"\n'
        'data.tokenizer.path = "data"\n'
    )
    assert launch(recipe=home / "sft_long.toml") == 0
    assert "mcore_rl.programs.sft" in slurm.submitted[-1].read_text()


PIPELINE = f"""
name = "whole"
[pretrain]
config = "{RECIPE}"
fields = ["data.train=[data/train]"]
nodes = 2
[sft]
config = "{RECIPE.with_name("sft.toml")}"
fields = ["data.train=[data/train.jsonl]", "checkpoint.load=runs/tiny_moe", "data.tokenizer.path=data"]
[convert]
arguments = ["export", "runs/tiny_moe_sft", "out/model"]
"""


@pytest.fixture
def pipeline(home):
    (home / "pipeline.toml").write_text(PIPELINE)
    return {"recipe": home / "pipeline.toml", "nodes": ()}


def dependencies(slurm):
    scripts = [path.read_text() for path in slurm.submitted]
    return [re.findall(r"^#SBATCH --(?:dependency|job-name)=(.*)$", text, re.MULTILINE) for text in scripts]


def test_a_dry_run_of_a_pipeline_shows_all_scripts_each_waiting_for_a_stage_by_name(pipeline, slurm, capsys):
    assert launch("--dry-run", **pipeline) == 0
    shown = capsys.readouterr().out
    assert re.findall("^#SBATCH --dependency=(.*)$", shown, re.MULTILINE) == ["afterok:pretrain", "afterok:sft"]
    assert slurm.submitted == []


@pytest.mark.full
def test_when_a_stage_is_refused_by_slurm_those_before_it_are_cancelled(pipeline, slurm, capsys):
    (slurm.folder / "refuses").write_text("name=whole-convert")
    assert launch(**pipeline) == 2
    assert slurm.asked("scancel").split() == ["101", "102"]
    assert "cancelled job 102" in capsys.readouterr().err


def test_nothing_of_a_pipeline_is_submitted_when_a_later_stage_is_wrong(pipeline, slurm, capsys):
    text = pipeline["recipe"].read_text().replace("checkpoint.load=runs/tiny_moe", "checkpoint.load=runs/other")
    pipeline["recipe"].write_text(text)
    assert launch(**pipeline) == 2
    assert "checkpoint.load names the checkpoint runs/other" in capsys.readouterr().err
    assert slurm.submitted == []


@pytest.mark.full
def test_the_same_command_skips_finished_stages_and_goes_on_with_the_failed_one(pipeline, home, slurm, capsys):
    assert launch(**pipeline) == 0
    done = home / "runs/tiny_moe/DONE"
    done.write_text("all 300 steps are done\n")
    checkpoint = home / "runs/tiny_moe/checkpoints"
    checkpoint.mkdir()
    capsys.readouterr()
    assert launch(**pipeline) == 0
    shown = capsys.readouterr()
    assert "pretrain: finished and skipped (all 300 steps are done); to run it again delete" in shown.err
    assert shown.out.split() == ["104", "105"]
    assert dependencies(slurm)[3:] == [["whole-sft"], ["whole-convert", "afterok:104"]]
    after = [json.loads((path.parent / "submission.json").read_text())["after"] for path in slurm.submitted[3:]]
    assert after == ["", str(home / "runs/tiny_moe_sft")]

    (home / "runs/tiny_moe_sft/DONE").write_text("all 100 steps are done\n")
    (home / "runs/pipeline/convert/DONE").write_text("mcore-rl convert export runs/tiny_moe_sft out/model\n")
    assert launch(**pipeline) == 0
    assert "all stages are finished; nothing is submitted" in capsys.readouterr().err
    text = pipeline["recipe"].read_text().replace("out/model", "out/other")
    pipeline["recipe"].write_text(text)
    assert launch(**pipeline) == 0 and dependencies(slurm)[5:] == [["whole-convert"]]
    done.unlink()  # what came after it is not finished either, and a training is not repeated unasked
    assert launch(**pipeline) == 2
    assert "all 100 steps are done. Delete its DONE" in capsys.readouterr().err


@pytest.mark.full
def test_a_stage_may_load_one_checkpoint_of_the_run_before(pipeline, slurm):
    one = "checkpoint.load=runs/tiny_moe/checkpoints/iter_0000300"
    pipeline["recipe"].write_text(PIPELINE.replace("checkpoint.load=runs/tiny_moe", one))
    assert launch(**pipeline) == 0


def test_two_stages_in_one_run_dir_are_refused(pipeline, slurm, capsys):
    text = PIPELINE.replace('"data.tokenizer.path=data"', '"data.tokenizer.path=data", "run_dir=runs/tiny_moe"')
    pipeline["recipe"].write_text(text)
    assert launch(**pipeline) == 2
    assert 'runs/tiny_moe" is that of an earlier stage too' in capsys.readouterr().err and slurm.submitted == []


def test_what_is_of_one_job_is_refused_of_a_pipeline(pipeline, slurm, capsys):
    assert launch("--array", "0-1", **pipeline) == 2
    assert "--array applies to one job" in capsys.readouterr().err
    assert launch("pretrain.nods=3", **pipeline) == 2
    assert "Did you mean pretrain.nodes?" in capsys.readouterr().err


def test_a_config_with_what_toml_must_escape_reaches_the_job(home, slurm):
    assert launch(DATA, 'log.project=a "b" \\c', "checkpoint.on_damaged=stop") == 0
    folder = slurm.submitted[0].parent
    config = load_config(PROGRAMS["pretrain"].config, folder / "config.toml")
    assert (
        config.log.project == 'a "b" \\c'
        and config.checkpoint.on_damaged == "stop"
        and dump_config(config) == (folder / "config.toml").read_text()
    )


HEAVY = "any(name.partition('.')[0] in ('torch', 'megatron', 'transformers', 'numpy') for name in sys.modules)"


@pytest.mark.full
@pytest.mark.parametrize("command", ["launch", "jobs"])
def test_a_login_node_is_answered_without_what_takes_seconds_to_import(command, home, slurm):
    assert launch(DATA) == 0
    words = ["jobs"] if command == "jobs" else ["launch", str(RECIPE), "--cluster", str(CPU), "--nodes", "1", DATA]
    words += [] if command == "jobs" else ["--dry-run"]
    code = f"import sys, mcore_rl.cli.cli as cli; status = cli.main({words}); sys.exit(status or 9 * {HEAVY})"
    done = subprocess.run([sys.executable, "-c", code], env={"PATH": str(slurm.bin), "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
