"""Copy of the code for each job, so that editing the checkout changes no job that waits or restarts."""

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import mcore_rl
from mcore_rl.errors import ConfigError
from mcore_rl.storage.files import shipped

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


def this_code() -> Code:
    """Return the code that is running."""
    return code_at(Path(mcore_rl.__file__).resolve().parents[1])


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
