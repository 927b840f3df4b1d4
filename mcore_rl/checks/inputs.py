"""The files that a run reads, and checks that they exist."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from mcore_rl.config.data import DataConfig, TokenizerConfig
from mcore_rl.config.extension import HTTP_PARTS, JUDGE_PART
from mcore_rl.config.preferences import DPOConfig, PreferenceDataConfig
from mcore_rl.config.rl.loss import SELF, DistillConfig, PtxConfig
from mcore_rl.config.rl.rollout import RewardConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.storage.checksums import crc32_of
from mcore_rl.storage.files import POINTER_REMEDY, data_files, is_lfs_pointer
from mcore_rl.storage.folders import NO_TEMPLATE, template_in

OF_TEXT = ("data.", "rl.prompts.", "rl.eval.", "rl.ptx.")
"""Prefixes of the fields that name files of text, tokenizers or templates."""
NO_TEMPLATES = ("", "tokenizer", "plain", "raw")
"""Values of a field for a template that name no file."""
OF_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja")
"""Files of a tokenizer's folder that decide its tokens; a model's weights may be in the same folder."""

Inputs = Iterable[tuple[str, Path, str]]
"""Field, path and kind of each thing that a run reads."""


def absent_inputs(config: RunConfig) -> Iterator[str]:
    """Yield a sentence, with its remedy, for each file that is missing, no file, or a pointer of Git LFS, and for a
    chat template that the tokenizer lacks.
    """
    yield from absent_template(config)
    for name, path, what in inputs_of(config):
        if not os.path.exists(path):  # also False if the name is too long, where Path.exists() raises
            yield absent(name, path, what)
        elif not (path.is_file() or path.is_dir()):
            yield f"{name} names {what} {path}, a pipe or device, which cannot be read twice. Name a file."
        for file in filter(is_lfs_pointer, _files_of(name, path)):
            yield f"{name} names {what} {path}, and {file} holds no data. {POINTER_REMEDY}"


def absent_template(config: RunConfig) -> Iterator[str]:
    """Yield a sentence if the tokenizer's folder has not the chat template that a run takes from it."""
    data = getattr(config, "data", None)
    tokenizer = getattr(data, "tokenizer", TokenizerConfig())
    if getattr(data, "chat_template", "") == "tokenizer" and tokenizer.kind == "huggingface":
        folder = Path(tokenizer.path or "")
        if folder.is_dir() and template_in(folder) is None:
            yield NO_TEMPLATE.format(folder=folder)


def absent(name: str, path: Path, what: str) -> str:
    """Return the sentence on the missing `path` of field `name`; it suggests similar files."""
    there = sorted(entry.name for entry in path.parent.iterdir()) if os.path.isdir(path.parent) else []
    near = difflib.get_close_matches(path.name, there, n=3)
    hint = f" Its folder has {' and '.join(near)}." if near else ""
    return f"{name} names {what} {path}, which does not exist.{hint} Make it, or correct the path."


def contents_of_inputs(inputs: Inputs) -> dict[str, dict[str, str]]:
    """Return field -> path -> size and CRC-32 of input files; that of a .bin is in PREFIX.json."""
    contents: dict[str, dict[str, str]] = {}
    for name, path, _ in inputs:
        if name.startswith(OF_TEXT):
            contents.setdefault(name, {}).update({str(file): _content(file) for file in _files_of(name, path)})
    return contents


def _files_of(name: str, path: Path) -> Iterator[Path]:
    files = [path]
    if os.path.isdir(path):
        is_tokenizer = name.endswith("tokenizer.path")
        files = [path / file for file in OF_TOKENIZERS] if is_tokenizer else data_files(path)
    return (file for file in files if os.path.isfile(file))


def _content(file: Path) -> str:
    size = f"{file.stat().st_size} bytes"
    if file.suffix != ".bin":
        return f"{size}, CRC-32 {crc32_of(file)}"
    try:
        crc = json.loads(file.with_suffix(".json").read_bytes())["bin_crc32"]
    except (OSError, ValueError, LookupError, TypeError):
        crc = ""
    return f"{size}, CRC-32 {crc}" if crc else size


def inputs_of(config: RunConfig) -> Inputs:
    """Yield field, path and kind of everything that a run reads, except inputs that its own checkpoints replace."""
    starts = not has_checkpoints(Path(config.run_dir))
    critic = config.critic if isinstance(config, RlRunConfig) else None
    for field, path, what in (
        ("checkpoint.load", config.checkpoint.load, "the checkpoint"),
        ("dpo.reference", isinstance(config, DPOConfig) and config.dpo.reference, "the checkpoint"),
        ("lora.load", config.lora.load, "the folder of adapters"),
        ("rl.advantage.critic.load", critic and critic.load, "the checkpoint"),
    ):
        if path and starts:
            yield field, Path(path), what
    data = getattr(config, "data", None)
    tokenizer = getattr(data, "tokenizer", TokenizerConfig())
    if tokenizer.path:
        yield "data.tokenizer.path", Path(tokenizer.path), "the tokenizer"
    template = getattr(data, "chat_template", "")
    if template not in NO_TEMPLATES:
        yield "data.chat_template", Path(template), "the template"
    for split, file in _files(data):
        if not file.startswith("hub:"):
            yield f"data.{split}", Path(file), "the file"
    if isinstance(config, RlRunConfig):
        for field, files in (("rl.prompts.files", config.rl.prompts.files), ("rl.eval.files", config.rl.eval.files)):
            yield from ((field, Path(file), "the file") for file in files if not file.startswith("hub:"))
        yield from _scoring_models(config.rl.reward)
        yield from _teachers_and_texts(config.rl.distill, config.rl.ptx)
        if config.served is not None and config.served.base_model:
            yield "rl.engine.base_model", Path(config.served.base_model), "the folder"
        if config.served is not None and config.served.ca_file:
            yield "rl.engine.ca_file", Path(config.served.ca_file), "the file"


def _scoring_models(reward: RewardConfig) -> Inputs:
    for part in reward.parts:
        if part.startswith(JUDGE_PART):
            yield "rl.reward.parts", Path(part.removeprefix(JUDGE_PART)), "the judge's template"
    for part in reward.model_parts:
        yield "rl.reward.parts", Path(part.partition(":")[2]), "the reward model"
    if reward.model_tokenizer is not None and reward.model_tokenizer.path:
        yield "rl.reward.model_tokenizer.path", Path(reward.model_tokenizer.path), "the tokenizer"
    if reward.model_chat_template not in (None, *NO_TEMPLATES):
        yield "rl.reward.model_chat_template", Path(str(reward.model_chat_template)), "the template"
    if reward.server.ca_file:
        yield "rl.reward.server.ca_file", Path(reward.server.ca_file), "the file"


def _teachers_and_texts(distill: DistillConfig, ptx: PtxConfig) -> Inputs:
    tagged = {f"rl.distill.teachers.{tag}": path for tag, path in distill.teachers.items()}
    for field, named in {"rl.distill.teacher": distill.teacher or SELF, **tagged}.items():
        if named != SELF and not named.startswith(HTTP_PARTS):
            yield field, Path(named), "the checkpoint"
    if distill.tokenizer is not None and distill.tokenizer.path:
        yield "rl.distill.tokenizer.path", Path(distill.tokenizer.path), "the tokenizer"
    if distill.server.ca_file:
        yield "rl.distill.server.ca_file", Path(distill.server.ca_file), "the file"
    yield from (("rl.ptx.files", Path(file), "the file") for file in ptx.files if not file.startswith("hub:"))
    for prefix in ptx.tokens:
        yield from (("rl.ptx.tokens", Path(prefix + ending), "the file") for ending in (".bin", ".idx"))


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether a run has checkpoints of its own to resume from."""
    folder = run_dir / "checkpoints"
    return os.path.isdir(folder) and any(folder.iterdir())


def _files(data: object) -> Iterator[tuple[str, str]]:
    if isinstance(data, DataConfig):
        for split in ("train", "valid", "test"):
            for prefix in getattr(data, split):
                yield from ((split, prefix + ending) for ending in (".bin", ".idx"))
    elif isinstance(data, SFTDataConfig | PreferenceDataConfig):
        for split in ("train", "valid"):
            yield from ((split, file) for file in getattr(data, split))
