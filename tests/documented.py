"""The commands that README and docs show."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- needs [^>]*-->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(mcore-rl|torchrun|srun|make|python|mv) ")
PLACEHOLDERS = re.compile(r"\b(HF_DIR|CKPT|CKPT_DIR|CONFIG\.toml|RUN)\b|\|| \[-| \.\.\.")

GROUPS = (
    ("README.md", "docs/README.md", "docs/install.md", "docs/first_run.md"),
    ("docs/from_one_gpu_to_a_cluster.md", "docs/meshes.md"),
    ("docs/concepts.md", "docs/replay.md", "docs/report.md", "docs/extending.md", "docs/logging.md"),
    ("docs/models.md", "docs/real_model.md"),
    ("docs/conversion.md",),
    ("docs/gsm8k.md",),
    ("docs/rlhf.md", "docs/rewards.md"),
)
"""Pages whose commands tests/docs runs, in the order in which they are read: a group shares a folder."""


@dataclass(frozen=True, slots=True)
class Command:
    """A line of a block of code; synopses, which have names in capitals, are none."""

    page: str
    line: str
    is_marked: bool
    """As needing a GPU or a cluster."""
    output: tuple[str, ...]
    """The lines below it, where a console is shown."""

    @property
    def words(self) -> list[str]:
        """What the shell makes of it, without its comment."""
        return shlex.split(self.line, comments=True)


def commands(page: Path) -> Iterator[Command]:
    """Those of a page, in order."""
    for mark, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "bash", "sh", "console"):
            continue
        lines = text.replace("\\\n", " ").splitlines()
        for number, shown in enumerate(lines):
            line = shown.removeprefix("$ ")
            if COMMAND.match(line) and not PLACEHOLDERS.search(line):
                output = _output(lines[number + 1 :]) if line != shown else ()
                yield Command(page.relative_to(ROOT).as_posix(), line, bool(mark), output)


def _output(below: list[str]) -> tuple[str, ...]:
    end = next((number for number, line in enumerate(below) if line.startswith("$ ")), len(below))
    return tuple(below[:end])
