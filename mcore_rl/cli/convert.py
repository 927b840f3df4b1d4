"""`mcore-rl convert`, `inspect` and `check`: convert checkpoints without a GPU, list and compare them, find damage."""

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal

from rich.console import Console

from mcore_rl.cli.commands import COMMANDS
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.convert.check import LOGITS_BYTES, compare, contents, plan_check
from mcore_rl.convert.copying.conversion import Conversion, CopySettings
from mcore_rl.convert.copying.copier import convert
from mcore_rl.convert.copying.tensors import OUTPUT_DTYPES
from mcore_rl.convert.exporting import ExportOptions, HubRepository, plan_export
from mcore_rl.convert.hf.text_files import ModelText, has_tokenizer
from mcore_rl.convert.importing import ImportOptions, plan_import, plan_relayout
from mcore_rl.convert.megatron.model import KeyLayout, native_layout, open_dist_model
from mcore_rl.convert.peft import plan_adapter_export
from mcore_rl.convert.upcycling import UpcycleOptions, plan_upcycle
from mcore_rl.data.tokenizer import digest_of_folder
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.metrics.progress import ByteProgress, readable_bytes
from mcore_rl.storage.checkpoint import find_checkpoint
from mcore_rl.storage.files import is_event_log, refuse_overlap
from mcore_rl.storage.folders import cached_or_given, is_hf, read_config, read_run, run_of_checkpoint

MAX_LINES = 100
OF_EACH = {"workers", "max_ram", "overwrite", "log"}
"""Options that every action accepts."""
OF_ACTION = {
    "plan": {*"dtype mtp keys layers vocab_multiple reference family tokenizer merge adapter quantize".split()},
    "import": {*"dtype mtp keys layers vocab_multiple family check_logits".split()},
    "export": {*"dtype mtp reference tokenizer merge adapter quantize".split(), *("push_to_hub", "public", "dry_run")},
    "verify": {"mtp", "reference", "logits", "family"},
    "relayout": {"keys", "layers", "reference"},
    "upcycle": {*"dtype check_logits experts top_k granularity shared noise router_std seed".split()},
}
"""Options that an action uses, beyond those of each."""


def main(args: argparse.Namespace) -> int:
    """Run an action and return the exit status: 0, or 1 if `verify` finds a difference."""
    _check(args)
    sources = {"import": 1, "plan": 1, "upcycle": 1, "verify": 2}.get(args.action, 0)
    args.paths[:sources] = map(cached_or_given, args.paths[:sources])
    _check_log(args)
    hub = HubRepository(args.push_to_hub, args.public) if args.push_to_hub else None
    if hub is not None:
        hub.check(needs_token=not args.dry_run)
    settings = CopySettings(workers=args.workers, max_ram_bytes=args.max_ram, overwrite=args.overwrite)
    with ByteProgress(Console(), args.log) as progress:
        if args.action == "plan":
            source = args.paths[0]
            output = args.paths[1] if len(args.paths) == 2 else Path(f"{source.name}-converted")
            conversion = PLANS["import" if is_hf(source) else "export"](source, output, args, settings)
            for line in (*conversion.notes, *conversion.lines(settings)):
                progress.message(line)
        elif args.action == "verify":
            return _verify(args, progress)
        else:
            conversion = PLANS[args.action](args.paths[0], args.paths[1], args, settings)
            if args.action in ("import", "upcycle") and _wants_logits(args, conversion, progress):
                conversion = replace(conversion, check=partial(_check_logits, args, progress))
            if hub is not None and args.dry_run:
                for line in hub.preview(conversion):
                    progress.message(line)
                return 0
            convert(conversion, settings, progress)
            if hub is not None:
                progress.message(f"{args.paths[1]} is at {hub.push(args.paths[1])}")
        return 0


def report_differences(one: Path, other: Path, args: argparse.Namespace, progress: ByteProgress) -> int:
    """List the differences of two checkpoints and return their number."""
    found = compare(one, other, args.reference, args.mtp, progress, args.family)
    for difference in found[:MAX_LINES]:
        progress.message(str(difference))
    if len(found) > MAX_LINES:
        progress.message(f"... and {len(found) - MAX_LINES} more")
    progress.message(f"{len(found)} differences" if found else "no difference")
    progress.event("verify", differences=[str(difference) for difference in found])
    return len(found)


def _import(source: Path, output: Path, args: argparse.Namespace, settings: CopySettings) -> Conversion:
    options = {field.name: getattr(args, field.name) for field in fields(ImportOptions)}
    return plan_import(source, output, ImportOptions(**options), settings)


def _wants_logits(args: argparse.Namespace, conversion: Conversion, progress: ByteProgress) -> bool:
    if args.check_logits is not None:
        return bool(args.check_logits)
    if conversion.num_bytes > LOGITS_BYTES or args.max_ram is not None:
        progress.message(
            f"logits are not compared: only of models up to {readable_bytes(LOGITS_BYTES)}, without --max-ram "
            "(--check-logits compares them)"
        )
        return False
    model_type = read_config(args.paths[0]).get("model_type")
    if args.family is not None or not _logits().is_in_transformers(model_type):
        progress.message(f"logits are not compared: transformers has no {model_type!r}")
        return False
    return True


def _logits() -> ModuleType:
    """Import the comparison of outputs, with transformers; this takes a second, which only these commands need."""
    return importlib.import_module("mcore_rl.convert.logits")


def _check_logits(args: argparse.Namespace, progress: ByteProgress, folder: Path) -> None:
    dtype = OUTPUT_DTYPES.get(args.dtype)
    distance = _logits().largest_distance(args.paths[0], folder, None, progress, mtp=args.mtp, dtype=dtype)
    is_import = args.action == "import"
    source = "transformers'" if is_import else "the dense model's"
    found = f"logits differ from {source} by at most {distance.logits:.3g}"
    if args.noise:
        progress.message(f"{found}: the noise")
        return
    if distance.is_small:
        progress.message(f"{found} (rounding explains {distance.tolerance:.3g})")
        return
    found += f", and rounding explains {distance.tolerance:.3g}."
    if is_import:
        raise CheckpointError(
            f"the import of {args.paths[0]} is another model: {found} Its config.json has something that the family's "
            "file does not read, or reads otherwise. To import it all the same: --no-check-logits."
        )
    raise CheckpointError(
        f"the mixture of {args.paths[0]} is another function: {found} To write it all the same: --no-check-logits."
    )


def _export(source: Path, output: Path, args: argparse.Namespace, settings: CopySettings) -> Conversion:
    checkpoint = find_checkpoint(source)
    if args.adapter is not None:
        return plan_adapter_export(source, output, args.adapter, args.reference, args.dtype, settings)
    run = run_of_checkpoint(checkpoint)
    is_import = run is None and (checkpoint / "config.json").is_file()
    if is_import and args.reference is None and args.tokenizer is None:
        args.reference = checkpoint  # it has the small files of its source
    options = ExportOptions(
        reference=args.reference,
        dtype=args.dtype,
        mtp=args.mtp,
        quantize=args.quantize,
        text=_text(args, run),
        run=run,
        merges=args.merge,
    )
    return plan_export(source, output, options, settings)


def _text(args: argparse.Namespace, run: Path | None) -> ModelText | None:
    """Return the tokenizer of an export, None for the reference's or none; ConfigError without one or if two differ."""
    trained = read_run(run) if run is not None else None
    template = trained.chat_template if trained is not None else None
    if args.tokenizer == "none":
        return None
    if args.tokenizer is not None:
        kind: Literal["huggingface", "sentencepiece"] = (
            "huggingface" if Path(args.tokenizer).is_dir() else "sentencepiece"
        )
        return ModelText(tokenizer=TokenizerConfig(kind=kind, path=args.tokenizer), chat_template=template)
    in_reference = args.reference is not None and has_tokenizer(args.reference)
    theirs = digest_of_folder(args.reference) if in_reference else None
    own = find_checkpoint(args.paths[0])  # an import has the tokenizer of its source
    if trained is not None and trained.tokenizer.path is not None:
        if in_reference and not Path(trained.tokenizer.path).exists():
            return None
        own = Path(trained.tokenizer.path)
    if theirs is not None and digest_of_folder(own) not in (None, theirs):
        raise ConfigError(
            f"--reference {args.reference} has another tokenizer than {own}, that of the model. Name the one that the "
            "output should have: --tokenizer FOLDER."
        )
    if trained is not None and trained.tokenizer.path is not None:
        return ModelText(tokenizer=trained.tokenizer, chat_template=template)
    if in_reference or args.action == "plan":
        return None
    raise ConfigError(
        f"{args.paths[0]} names no tokenizer, and without one the output makes no text: transformers would open it "
        "with a vocabulary of one token. Give --tokenizer FOLDER_OR_MODEL_FILE, a --reference that has one, or, for "
        "the weights alone, --tokenizer none."
    )


def _relayout(source: Path, output: Path, args: argparse.Namespace, settings: CopySettings) -> Conversion:
    layers = args.layers or native_layout(open_dist_model(source, args.reference).model).layers
    return plan_relayout(source, output, KeyLayout(args.keys, layers), args.reference, settings)


def _upcycle(source: Path, output: Path, args: argparse.Namespace, settings: CopySettings) -> Conversion:
    if args.experts is None or args.top_k is None:
        raise ConfigError(
            "convert upcycle needs the experts of a layer, and how many of them a token is sent to: --experts 8 "
            "--top-k 2."
        )
    options = {name: getattr(args, name) for field in fields(UpcycleOptions) if (name := field.name) != "num_experts"}
    return plan_upcycle(source, output, UpcycleOptions(num_experts=args.experts, **options), settings)


PLANS: dict[str, Callable[[Path, Path, argparse.Namespace, CopySettings], Conversion]] = {
    "import": _import,
    "export": _export,
    "relayout": _relayout,
    "upcycle": _upcycle,
}


def _verify(args: argparse.Namespace, progress: ByteProgress) -> int:
    one, other = args.paths
    differs = report_differences(one, other, args, progress) > 0
    if args.logits:
        distance = _logits().largest_distance(one, other, args.reference, progress)
        progress.message(
            f"logits differ by at most {distance.logits:.3g} (rounding explains {distance.tolerance:.3g}), outputs of "
            f"layers by {distance.layers:.3g} of the largest"
        )
        differs = differs or not distance.is_small
    return int(differs)


def _check_log(args: argparse.Namespace) -> None:
    """Raise a ConfigError for a log in a folder that is read or written, or in place of a file that is not a log."""
    if args.log is None:
        return
    paths = [(str(path), path) for path in args.paths]
    refuse_overlap(args.log, paths if args.reference is None else [*paths, ("--reference", args.reference)])
    if os.path.lexists(args.log) and not is_event_log(args.log):
        raise ConfigError(f"--log {args.log} is no log, and lines would be appended to it. Name another file.")


def _check(args: argparse.Namespace) -> None:
    wanted = (1, 2) if args.action == "plan" else (2,)
    if len(args.paths) not in wanted:
        raise ConfigError(
            f"convert {args.action} takes {' or '.join(map(str, wanted))} folders, got {len(args.paths)}."
        )
    # Only a parser knows the defaults; an option that was given its default passes, as it changes nothing.
    parser = argparse.ArgumentParser(add_help=False)
    COMMANDS["convert"].arguments(parser)
    options = (option for option in parser._actions if option.option_strings)
    given = [option.dest for option in options if getattr(args, option.dest) != option.default]
    for name in given:
        if name not in OF_EACH | OF_ACTION[args.action]:
            raise ConfigError(f"--{name.replace('_', '-')} means nothing to convert {args.action}. Leave it out.")
        if args.adapter and name in ("mtp", "tokenizer", "merge"):
            raise ConfigError(f"--{name} means nothing with --adapter, which writes no weights. Leave one of them out.")
        if name in ("public", "dry_run") and "push_to_hub" not in given:
            raise ConfigError(f"--{name.replace('_', '-')} means nothing without --push-to-hub NAME. Add it.")


def inspect_checkpoint(args: argparse.Namespace) -> int:
    """List a checkpoint and return the exit status: 0, or 1 if --diff finds a difference."""
    with ByteProgress(Console()) as progress:
        if args.diff is None:
            for line in contents(cached_or_given(args.path)).lines():
                progress.message(line)
            return 0
        args.reference, args.mtp, args.family = None, "keep", None
        return int(report_differences(args.path, args.diff, args, progress) > 0)


def check_files(args: argparse.Namespace) -> int:
    """Print a line for each file and return the exit status: 0, or 1 if a file is damaged or not understood."""
    console = Console()

    def show(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    plan = plan_check(args.path)
    show(plan.title)
    bad: dict[str, list[str]] = {"damaged": [], "not understood": []}
    for checked in plan.run(args.workers):
        size = "-" if checked.num_bytes is None else readable_bytes(checked.num_bytes)
        show(f"  {checked.name}  {size}  {checked.finding}")
        if checked.verdict != "sound":
            bad[checked.verdict].append(checked.name)
    damaged, strange = bad.values()
    if strange:
        show(f"NOT UNDERSTOOD: {', '.join(strange)}, so that nothing can be said of the files that it describes.")
    if damaged:
        show(f"DAMAGED: {len(damaged)} of {len(plan.checks)} files: {', '.join(damaged)}. Take another copy.")
    elif not strange:
        show(f"{len(plan.checks)} files, none damaged")
    return 1 if damaged or strange else 0
