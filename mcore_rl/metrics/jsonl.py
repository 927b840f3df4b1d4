"""metrics.jsonl: one JSON object per line, either the metrics of a step or an event.

    {"step": 12, "time": 1760000000.1, "train/loss_nats": 5.81, "moe/expert_load": [[91, 37], [60, 68]]}
    {"step": 12, "time": 1760000000.4, "event": "checkpoint saved", "path": "..."}

A number that is not finite is written as the string "nan", "inf" or "-inf", since JSON has none.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mcore_rl.errors import DataError
from mcore_rl.metrics.metric_table import Reported
from mcore_rl.storage.files import is_elsewhere, written_atomically

FILE_NAME = "metrics.jsonl"


class JsonlSink:
    """Sink that appends to metrics.jsonl and flushes every line; steps after `resume_step` are dropped first.

    A file that is deleted or moved meanwhile is begun anew, with an event that says so.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        num_torn = keep_until(path, resume_step) if path.exists() else 0
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        if num_torn:
            self.message(resume_step, "torn lines removed from metrics.jsonl", {"lines": num_torn})

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        """Write the metrics of a step as one line."""
        self._line(step, values)

    def message(self, step: int, text: str, fields: Mapping[str, object]) -> None:
        """Write an event of a step as one line, with `fields` in addition to the text."""
        self._line(step, {"event": text, **fields})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, step: int, fields: Mapping[str, object]) -> None:
        if is_elsewhere(self._file, self._path):
            self._file.close()
            self._file = self._path.open("a", encoding="utf-8")
            sys.stderr.write(f"warning: {self._path} was deleted or moved: a new one begins at step {step}\n")
            self.message(step, "metrics.jsonl was deleted or moved: the records before are not here", {})
        values = {name: _json_value(value) for name, value in fields.items()}
        record = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()


def keep_until(path: Path, step: int) -> int:
    """Drop torn lines and records of later steps, which run again, atomically; return the number of torn lines."""
    num_torn = 0
    with path.open("rb") as old, written_atomically(path) as new, new.open("wb") as remaining:
        for line in old:
            record = _parsed(line)
            if record is None:
                num_torn += 1
            elif int(str(record["step"])) <= step:
                remaining.write(line.rstrip(b"\n") + b"\n")
    return num_torn


def read_records(path: Path) -> Iterator[dict[str, object]]:
    """Yield the records of a metrics.jsonl in order, without a torn last line (of a run that is still writing)."""
    if not path.exists():
        raise DataError(f"{path} is not there: give the folder of a run that has made at least one step")
    with path.open("rb") as file:
        yield from (record for line in file if (record := _parsed(line)) is not None)


def _parsed(line: bytes) -> dict[str, object] | None:
    """Return the record of a line, or None when the line is torn: not JSON, or without a step."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record


def _json_value(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return value


class NewRecords:
    """Records that a run writes from now on, also if a resume writes the file anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since = time.time()
        self._inode, self._offset = 0, 0

    def take(self) -> Iterator[dict[str, object]]:
        """Yield the complete records that were written since the last call, in order."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._offset += len(line)
                record = _parsed(line)
                # A file that was written anew has the records of earlier starts too.
                if record is not None and float(str(record["time"])) >= self._since:
                    yield record
