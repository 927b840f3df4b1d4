"""Conversions to random outputs among a user's files: nothing that the command did not write is ever gone.

`python -m tests.replacing --cases 500` runs more cases than the tests do, each sixth of them with a kill.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mcore_rl.convert.copying.conversion import Conversion, CopySettings
from mcore_rl.convert.copying.copier import convert
from mcore_rl.convert.exporting import ExportOptions, plan_export
from mcore_rl.convert.importing import ImportOptions, plan_import, plan_relayout
from mcore_rl.convert.megatron.model import KeyLayout
from mcore_rl.errors import McoreRlError
from mcore_rl.storage.checkpoint import read_marker, write_marker
from tests.conversion import exported, imported, quiet, saved

KILL_EVERY = 6
KINDS = ("import", "export", "relayout")
Files = dict[str, str]
"""Digest of each file's content, or target of each link, by path relative to the user's folder."""


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    source: str
    output: str
    reference: str | None
    overwrite: bool

    @property
    def final(self) -> str:
        """The path that the conversion gives its output."""
        steps = {"import": "/iter_0000000", "relayout": "/iter_0000000", "export": ""}
        return os.path.normpath(self.output + steps[self.kind])


KILLED = (
    Case(kind="export", source="ckpt", output="out/own", reference="models/base", overwrite=True),
    Case(kind="import", source="models/base", output="ckpt", reference=None, overwrite=True),
    Case(kind="export", source="runs/x", output="out/new", reference=None, overwrite=False),
)
"""Commands that are not refused, for those that are killed."""


def make_home(home: Path) -> None:
    """Write a user's files: a model, checkpoints, a run, outputs of ours as they were and changed, and links."""
    source = saved("llama", home / "models/base")
    checkpoint = imported(source, home / "ckpt")
    (home / "ckpt/notes.txt").write_text("which import this is")
    run = home / "runs/x"
    shutil.copytree(checkpoint, run / "checkpoints/iter_0000000", ignore=shutil.ignore_patterns("manifest.json"))
    marker = read_marker(checkpoint)
    files = {name: size for name, size in marker.files.items() if name != "manifest.json"}
    write_marker(run / "checkpoints/iter_0000000", replace(marker, files=files))
    for name, text in (("config.toml", 'run_dir = "runs/x"\n'), ("run.json", "[]"), ("metrics.jsonl", "")):
        (run / name).write_text(text)
    (run / "logs").mkdir()
    (run / "logs/rank0.log").write_text("step 1")
    exported(checkpoint, home / "out/own", reference=source)
    for name in ("edited", "with_notes", "trained", "with_link", "with_run"):
        shutil.copytree(home / "out/own", home / "out" / name)
    (home / "out/edited/config.json").write_text("{}")
    (home / "out/with_notes/notes.txt").write_text("mine")
    weights = home / "out/trained/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    (home / "out/with_link/more.txt").symlink_to(home / "models/base/config.json")
    shutil.copytree(run, home / "out/with_run/run")
    (home / "out/own.replaced").mkdir()
    (home / "out/own.replaced/old.txt").write_text("mine")
    (home / "out/busy.converting").mkdir()
    (home / "out/busy.converting/thoughts.txt").write_text("mine")
    (home / "out/empty").mkdir()
    (home / "notes.txt").write_text("mine")
    (home / "links").mkdir()
    for name, target in (("own", "out/own"), ("run", "runs/x"), ("gone", "nowhere"), ("notes", "notes.txt")):
        (home / "links" / name).symlink_to(home / target)


def random_case(choice: random.Random, home: Path) -> Case:
    """Return a command whose output is anything that the user has, near it, or new."""
    there = sorted(str(path.relative_to(home)) for path in home.rglob("*") if "iter_" not in path.parent.name)
    kind = choice.choice(KINDS)
    sources = {"import": ("models/base", "out/own", "out/with_notes")}
    reference = choice.choice((None, "models/base", "out/own")) if kind == "export" else None
    output = choice.choice(
        (
            *(choice.choice(there) for _ in range(8)),
            f"{choice.choice(there)}/new",
            *("out/own", "out/own", "ckpt", "out/new", "new", "models", "out/busy", "."),
        )
    )
    return Case(
        kind=kind,
        source=choice.choice(sources.get(kind, ("ckpt", "runs/x", "runs/x/checkpoints", "links/run"))),
        output=output,
        reference=reference,
        overwrite=choice.random() < 0.7,
    )


def planned(case: Case, home: Path, settings: CopySettings) -> Conversion:
    source, output = home / case.source, home / case.output
    if case.kind == "import":
        return plan_import(source, output, ImportOptions(vocab_multiple=16), settings)
    if case.kind == "relayout":
        return plan_relayout(source, output, KeyLayout("local", "each"), None, settings)
    options = ExportOptions(reference=None if case.reference is None else home / case.reference)
    return plan_export(source, output, options, settings)


def files_of(home: Path) -> Files:
    found = {}
    for path in sorted(home.rglob("*")):
        name = str(path.relative_to(home))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif not any(path.iterdir()):
            found[name] = "an empty folder"
    return found


def lost(before: Files, after: Files, case: Case, replaceable: frozenset[str]) -> list[str]:
    """Return the files that are gone or changed, but for those that the command may replace.

    These may lie in the folder of an unfinished conversion, for a run that was killed.
    """
    aside = f"{case.final}.converting/replaced"
    gone = []
    for name, content in before.items():
        if after.get(name) == content or (name in replaceable and name.startswith(f"{case.final}/")):
            continue
        if content == "an empty folder" and any(other.startswith((f"{name}/", name)) for other in after):
            continue  # it has been replaced, or has got files
        if name.endswith("/latest_checkpointed_iteration.txt") and name in after:
            continue
        gone.append(f"{name} ({aside} has it: {after.get(name.replace(case.final, aside, 1)) == content})")
    return gone


def own_files(home: Path, case: Case, before: Files) -> frozenset[str]:
    """Return the files that a command of this kind wrote to its output; known from how the home was made."""
    is_own = case.overwrite and (
        (case.kind == "export" and case.final == "out/own")
        or (case.kind == "import" and case.final == "ckpt/iter_0000000")
    )
    return frozenset(name for name in before if is_own and name.startswith(f"{case.final}/"))


def end_at(call: int) -> None:
    """Make this process kill itself before or after its `call`-th renaming, deletion or making of a folder."""
    left = [call]

    def counted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, partial(counted, getattr(os, name)))


def do(case: Case, home: Path, kill_at: int | None = None) -> str:
    """Run a command in a process of its own and return how it ended: done, refused or killed."""

    def work() -> None:
        os.chdir(home)
        settings = CopySettings(workers=1, overwrite=case.overwrite, task_bytes=200_000)
        try:
            conversion = planned(case, home, settings)
            if kill_at is not None:
                end_at(kill_at)
            with quiet() as progress:
                convert(conversion, settings, progress)
        except McoreRlError:
            os._exit(2)
        os._exit(0)

    process = get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode in (0, 2, -signal.SIGKILL), f"{case} ended with {process.exitcode}"
    return {0: "done", 2: "refused"}.get(process.exitcode, "killed")


def check(seed: int, template: Path, folder: Path, *, kills: bool) -> str:
    """Run a random command on a copy of the template; AssertionError where something is lost."""
    choice = random.Random(seed)
    home = folder / f"home{seed}"
    # Copies keep the links: those of the template point into this one.
    shutil.copytree(template, home, symlinks=True)
    for link in [path for path in home.rglob("*") if path.is_symlink()]:
        target = os.readlink(link).replace(str(template), str(home))
        link.unlink()
        link.symlink_to(target)
    case = random_case(choice, home)
    if kills:
        # Most of those that are killed replace something: that is where it matters.
        case = choice.choice((case, *KILLED))
    before = files_of(home)
    own = own_files(home, case, before)
    ended = do(case, home, choice.randrange(1, 50) if kills else None)
    if kills and ended == "refused" and files_of(home) != before:
        ended = "killed"  # one of its workers, which it reports
    gone = lost(before, files_of(home), case, own)
    assert not gone, f"seed {seed}: {case} was {ended}, and lost {gone}"
    if ended == "killed":
        again = do(case, home)
        gone = lost(before, files_of(home), case, own)
        assert not gone, f"seed {seed}: {case}, given again, was {again}, and lost {gone}"
        fresh = Case(kind=case.kind, source=case.source, output="fresh", reference=case.reference, overwrite=False)
        if again == "done":
            assert do(fresh, home) == "done"
            assert contents(home / fresh.final) == contents(home / case.final), f"seed {seed}: {case}"
            assert not (home / f"{case.final}.converting").exists(), f"seed {seed}: {case}"
        ended += f", then {again}"
    elif ended == "refused":
        assert files_of(home) == before, f"seed {seed}: {case} was refused, and has written"
    shutil.rmtree(home)
    return ended


def contents(folder: Path) -> Files:
    """Return the files of an output but for the marker, which has the time."""
    return {name: digest for name, digest in files_of(folder).items() if name != "checkpoint.json"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    cases = parser.parse_args().cases
    with tempfile.TemporaryDirectory() as folder:
        make_home(Path(folder) / "template")
        ends = Counter(
            check(seed, Path(folder) / "template", Path(folder), kills=seed % KILL_EVERY == 0) for seed in range(cases)
        )
    sys.stdout.write(f"{cases} cases, nothing lost: {dict(ends.most_common())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
