"""The interface for Python programs: trainings, their metrics, conversions. docs/api.md lists the stable names."""

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli import cli
from mcore_rl.cli.start_ranks import next_log_dir, prepare
from mcore_rl.config.load import dump_config
from mcore_rl.config.run import RunConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import (
    INTERRUPTED_STATUS,
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    McoreRlError,
    RoutingError,
    TrainingError,
)
from mcore_rl.metrics.jsonl import FILE_NAME, NewRecords, read_records
from mcore_rl.storage.files import create_atomically
from mcore_rl.storage.run_config import load_run_config
from mcore_rl.workers.launcher import launch_local, under_launcher
from mcore_rl.workers.rank_guard import rank_guard

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "McoreRlError",
    "RoutingError",
    "TrainingError",
    "export_checkpoint",
    "import_checkpoint",
    "is_done",
    "load_config",
    "preprocess",
    "read_metrics",
    "train",
    "train_tokenizer",
]

ProgramName = Literal["pretrain", "sft", "rm", "dpo", "rl"]
Settings = Mapping[str, Any]
"""Values of config fields: by dotted key, `{"mesh.tp": 2}`, or in sections, `{"mesh": {"tp": 2}}`."""


def load_config(program: ProgramName, config: str | Path | Settings, overrides: Settings | None = None) -> RunConfig:
    """Load the config of a training, as `mcore-rl <program> CONFIG key=value ...` does.

    `config` is a TOML file, the name of a recipe such as "tiny_moe/grpo", or the fields themselves; `overrides` come on
    top. Whether the config can run on the ranks at hand is checked when it does. Raises ConfigError if there is no such
    program, or with all unknown fields and wrong values.
    """
    if program not in PROGRAMS:
        raise ConfigError(f"There is no program {program!r}. Name one of {', '.join(PROGRAMS)}.")
    path, fields = (Path(config), {}) if isinstance(config, str | Path) else (None, config)
    settings = {**fields, **(overrides or {})}
    written = [
        f"{key}={toml_value(str(value) if isinstance(value, Path) else value)}" for key, value in settings.items()
    ]
    return load_run_config(PROGRAMS[program].config, path, written)


def train(
    program: ProgramName,
    config: str | Path | Settings,
    overrides: Settings | None = None,
    *,
    ranks: int | None = None,
    on_step: Callable[[int, dict[str, Any]], None] | None = None,
    data: Iterable[Mapping[str, Any]] | None = None,
) -> Path:
    """Train as `mcore-rl <program>` does; a run that was stopped resumes, a finished run is left as it is.

    Without a launcher, start the ranks on this machine and wait for them; call it in the main thread. Under torchrun
    or srun this process is one rank, and every rank makes this call, once in its life.

    Args:
        program: "pretrain", "sft", "rm", "dpo" or "rl".
        config: As of `load_config`.
        overrides: As of `load_config`.
        ranks: Number of local ranks; None: the fewest that the mesh needs. A launcher has chosen it already.
        on_step: Called in the main thread of this process with a step and all of its metrics by name, those of its
            evaluation too, every `log.interval` steps, once the next step is logged. An error that it raises ends the
            run at once; a file STOP in `run_dir` ends it after the current step, with a checkpoint. It is not possible
            under a launcher: name a class in log.sinks instead.
        data: Records to train on, or the prompts of "rl", such as the rows of a `datasets.Dataset`, in any shape that a
            file may have. They are written to `data.jsonl` in `run_dir`, and a call that resumes the run is given the
            same. Not for "pretrain", which reads what `preprocess` writes, and not under a launcher.

    Returns:
        The folder of the run, `run_dir`.

    Raises:
        ConfigError: when the config cannot run; nothing has been started then.
        TrainingError: when a rank failed; its message is on stderr. Under a launcher the process ends instead.
        KeyboardInterrupt: after Ctrl-C, once the run is saved; the same call resumes it.
    """
    if under_launcher():
        if ranks is not None:
            raise ConfigError(f"ranks={ranks}, but a launcher has started the ranks. Leave it out.")
        if on_step is not None:
            raise ConfigError(
                "on_step is called by the process that starts the ranks, and a launcher has started them. Name a class "
                "of your own in log.sinks, as module:Class."
            )
        if data is not None:
            raise ConfigError(
                "data is written by the process that starts the ranks, and a launcher has started them. Write it to a "
                "file, and name this in the config."
            )
        with rank_guard():
            loaded = load_config(program, config, overrides)
            importlib.import_module(PROGRAMS[program].module).train(loaded)
        return Path(loaded.run_dir)
    loaded = load_config(program, config, overrides)
    with ExitStack() as refused:
        if data is not None:
            written = _written(data, program, Path(loaded.run_dir), refused)
            loaded = load_config(program, config, {**(overrides or {}), **written})
        ranks = ranks or loaded.mesh.smallest_world
        PROGRAMS[program].check(loaded, ranks)
        prepare(loaded, ranks, trains=True)
        failed = refused.pop_all()
    log_dir = next_log_dir(Path(loaded.run_dir))
    file = log_dir / "config.toml"
    file.write_text(dump_config(loaded), encoding="utf-8")
    news = NewRecords(Path(loaded.run_dir, FILE_NAME))
    whole: dict[int, dict[str, Any]] = {}

    def report(*, is_last: bool = False) -> None:
        for record in news.take() if on_step else ():
            if "event" not in record:
                # An evaluation has a record of its own; a step is whole when that of another one begins.
                step = int(str(record["step"]))
                give({earlier for earlier in whole if earlier != step})
                whole.setdefault(step, {}).update(_values(record))
        if is_last:
            give(set(whole))

    def give(steps: Iterable[int]) -> None:
        for step in sorted(steps):
            assert on_step is not None
            on_step(step, whole.pop(step))

    status = launch_local(PROGRAMS[program].module, [str(file)], ranks, log_dir, meanwhile=report)
    report(is_last=True)
    if status == INTERRUPTED_STATUS:
        raise KeyboardInterrupt
    if status:
        if not Path(loaded.run_dir, FILE_NAME).exists():
            failed.close()
        raise TrainingError(
            f"{program} ended with status {status}. The output of its ranks is in {log_dir}; correct the cause and "
            "call train again, which resumes the run from its last checkpoint."
        )
    return Path(loaded.run_dir)


def _written(data: Iterable[Mapping[str, Any]], program: ProgramName, run_dir: Path, undo: ExitStack) -> dict[str, Any]:
    """Write records to the folder of their run; return the fields that name the file. Another file of that name stays.
    A file that this call makes is deleted by `undo`, so that after a start without a step other records may be given.
    """
    if program == "pretrain":
        raise ConfigError('train("pretrain", ...) reads encoded documents. Write data to files, and call preprocess.')
    file = run_dir / "data.jsonl"
    try:
        lines = "".join(json.dumps(dict(record), ensure_ascii=False) + "\n" for record in data).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"A record of data is no mapping of JSON's types: {error}. Convert it.") from error
    run_dir.mkdir(parents=True, exist_ok=True)
    has_begun = (run_dir / FILE_NAME).exists() and not file.exists()
    if not has_begun and create_atomically(file, lines):
        undo.callback(file.unlink)
    elif has_begun or file.read_bytes() != lines:
        raise ConfigError(
            f"{file} does not have the records of data: a run has begun with others, or the file is of something else. "
            "Give the same, or set another run_dir."
        )
    if program == "rl":
        return {"rl.prompts.task": "file", "rl.prompts.files": [str(file)]}
    return {"data.train": [str(file)]}


def is_done(run_dir: str | Path) -> bool:
    """Return whether all steps of a run are done; a run that was asked to stop, or failed, is not done."""
    return Path(run_dir, "DONE").exists()


def read_metrics(run_dir: str | Path) -> dict[str, dict[int, Any]]:
    """Read the metrics of a run, also while it is running: name -> step -> value, a number or a list of lists, such as
    `read_metrics(run)["train/loss_nats"][20]`; docs/fields/metrics.md explains the names. Raises DataError when the run
    has logged nothing yet.
    """
    metrics: dict[str, dict[int, Any]] = {}
    for record in read_records(Path(run_dir, FILE_NAME)):
        if "event" in record:
            continue
        step = int(str(record["step"]))
        for name, value in _values(record).items():
            metrics.setdefault(name, {})[step] = value
    return metrics


def _values(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: float(value) if value in ("nan", "inf", "-inf") else value
        for name, value in record.items()
        if name not in ("step", "time")
    }


def train_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    format: Literal["jsonl", "text"] | None = None,
    key: str = "text",
) -> Path:
    """Train a sentencepiece tokenizer on JSON lines or text files, as `mcore-rl data tokenizer` does; return `output`.
    `format` is by default that of the files' endings, `key` the field of JSON lines with the text. Raises DataError
    when a file cannot be read, or `output` exists.
    """
    _run("data", "tokenizer", *map(str, inputs), output=output, vocab_size=vocab_size, format=format, key=key)
    return Path(output)


def _run(*words: str, **options: str | Path | int | None) -> None:
    """Run a command. Its messages name options, as `--vocab-size`; here they are parameters, `vocab_size`."""
    flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value is not None]
    try:
        cli.run([*words, *(word for flag in flags for word in flag)])
    except McoreRlError as error:
        text = re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)", lambda match: match[1].replace("-", "_"), str(error))
        raise type(error)(text) from None


def preprocess(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str | Path,
    *,
    workers: int = 1,
    format: Literal["jsonl", "text"] | None = None,
    key: str = "text",
) -> Path:
    """Encode JSON lines or text files as OUTPUT.bin, .idx and .json, as `mcore-rl data preprocess` does; return
    `output`, a prefix for `data.train`; `format` and `key` as of `train_tokenizer`. Raises DataError when a file cannot
    be read, or the dataset exists.
    """
    options: dict[str, str | Path | int | None]
    options = {"output": output, "tokenizer": tokenizer, "workers": workers, "format": format, "key": key}
    _run("data", "preprocess", *map(str, inputs), **options)
    return Path(output)


def import_checkpoint(
    hf_folder: str | Path, output: str | Path, *, dtype: Literal["keep", "bf16", "fp32"] = "keep", workers: int = 2
) -> Path:
    """Convert safetensors of Hugging Face's format to a checkpoint, as `mcore-rl convert import` does; return `output`,
    which `checkpoint.load` takes on every mesh. Raises McoreRlError when the model is not supported, a tensor is
    missing or left over, or `output` exists.
    """
    _run("convert", "import", str(hf_folder), str(output), dtype=dtype, workers=workers)
    return Path(output)


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    reference: str | Path | None = None,
    tokenizer: str | Path | None = None,
    dtype: Literal["keep", "bf16", "fp32"] = "keep",
    workers: int = 2,
) -> Path:
    """Convert a checkpoint, or the newest one of a run, to a folder for transformers and vLLM; return `output`.

    Config and tokenizer are copied from `reference`, a folder of the same model; None: neither is. `tokenizer` is a
    folder or file with another one, or "none". Biases of experts stay float32. Raises McoreRlError when the family has
    no such model in transformers, or `output` exists.
    """
    _run(
        "convert",
        "export",
        str(checkpoint),
        str(output),
        reference=reference,
        tokenizer=tokenizer,
        dtype=dtype,
        workers=workers,
    )
    return Path(output)
