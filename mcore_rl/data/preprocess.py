"""Text files to a Megatron .bin/.idx pair: in parallel, resumable, and under its name only when it is whole.

PREFIX.partial/plan.json       what is being done; a run with the same plan resumes from here
PREFIX.partial/shard-*.done    a finished part (its .bin and .idx are on the disk)
PREFIX.partial/merged.json     all is done; what is left is to move merged.* to PREFIX.*
PREFIX.bin .idx .json          the dataset and its sidecar
PREFIX.log.jsonl               what happened when
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.documents import DocumentFormat, InputFile, find_input_files
from mcore_rl.data.progress import DocumentProgress
from mcore_rl.data.shards import Shard, ShardReport, finished_shards, merge_shards, plan_shards, token_dtype
from mcore_rl.data.sidecar import Sidecar, SourceFile, sidecar_from
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.data.workers import tokenizing
from mcore_rl.errors import DataError
from mcore_rl.files import (
    disk_errors_explained,
    make_folder,
    move_into_place,
    sole_writer,
    with_ending,
    write_atomically,
)

PLAN_VERSION = 3
"""Version of plan.json and of the shards' markers: an unfinished run of another version is not resumed."""
ENDINGS = (".bin", ".idx", ".json")
SHOWN_BAD_LINES = 10
LOCK_WAIT_S = 3.0
"""Seconds to wait for the lock: workers of a killed run need a moment to end."""
AGAIN = "Make room (or give write access) there, and run the same command again: it resumes."


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """Inputs, output and settings of a preprocessing."""

    inputs: tuple[Path, ...]
    """Files, or folders of files, in the order of their documents."""
    output: Path
    """Prefix of the dataset."""
    tokenizer: TokenizerConfig
    document_format: DocumentFormat
    workers: int = 1
    """Number of processes that tokenize."""
    max_bad: int | None = None
    """More bad lines than this end the run; None allows any number, and they are reported and left out."""
    overwrite: bool = False
    """Replace a dataset of this prefix, and forget an unfinished one of another plan."""


def preprocess(options: PreprocessOptions, console: Console) -> Sidecar:
    """Make the dataset and return its sidecar; its bytes depend neither on the workers nor on interruptions."""
    if options.output.name in ("", ".."):
        # Path("data/") is Path("data"), whose files lie beside the folder; "." and ".." would become hidden files.
        raise DataError(
            f"output {options.output} is a folder and no prefix of files. Give one with a name, such as "
            f"{options.output / 'train'}."
        )
    if options.max_bad is not None and options.max_bad < 0:
        raise DataError(f"at most {options.max_bad} bad lines: wanted 0 or more.")
    sources = find_input_files(options.inputs)
    tokenizer = load_tokenizer(options.tokenizer)
    folder = with_ending(options.output, ".partial")
    merged = folder / "merged"
    if not options.overwrite and not with_ending(merged, ".json").exists():
        _refuse_existing(options.output)
    make_folder(folder, f"{AGAIN} Or give another output.")
    with disk_errors_explained(options.output.parent, AGAIN):
        rivals = f"Wait for it to end, or give another output than {options.output}."
        with sole_writer(folder / "lock", wait_s=LOCK_WAIT_S, remedy=rivals):
            _start_or_resume(folder, _plan(options, sources, tokenizer), options.overwrite)
            if not with_ending(merged, ".json").exists():
                _make(options, sources, tokenizer, folder, console)
            sidecar = sidecar_from(with_ending(merged, ".json"))
            _publish(merged, options.output)
            _log(options.output, "finished", documents=sidecar.documents, tokens=sidecar.tokens)
            shutil.rmtree(folder)
    return sidecar


def _make(
    options: PreprocessOptions,
    sources: Sequence[InputFile],
    tokenizer: Tokenizer,
    folder: Path,
    console: Console,
) -> None:
    """Tokenize and merge: everything up to merged.json."""
    shards = plan_shards(sources, options.document_format)
    reports = finished_shards(shards, folder)
    missing = [shard for shard in shards if shard.index not in reports]
    _enforce_max_bad(options, shards, reports)
    _log(options.output, "tokenizing", shards=len(shards), finished=len(reports), workers=options.workers)
    workers = tokenizing(missing, options.document_format, options.tokenizer, folder, options.workers)
    with workers as done, DocumentProgress(console, options.output.name) as progress:
        progress.begin(sum(s.num_bytes for s in shards), sum(r.num_bytes for r in reports.values()))
        for report in done:
            reports[report.index] = report
            progress.add(report.num_bytes, report.documents)
            _log(
                options.output, "shard", index=report.index, documents=report.documents, tokens=report.tokens
            )
            _enforce_max_bad(options, shards, reports)
        rates = progress.rates() if missing else "tokenized by an earlier run"
    _report_bad_lines(options.output, shards, reports, console)
    if find_input_files(options.inputs) != tuple(sources):
        raise DataError(
            f"the inputs of {options.output} changed while they were read. Run again with --overwrite."
        )
    sidecar = _sidecar(options, sources, tokenizer, list(reports.values()))
    _require_space(folder, sum(path.stat().st_size for path in folder.glob("shard-*")))
    checksums = merge_shards(shards, reports, folder, folder / "merged", tokenizer.vocab_size)
    sidecar = replace(sidecar, bin_crc32=checksums[0], idx_crc32=checksums[1])
    write_atomically(folder / "merged.json", sidecar.to_json())
    console.print(
        f"{options.output}: {sidecar.documents} documents, {sidecar.tokens} tokens ({rates})", soft_wrap=True
    )


def _plan(options: PreprocessOptions, sources: Sequence[InputFile], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "version": PLAN_VERSION,
        "layout": asdict(options.document_format),
        "tokenizer": {
            "digest": tokenizer.digest,
            "eod_id": tokenizer.eod_id,
            "vocab_size": tokenizer.vocab_size,
        },
        "sources": [asdict(source) for source in sources],
    }


def _refuse_existing(output: Path) -> None:
    there = [str(path) for ending in ENDINGS if (path := with_ending(output, ending)).exists()]
    if there:
        raise DataError(
            f"{', '.join(there)} exist already. Give another output, or --overwrite to replace them."
        )


def _start_or_resume(folder: Path, plan: dict[str, Any], overwrite: bool) -> None:
    """Leave in `folder` the plan and the finished shards of it, and nothing else."""
    path = folder / "plan.json"
    found = json.loads(path.read_bytes()) if path.exists() else None
    differing = [key for key in plan if found and found.get(key) != plan[key]]
    if differing and not overwrite:
        raise DataError(
            f"{folder} holds an unfinished run with another {' and '.join(differing)} (see its plan.json). "
            "Finish that one with its own command, or give --overwrite to forget it."
        )
    for leftover in folder.iterdir():
        if leftover.name != "lock" and (found is None or differing or ".tmp" in leftover.name):
            leftover.unlink()
    write_atomically(path, json.dumps(plan))


def _sidecar(
    options: PreprocessOptions,
    sources: Sequence[InputFile],
    tokenizer: Tokenizer,
    reports: Sequence[ShardReport],
) -> Sidecar:
    documents = sum(report.documents for report in reports)
    num_bad = sum(report.num_bad for report in reports)
    if documents == 0:
        raise DataError(
            f"{options.output}: no document in {len(sources)} files ({num_bad} bad lines, the first ones in "
            f"{options.output}.log.jsonl). Look at --key and --format."
        )
    return Sidecar(
        tokenizer_kind=options.tokenizer.kind,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        max_token_id=max(report.max_token_id for report in reports),
        documents=documents,
        tokens=sum(report.tokens for report in reports),
        dtype=token_dtype(tokenizer.vocab_size).__name__,
        bad_lines=num_bad,
        sources=tuple(SourceFile(path=source.path, num_bytes=source.num_bytes) for source in sources),
    )


def _publish(merged: Path, output: Path) -> None:
    """Move merged.* to their names, the sidecar last; after a kill at any point the next run finishes the move."""
    if with_ending(merged, ".bin").exists():
        # An older dataset goes first: at no moment do files of two lie side by side as if they were one.
        for ending in (".json", ".idx"):
            with_ending(output, ending).unlink(missing_ok=True)
    for ending in (".bin", ".idx"):
        if with_ending(merged, ending).exists():
            move_into_place(with_ending(merged, ending), with_ending(output, ending))
    write_atomically(with_ending(output, ".json"), with_ending(merged, ".json").read_bytes())
    with_ending(merged, ".json").unlink()


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise DataError(f"{folder}: joining the parts takes {num_bytes} bytes, and {free} are free. {AGAIN}")


def _bad_lines(shards: Sequence[Shard], reports: dict[int, ShardReport]) -> list[tuple[str, int, str]]:
    """Return (file, line, problem) of the recorded bad lines, in order; every shard must have a report."""
    found: list[tuple[str, int, str]] = []
    lines_before: dict[str, int] = {}
    for shard in shards:
        report = reports[shard.index]
        for number, (file_slice, lines) in enumerate(zip(shard.file_slices, report.lines, strict=True)):
            start = lines_before.get(file_slice.path, 0)
            found += [
                (file_slice.path, start + bad.line, bad.problem)
                for bad in report.bad
                if bad.file_slice == number
            ]
            lines_before[file_slice.path] = start + lines
    return found


def _enforce_max_bad(
    options: PreprocessOptions, shards: Sequence[Shard], reports: dict[int, ShardReport]
) -> None:
    """Raise DataError beyond `max_bad`, counting up to the first shard without a report: lines have numbers there."""
    settled = list(takewhile(lambda shard: shard.index in reports, shards))
    num_bad = sum(reports[shard.index].num_bad for shard in settled)
    if options.max_bad is not None and num_bad > options.max_bad:
        raise DataError(
            f"{options.output}: {num_bad} bad lines so far, and --max-bad is {options.max_bad}. Correct the "
            f"input, or allow more.{_shown(num_bad, _bad_lines(settled, reports))}"
        )


def _report_bad_lines(
    output: Path, shards: Sequence[Shard], reports: dict[int, ShardReport], console: Console
) -> None:
    num_bad = sum(report.num_bad for report in reports.values())
    found = _bad_lines(shards, reports)
    for path, line, problem in found:
        _log(output, "bad line", path=path, line=line, problem=problem)
    if num_bad:
        console.print(
            f"{num_bad} bad lines were left out:{_shown(num_bad, found)}", markup=False, soft_wrap=True
        )


def _shown(num_bad: int, found: Sequence[tuple[str, int, str]]) -> str:
    lines = [f"\n  {path}:{line}: {problem}" for path, line, problem in found[:SHOWN_BAD_LINES]]
    more = num_bad - len(lines)
    return "".join(lines) + (f"\n  and {more} more" if more else "")


def _log(output: Path, event: str, **fields: Any) -> None:
    with open(with_ending(output, ".log.jsonl"), "a", encoding="utf-8") as log:
        log.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")
