"""run.json of a run's folder: a list with one entry for every start of the run.

    [{"started": "2026-01-31T12:00:00+00:00", "step": 0, "command": ["python", "-m", ...], "commit": "...", ...}]

Entries are appended and never changed. metrics/attempts.py writes them; this file needs no torch, so that the
report can read them anywhere.
"""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mcore_rl.errors import DataError

FILE_NAME = "run.json"
NUMERICS = 6
"""Version of a training step's result from the same config, weights and data; the changelog says what changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Device and ranks of a run, and the host of rank 0."""

    device: str
    ranks: int
    cores: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAttempt:
    """One start of a run: command, code, versions, machine and mesh."""

    started: str
    """Time of the start, ISO 8601, UTC."""
    step: int
    """Step from which training started or resumed."""
    command: list[str]
    """Command line of rank 0."""
    commit: str
    """Commit of the code; "+ changes" when files differ from it, empty when it is not known."""
    versions: dict[str, str]
    """Package -> version, for Python, this package and those that the numbers depend on."""
    machine: Machine
    mesh: dict[str, int]
    """Size of each parallel dimension, and `world`, the number of ranks."""
    numerics: int = 1
    """NUMERICS of the code; 1 where it was not recorded."""
    layers: str = ""
    """The layers, with the build of compiled layers: `te`, `torch`, `cpu BUILD`; a resume on a CPU keeps them."""
    extensions: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the source file of everything of the user's own that the config names as `module:name`."""
    speed: dict[str, bool | int | str | None] = field(default_factory=dict)
    """The flags of speed without "auto", by the names of their fields (config/mesh.py)."""
    changes: list[str] = field(default_factory=list)
    """Settings in which this start differs from the checkpoint that it resumed from, with both values."""
    warnings: list[str] = field(default_factory=list)
    """Faults that this start has met and went round, such as a damaged checkpoint."""

    @property
    def started_s(self) -> float:
        """Time of the start in seconds since 1970, as `time` in metrics.jsonl."""
        return datetime.fromisoformat(self.started).timestamp()

    def __post_init__(self) -> None:
        """ValueError where `started` is not a time."""
        datetime.fromisoformat(self.started)


_ATTEMPTS = TypeAdapter(list[RunAttempt])


def read_attempts(run_dir: Path) -> list[RunAttempt]:
    """Return all starts of a run in order; an empty list if there is no run.json."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    try:
        return _ATTEMPTS.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            f"{path} is damaged, it should hold a list of attempts: {where}: {first['msg']}. Move it away: then the "
            "report knows nothing of the starts before, and a run on a CPU chooses its layers anew."
        ) from None
