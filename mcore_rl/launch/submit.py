"""`mcore-rl launch`: check a job, write its folder, submit it."""

import argparse
import errno
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import mcore_rl
from mcore_rl.checks.cluster import REPORT, SOUND, check_cluster, set_by_launch
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.checks.run import refuse
from mcore_rl.config.cluster import ClusterConfig, SlurmConfig
from mcore_rl.config.kinds import READERS
from mcore_rl.config.load import files_of, kind_of, load_config
from mcore_rl.config.pipeline import ConversionStage, PipelineConfig, TrainingStage
from mcore_rl.errors import ConfigError, McoreRlError
from mcore_rl.launch import planning, slurm
from mcore_rl.launch.job import JOB_SH, JobOptions, render
from mcore_rl.launch.records import LOCK, SCRIPT, Submission, done, record
from mcore_rl.storage.files import shipped, sole_writer
from mcore_rl.storage.run_config import load_run_config

PACKAGE = "mcore_rl"
CHECKOUT = (PACKAGE, "launch")
"""Folders that are copied from a checkout; an installed package has the files of launch/ inside."""
CODE = (*CHECKOUT, ":!launch/recipes", ":!launch/clusters")
"""Paths in which git looks for changes: not in configs, which differ for every run; the job has a resolved one."""
SHOWN = 8


@dataclass(frozen=True, slots=True)
class Code:
    """Source of the running code."""

    root: Path
    """Folder with its packages."""
    commit: str
    """Commit of its git repository; empty for an installed package."""
    changed: tuple[str, ...]
    """Files that differ from the commit."""

    def describe(self) -> str:
        """Return one line that names the code."""
        if not self.commit:
            return f"mcore-rl {mcore_rl.__version__}, installed"
        return f"{self.commit}{' and code.patch' if self.changed else ''}"


def code_at(root: Path) -> Code:
    """Return the code with its packages in `root`."""
    if not (root / ".git").exists():
        return Code(root, "", ())
    try:
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
        status = _git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--", *CODE).decode()
    except OSError:
        return Code(root, "", ())  # a checkout on a machine without git is copied like an installed package
    # `XY path`, each ended by NUL; a rename's second path stands alone.
    changed = tuple(entry[3:] for entry in status.split("\0") if len(entry) > 3 and entry[2] == " ")
    return Code(root, commit, changed)


def refuse_changes(code: Code) -> None:
    """Raise ConfigError when the code differs from its commit."""
    if not code.changed:
        return
    names = ", ".join(code.changed[:SHOWN])
    more = f" and {len(code.changed) - SHOWN} more" if len(code.changed) > SHOWN else ""
    raise ConfigError(
        f"{code.root} differs from its last commit: {names}{more}. Commit, or give --allow-dirty to run it as it is "
        "(the difference is then recorded in code.patch)."
    )


def copy_code(code: Code, folder: Path) -> None:
    """Write the running code to `folder/code`, its commit to commit.txt and its changes to code.patch."""
    target = folder / "code"
    (folder / "commit.txt").write_text(code.describe() + "\n", encoding="utf-8")
    if not code.commit:
        is_installed = shipped("").is_relative_to(code.root / PACKAGE)
        for name in (PACKAGE,) if is_installed else CHECKOUT:
            shutil.copytree(code.root / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        return
    with _current_tree(code) as (tree, environment):
        if code.changed:
            patch = _git(code.root, "diff", "--binary", code.commit, tree, "--", *CODE, environment=environment)
            (folder / "code.patch").write_bytes(patch)
        packed = _git(code.root, "archive", tree, *CHECKOUT, environment=environment)
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")


@contextmanager
def _current_tree(code: Code) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a git tree of the packages without ignored files, and git's environment for it.

    Index and objects are written outside the checkout, which need not be writable.
    """
    if not code.changed:
        yield code.commit, {}
        return
    objects = _git(code.root, "rev-parse", "--path-format=absolute", "--git-path", "objects").decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "GIT_INDEX_FILE": f"{folder}/index",
            "GIT_OBJECT_DIRECTORY": folder,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
        }
        _git(code.root, "read-tree", "HEAD", environment=environment)
        _git(code.root, "add", "--all", "--", *CHECKOUT, environment=environment)
        tree = _git(code.root, "write-tree", environment=environment).decode().strip()
        yield tree, environment


def _git(root: Path, *words: str, environment: Mapping[str, str] | None = None) -> bytes:
    try:
        done = subprocess.run(
            # The checkout of this very code may belong to somebody else, which git alone would not trust.
            ["git", "-c", f"safe.directory={root}", "-C", str(root), *words],
            capture_output=True,
            check=True,
            env=os.environ | (environment or {}),
        )
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode(errors="replace").strip()
        raise ConfigError(f"git {words[0]} in {root} failed: {message}") from None
    return done.stdout


PIPELINE = "pipeline"
"""Program of a config with several jobs, its stages."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks, as a Lustre that is mounted with `noflock`."""
CHECK_POLL_S = 5.0
OTHER_LAUNCH_S = 60.0
"""Seconds to wait for another launch of the same run, which copies the code and submits."""


def main(args: argparse.Namespace) -> int:
    """Submit the jobs, or show them with --dry-run; return the exit status."""
    if str(args.config) in PROGRAMS and args.overrides and "=" not in args.overrides[0]:
        raise ConfigError(
            f"launch finds the program by the fields of the config. Leave out {args.config}: `mcore-rl launch "
            f"{args.overrides[0]} ...`; or give --program {args.config} behind the config."
        )
    cluster = load_config(ClusterConfig, args.cluster)
    check_cluster(cluster)
    refuse([text for variable in os.environ.items() for text in _overriding(*variable, cluster.slurm)])
    plans = list(_plans(args, cluster))
    if not plans:
        sys.stderr.write(f"{args.config}: all stages are finished; nothing is submitted\n")
        return 0
    for plan in plans:  # on standard error, so that standard output is only the script
        for line in (*plan.checked.lines, *(f"warning: {warning}" for warning in plan.checked.warnings)):
            sys.stderr.write(f"{plan.job.name}: {line}\n")
    code = code_at(Path(mcore_rl.__file__).resolve().parents[1])
    if args.dry_run:
        return _show(plans, code)
    if not args.allow_dirty:
        refuse_changes(code)
    if not slurm.has("sbatch"):
        _show_scripts(plans)
        raise slurm.SlurmError(
            "sbatch is not on the PATH, so nothing was submitted and nothing written; above is the script. "
            "Load Slurm's module, or launch on a login node."
        )
    jobs = _submit_all(plans, code)
    return _await_check(plans[0], jobs[0]) if args.check else 0


def _overriding(name: str, value: str, slurm: SlurmConfig) -> Iterator[str]:
    # sbatch prefers an environment variable to an option of the script.
    option = name.removeprefix("SBATCH_").lower().replace("_", "-")
    by = set_by_launch(f"--{option}", value, slurm) if name.startswith("SBATCH_") else ""
    if by and getattr(slurm, option, "") is not None:  # a field that the cluster's file leaves open may be a user's
        yield f"{name}={value} of this shell would replace what `mcore-rl launch` sets by {by}. Unset it."


def _await_check(plan: planning.PlannedJob, job: str) -> int:
    # Returns the job's exit status, 0 or 1.
    while slurm.in_queue([job]):
        time.sleep(CHECK_POLL_S)
    report = plan.folder / planning.FOUND / REPORT
    if not report.exists():
        raise slurm.SlurmError(
            f"job {job} has ended without a report of its nodes. {plan.job.run_dir}/logs/{job}.log says why."
        )
    text = report.read_text(encoding="utf-8")
    sys.stdout.write(text)
    return 0 if text.splitlines()[-1] == SOUND else 1


def _plans(args: argparse.Namespace, cluster: ClusterConfig) -> Iterator[planning.PlannedJob]:
    program = args.program or kind_of(args.config, args.overrides)
    if program not in (*PROGRAMS, PIPELINE):
        raise ConfigError(f"{args.config} is a config of {program}, which is no job. Give it to {READERS[program]}.")
    options = JobOptions(**{option.name: getattr(args, option.name) for option in fields(JobOptions)})
    allowances = planning.Allowances(
        force=args.force, tp_across_nodes=args.allow_tp_across_nodes, absent=bool(args.dependency) or args.dry_run
    )
    if args.check and (program == PIPELINE or options.array or options.servers):
        raise ConfigError("--check is of one job's nodes. Give it a training, without --array and --servers.")
    if program == PIPELINE:
        yield from _pipeline(args, cluster, options, allowances)
        return
    if not args.nodes:
        raise ConfigError("The number of nodes is missing. Give --nodes N.")
    config = load_run_config(PROGRAMS[program].config, args.config, args.overrides)
    if args.check:
        run_dir = Path(config.run_dir)
        plan = planning.plan_check(run_dir, cluster, args.nodes, options=options, allowances=allowances)
        yield replace(plan, modes=_modes(args.cluster, None))
        return
    plan = planning.plan_training(program, config, cluster, args.nodes, options=options, allowances=allowances)
    yield replace(plan, modes=_modes(args.cluster, args.config))


def _modes(cluster: Path, config: Path | None) -> Mapping[str, int]:
    # No wider than the permissions of the launch's sources.
    modes = dict.fromkeys((SCRIPT, "cluster.toml"), _mode(cluster))
    return modes | ({} if config is None else {"config.toml": _mode(config)})


def _mode(path: Path) -> int:
    mode = 0o666
    for file in files_of(path):
        mode &= file.stat().st_mode
    return mode


def _pipeline(
    args: argparse.Namespace, cluster: ClusterConfig, options: JobOptions, allowances: planning.Allowances
) -> Iterator[planning.PlannedJob]:
    """Yield the jobs of unfinished stages; a dependency names the stage before, as its job id is not known yet."""
    pipeline = load_config(PipelineConfig, args.config, args.overrides)
    refused = [name for name in ("array", "servers") if getattr(options, name)]
    if args.nodes or refused:
        option = "nodes" if args.nodes else refused[0]
        raise ConfigError(
            f"--{option} applies to one job, and a pipeline has several. Set it in the pipeline's stages."
        )
    if not pipeline.stages:
        raise ConfigError(f"{args.config} has no stage. Give one, as pretrain.config.")
    before = ""
    is_next = True
    run_dirs: set[Path] = set()
    for name, stage in pipeline.stages:
        config = None
        if isinstance(stage, TrainingStage):
            assert stage.config is not None, "a pipeline yields the stages that have one"
            config = load_run_config(PROGRAMS[name].config, Path(stage.config), stage.fields)
        run_dir = (Path(pipeline.run_dir) / name if config is None else Path(config.run_dir)).absolute()
        if run_dir in run_dirs:
            raise ConfigError(
                f'{name}: run_dir="{run_dir}" is that of an earlier stage too. Give each its own, as '
                f'{name}.fields = ["run_dir=runs/{name}"].'
            )
        run_dirs.add(run_dir)
        text = done(run_dir) if is_next else ""
        if isinstance(stage, ConversionStage) and text != planning.conversion_text(stage):
            text = ""  # it has converted something else
        if text:
            sys.stderr.write(f"{name}: finished and skipped ({text}); to run it again delete {run_dir}/DONE\n")
            continue
        is_next = False
        stage_options = replace(
            options,
            name=f"{options.name or pipeline.name}-{name}",
            time=stage.time or options.time,
            dependency=f"afterok:{before}" if before else options.dependency,
        )
        if isinstance(stage, ConversionStage):
            plan = planning.plan_conversion(stage, run_dir, cluster, options=stage_options, allowances=allowances)
            yield replace(plan, modes=_modes(args.cluster, None))
            outputs = {Path(word).absolute() for word in stage.arguments}
        else:
            assert config is not None
            plan = planning.plan_training(
                name, config, cluster, stage.nodes, options=stage_options, allowances=allowances
            )
            outputs = {run_dir}
            yield replace(plan, modes=_modes(args.cluster, Path(str(stage.config))))
        allowances = replace(allowances, promised=allowances.promised | outputs)
        before = name


def _show(plans: Sequence[planning.PlannedJob], code: Code) -> int:
    # Slurm is asked about the first script only, which depends on no other stage.
    _show_scripts(plans)
    if code.changed:
        sys.stderr.write(f"warning: {len(code.changed)} files of the code are not committed (--allow-dirty)\n")
    if not slurm.has("sbatch"):
        sys.stderr.write("sbatch is not on the PATH: Slurm was not asked\n")
        return 0
    try:
        sys.stderr.write(slurm.would_start(render(plans[0].job)) + "\n")
    except slurm.SlurmUnreachableError as error:
        sys.stderr.write(f"warning: Slurm was not asked when the job would start: {error}\n")
    return 0


def _show_scripts(plans: Iterable[planning.PlannedJob]) -> None:
    sys.stdout.write("\n".join(render(plan.job) for plan in plans))


def _submit_all(plans: Sequence[planning.PlannedJob], code: Code) -> list[str]:
    """Submit the jobs and return their ids; when Slurm refuses a job, the jobs before it are cancelled."""
    jobs: list[str] = []
    for index, plan in enumerate(plans):
        job = plan.job
        if index:
            job = replace(job, options=replace(job.options, dependency=f"afterok:{jobs[-1]}"))
        try:
            after = plans[index - 1].job.run_dir if index else ""
            jobs.append(_submit(replace(plan, job=job), code, after))
        except McoreRlError:
            for submitted in jobs:
                slurm.cancel(submitted)
                sys.stderr.write(f"cancelled job {submitted}\n")
            raise
        sys.stdout.write(f"{jobs[-1]}\n")
        waits = f", waiting for {job.options.dependency}" if job.options.dependency else ""
        sys.stderr.write(f"{job.name}: job {jobs[-1]}{waits}; {plan.folder / SCRIPT}\n")
    return jobs


def _submit(plan: planning.PlannedJob, code: Code, after: str = "") -> str:
    """Submit a job, which waits for the job of the run in folder `after`, and return its id; a refused job leaves no
    folder.

    Of two launches for one run at the same time, one waits for the other, and then sees its job.
    """
    run_dir = Path(plan.job.run_dir)
    with ExitStack() as claim:
        try:
            (run_dir / "logs").mkdir(parents=True, exist_ok=True)
            plan.folder.parent.mkdir(exist_ok=True)
            _lock(claim, plan.folder.parent / LOCK)
            refuse(list(planning.in_use_violations(run_dir)))
            with ExitStack() as undo:
                try:
                    plan.folder.mkdir()
                except FileExistsError:  # it is not ours, and stays
                    raise ConfigError(f"{plan.folder} was made by another launch meanwhile. Launch again.") from None
                undo.callback(shutil.rmtree, plan.folder, ignore_errors=True)
                for name, text in plan.files.items():
                    _write(plan.folder / name, text, plan.modes)
                _write(plan.folder / SCRIPT, render(plan.job), plan.modes)
                shutil.copyfile(shipped(JOB_SH), plan.folder / JOB_SH)
                copy_code(code, plan.folder)
                job = slurm.submit([str(plan.folder / SCRIPT)])
                undo.callback(slurm.cancel, job)
                record(plan.folder, _submission(plan, code, job, after))
                undo.pop_all()  # submitted and recorded: nothing is undone
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be written: {error.strerror}. Choose another run_dir."
            ) from None
    return job


def _lock(claim: ExitStack, lock: Path) -> None:
    # Some file systems have no locks.
    remedy = "It launches the same run. Wait for it, or choose another run_dir."
    try:
        claim.enter_context(sole_writer(lock, wait_s=OTHER_LAUNCH_S, remedy=remedy))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _write(path: Path, text: str, modes: Mapping[str, int]) -> None:
    # The file never has more permissions than it is to have.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, modes.get(path.name, 0o666))
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _submission(plan: planning.PlannedJob, code: Code, job: str, after: str) -> Submission:
    return Submission(
        job=job,
        program=plan.job.program,
        name=plan.job.name,
        cluster=plan.job.cluster.name,
        nodes=plan.job.nodes,
        ranks_per_node=plan.job.ranks_per_node,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        code=code.describe(),
        array=plan.job.options.array,
        dependency=plan.job.options.dependency,
        after=after,
    )
