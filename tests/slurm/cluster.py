"""A throw-away Slurm: real daemons and virtual nodes on this machine, of which nothing is left in the end.

Needs root, Debian's packages (install.sh) and the freezer of cgroup v1. Jobs run as a plain user.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "cluster"
FREEZER = Path("/sys/fs/cgroup/freezer")
USER = 5000
POLL_S = 0.1
PAUSE = 9.0
"""A pause of a wait is so many times as long as the look before it, so that looking takes a tenth of a core at most."""
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"})


class Cluster:
    """The cluster in `folder`, which is made, and is readable by all; to be left with `stop`."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"n{i}" for i in range(1, num_nodes + 1)]
        self.cgroup = f"throwaway-{os.getpid()}"
        self.init = 0
        """Process 1 of the namespaces, as seen from outside of them."""
        self._outer: subprocess.Popen[bytes] | None = None

    @property
    def code(self) -> Path:
        """The checkout, as jobs see it."""
        return self.folder / "code"

    @property
    def python(self) -> Path:
        """This Python with its packages, as jobs see it."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def shared(self) -> Path:
        """Where jobs may write, on all nodes."""
        return self.folder / "shared"

    def start(self) -> None:
        if os.geteuid() != 0 or not FREEZER.is_dir():
            raise RuntimeError(f"the cluster needs root and {FREEZER} (cgroup v1)")
        self._write_files()
        with (self.folder / "log/controller.log").open("wb") as log:
            self._outer = subprocess.Popen(
                [
                    # Also when this process is killed nothing is left.
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"),
                    *("--propagation", "private", "--kill-child"),
                    *(SCRIPTS / "controller.sh", self.folder, *self.nodes),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.init = self._child(self._outer.pid)
        self.until(lambda: (self.folder / "run/up").exists(), "the daemons started", 60)
        self.until_idle(self.nodes)

    def stop(self) -> None:
        """The kernel ends what is in the namespaces with their first process."""
        if self._outer is None:
            return
        self._outer.kill()
        self._outer.wait()
        base = FREEZER / self.cgroup
        deadline = time.monotonic() + 20
        while base.exists() and time.monotonic() < deadline:
            for path in sorted(base.rglob("*"), reverse=True):
                if path.is_dir():
                    _remove_if_empty(path)
            _remove_if_empty(base)
            time.sleep(POLL_S)
        assert not base.exists(), f"{base} still has processes"

    def until(self, is_so: Callable[[], object], what: str, within_s: float) -> None:
        """Wait for it; AssertionError with the ends of the logs when it does not come."""
        deadline = time.monotonic() + within_s
        began = time.monotonic()
        while not is_so():
            now = time.monotonic()
            if now > deadline:
                raise AssertionError(f"not within {within_s:g} s: {what}\n{self._end_of_logs()}")
            time.sleep(min(1.0, max(POLL_S, PAUSE * (now - began))))
            began = time.monotonic()

    # ---- inside

    def run(self, *words: object, node: str = "", as_root: bool = False) -> str:
        """What a command says on the login node or on `node`; AssertionError where it fails."""
        done = self.attempt(*words, node=node, as_root=as_root)
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def attempt(
        self, *words: object, node: str = "", as_root: bool = False, within_s: float = 120
    ) -> "subprocess.CompletedProcess[str]":
        """The same, whatever becomes of it."""
        target = self._node_init(node) if node else self.init
        enter = ["nsenter", "-t", str(target), "-m", "-n", "-u", "-i", "-p", "-r", f"--wdns={self.shared}"]
        who = [] if as_root else ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.shared),
            "LANG": "C.UTF-8",
        }
        return subprocess.run(
            [*enter, *who, *map(str, words)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=within_s,
            check=False,
        )

    # ---- jobs

    def submit(self, script: Path, *options: str) -> str:
        """Submit from a shell with MPI's plugin, which this cluster lacks: jobs do without it."""
        return self.run("env", "SLURM_MPI_TYPE=pmix", "sbatch", "--parsable", *options, script).split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of it; of an array's id the first element."""
        line = self.run("scontrol", "-o", "show", "job", job).splitlines()[0]
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def hosts(self, job: str) -> list[str]:
        return self.run("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def until_state(self, job: str, states: Sequence[str] | frozenset[str], within_s: float) -> str:
        self.until(lambda: self.state(job) in states, f"job {job} is {sorted(states)}", within_s)
        return self.state(job)

    def until_idle(self, nodes: Sequence[str]) -> None:
        def idle() -> bool:
            found = self.attempt("sinfo", "-h", "-N", "-p", "batch", "-t", "idle", "-o", "%N")
            return set(nodes) <= set(found.stdout.split())

        self.until(idle, f"{nodes} are idle", 60)

    # ---- faults

    def kill_slurmd(self, node: str) -> None:
        """Of the daemons of Slurm only this one; the tasks of jobs go on."""
        self.run("pkill", "-KILL", "-x", "slurmd", node=node, as_root=True)

    def start_slurmd(self, node: str) -> None:
        self.run("slurmd", "-N", node, node=node, as_root=True)

    # ---- how it is made

    def _write_files(self) -> None:
        for name in ("etc/slurm", "log", "run", "state", "munge", "shared", "code", "venv", "python"):
            (self.folder / name).mkdir(parents=True)
        etc = self.folder / "etc"
        last = len(self.nodes)
        (self.folder / "run/cgroup").write_text(self.cgroup)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "munge").chmod(0o700)
        (self.folder / "code.source").symlink_to(ROOT)
        (self.folder / "venv.source").symlink_to(sys.prefix)
        (self.folder / "python.source").symlink_to(sys.base_prefix)
        names = [f"10.77.0.{10 + i} {node}\n" for i, node in enumerate(self.nodes, start=1)]
        (etc / "hosts").write_text("".join(["127.0.0.1 localhost\n", "10.77.0.1 controller\n", *names]))
        # Names come from that file alone: with a DNS that does not answer every socket would wait.
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        (etc / "resolv.conf").write_text("")
        for file in ("passwd", "group"):
            (etc / file).write_text(Path("/etc", file).read_text())
        with (etc / "passwd").open("a") as file_:
            file_.write(f"trainer:x:{USER}:{USER}::{self.shared}:/bin/bash\n")
        with (etc / "group").open("a") as file_:
            file_.write(f"trainer:x:{USER}:\n")
        text = (SCRIPTS / "slurm.conf").read_text()
        values = {"folder": str(self.folder), "nodes": f"n[1-{last}]", "addresses": f"10.77.0.[11-{10 + last}]"}
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        (etc / "slurm/slurm.conf").write_text(text)
        (etc / "slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        for name in ("state", "run", "log"):
            shutil.chown(self.folder / name, "slurm", "slurm")
        shutil.chown(self.shared, USER, USER)
        for path in (self.folder, etc, etc / "slurm", self.shared):
            path.chmod(0o755)

    def _node_init(self, node: str) -> int:
        """Process 1 of a node, as seen from outside."""
        inside = int((self.folder / f"run/{node}.pid").read_text())
        for pid in _descendants(self.init):
            ids = _status(pid).get("NSpid", "").split()
            if len(ids) == 2 and int(ids[1]) == inside:
                return self._child(pid)
        raise AssertionError(f"{node} is not on")

    def _child(self, pid: int) -> int:
        children: list[int] = []
        self.until(lambda: bool(children.extend(_children(pid)) or children), f"{pid} has a child", 10)
        return children[0]

    def _end_of_logs(self) -> str:
        logs = [self.folder / "log/controller.log", self.folder / "log/slurmctld.log"]
        logs += sorted(self.shared.glob("*/logs/*.log"), key=lambda log: log.stat().st_mtime)
        ends = [
            f"== {log}\n" + "".join(log.read_text(errors="replace").splitlines(True)[-15:])
            for log in logs
            if log.exists()
        ]
        queue = self.attempt("squeue", "-l").stdout if (self.folder / "run/up").exists() else ""
        return "\n".join([*ends, queue])


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(word) for word in task.read_text().split()]
    return found


def _descendants(pid: int) -> list[int]:
    found = _children(pid)
    for child in list(found):
        found += _descendants(child)
    return found


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return
