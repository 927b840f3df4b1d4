"""Export: convert a Megatron checkpoint to a Hugging Face folder, and push it to the Hub."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_rl.checks.model import checked_hf_config
from mcore_rl.config.extension import optional_package
from mcore_rl.convert.copying import tensors
from mcore_rl.convert.copying.conversion import (
    Conversion,
    CopySettings,
    RecordedTask,
    file_checksums,
    import_behind,
    write_manifest,
)
from mcore_rl.convert.hf import folder as hf_folder
from mcore_rl.convert.hf import text_files as hf_text
from mcore_rl.convert.hf.model import HfSource, MtpLayers, as_stored, expert_layout, in_text_names
from mcore_rl.convert.hf.quantization import FP8, FP8_SCALE
from mcore_rl.convert.hf.writer import Blocks, Quantization, SafetensorsWriter, WithReference, blocks_like, shards_of
from mcore_rl.convert.megatron.model import DistModel, open_dist_model
from mcore_rl.convert.megatron.tensors import MergedSource
from mcore_rl.data.answer_ends import GENERATION_CONFIG
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import score_config
from mcore_rl.families.shells import TEXT, shell_of
from mcore_rl.families.weight_map import AxisRange, copies_into_hf, listed, sizes, whole
from mcore_rl.metrics.progress import readable_bytes
from mcore_rl.storage.checkpoint import SCORE_SHIFT
from mcore_rl.storage.checksums import as_hex
from mcore_rl.storage.files import sizes_and_times
from mcore_rl.storage.folders import read_config

MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of config.json for the number of MTP layers."""
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of config.json for the type in which transformers 5 and 4 open a model."""
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json for a quantization, in transformers, compressed-tensors and MLX."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """User options for the output of an export."""

    reference: Path | None = None
    """A folder of the same model, from which config, tokenizer and other small files are copied."""
    dtype: tensors.OutputDtype = "keep"
    """Type of the weights; expert biases stay fp32, or with "keep" in the type that they were imported from."""
    mtp: MtpLayers = "keep"
    quantize: Quantization = "none"
    """`int4`, `fp8`: tensors that the reference has in such blocks are written in them."""
    text: hf_text.ModelText | None = None
    """The tokenizer that the model was trained with; None for the reference's, if any."""
    run: Path | None = None
    merges: bool = False


def plan_export(source: Path, folder: Path, options: ExportOptions, settings: CopySettings) -> Conversion:
    """Plan an export; CheckpointError or ConfigError for all that can be known before it starts."""
    reference, others = _reference(options.reference)
    copied = hf_folder.small_files(options.reference) if options.reference is not None else {}
    if options.text is not None:
        # Its tokenizer comes as a whole: a chat template of the reference's would go before an entry of its own.
        copied = {name: file for name, file in copied.items() if not hf_text.is_of_tokenizer(name)}
    read = sizes_and_times(copied.values())
    experts = expert_layout(reference) if reference else "each"
    adapters: Literal["merge", "refuse"] = "merge" if options.merges else "refuse"
    dist_model = open_dist_model(source, options.reference, mtp=options.mtp, experts=experts, adapters=adapters)
    passing = _passing(reference, others)
    if passing and dist_model.model.head == "score":
        raise CheckpointError(
            f"{source} has scores, and --reference {options.reference} is a model of images, which has none. Leave out "
            "--reference, and name the tokenizer: --tokenizer."
        )
    plain = export_targets(dist_model, options.dtype, reference)
    blocks = blocks_like(options.quantize, reference, options.reference, plain)
    targets = plain if blocks is None else blocks.targets(plain)
    if shell := shell_of(reference.config or {}) if reference else None:
        targets = [replace(target, name=shell.folder_name(target.name)) for target in targets]
    targets += passing
    copied_from = reference if passing or blocks else None
    shards = shards_of(targets, settings.shard_bytes)
    files, notes = _small_files(dist_model, options, [*plain, *passing])
    digest = sha256(b"".join(f"{name} {len(files[name])}".encode() + files[name] for name in sorted(files)))
    return Conversion(
        title="export",
        final=folder,
        sources=list(_sources(source, dist_model, options)),
        targets=targets,
        tasks=tensors.tasks_of(shards, settings.task_bytes),
        open_source=partial(_source, dist_model, copied_from, blocks),
        writer=SafetensorsWriter(shards),
        identity=f"export {options} {digest.hexdigest()} {dist_model.model} {dist_model.folder.digest}",
        read=read | dist_model.folder.stamps | (copied_from.stamps if copied_from else {}),
        finish=partial(
            finish_folder,
            copied,
            files,
            {"kind": "export", "family": dist_model.model.family, "step": dist_model.folder.step},
            lambda _: dist_model.folder.described,
        ),
        notes=[
            f"{dist_model.model.family}, step {dist_model.folder.step}: {dist_model.layout}",
            *notes,
            *_taken_notes(dist_model, reference, others, blocks),
            *([blocks.note] if blocks else []),
            *_padding_notes(dist_model),
            *shift_notes(dist_model),
            *_merge_notes(dist_model, options),
        ],
    )


def _sources(source: Path, dist_model: DistModel, options: ExportOptions) -> Iterator[tuple[str, Path]]:
    yield from (("the source", source), ("the checkpoint", dist_model.folder.path))
    if options.run is not None:
        yield "its run", options.run
    if options.reference is not None:
        yield "--reference", options.reference
    if options.text is not None and options.text.tokenizer.path is not None:
        yield "the tokenizer", Path(options.text.tokenizer.path)


def export_targets(
    dist_model: DistModel, dtype: tensors.OutputDtype, reference: hf_folder.HfFolder | None
) -> list[tensors.TargetTensor]:
    """Return Hugging Face's tensors in the order of the family's rules, then the duplicates that are written.

    Expert biases, which Megatron has in fp32, keep the type of the folder that they were imported from while it holds
    their values: training moves them by less than bf16 can tell.
    """
    copies = copies_into_hf(dist_model.weights.blocks)
    shapes = dict(dist_model.weights.hf_shapes)
    for duplicate in dist_model.weights.copies:
        # Without a reference, published checkpoints decide.
        if duplicate.name in reference.tensors if reference else duplicate.written:
            copies[duplicate.name] = copies[duplicate.original]
            shapes[duplicate.name] = shapes[duplicate.original]
    in_fp32 = {name for name in shapes if any(copy.source in dist_model.weights.fp32_keys for copy in copies[name])}
    targets = [
        tensors.TargetTensor(
            name=name,
            shape=shape,
            dtype=tensors.output_dtype(name, copies[name], dtype, dist_model.dtype, is_fp32=name in in_fp32),
            copies=copies[name],
        )
        for name, shape in shapes.items()
    ]
    if dtype != "keep" or not in_fp32:
        return targets
    before, source = _types_before(dist_model, reference), dist_model.source()

    def in_its_type(target: tensors.TargetTensor) -> tensors.TargetTensor:
        values = tensors.fill(tensors.chunk_at(target, whole(target.shape)), source)
        type_before = before.get(target.name, target.dtype)
        return replace(target, dtype=type_before) if torch.equal(values.to(type_before).float(), values) else target

    return [in_its_type(target) if target.name in in_fp32 else target for target in targets]


def _types_before(dist_model: DistModel, reference: hf_folder.HfFolder | None) -> dict[str, torch.dtype]:
    if reference is not None:
        return {name: tensor.dtype for name, tensor in reference.tensors.items()}
    imported = import_behind(dist_model.folder.path)
    shell = shell_of(imported.get("config") or {})
    return {
        (shell and shell.text_name(name)) or name: getattr(torch, layout.partition(" ")[0].removeprefix("torch."))
        for name, layout in imported.get("layouts", {}).items()
    }


def _reference(path: Path | None) -> tuple[hf_folder.HfFolder | None, tuple[str, ...]]:
    """Return the reference's tensors under their family's names, and the names of tensors outside its text model.

    A folder with only config and tokenizer is a valid reference too, except for a model around a text model, because
    an export copies the tensors outside the text model.
    """
    if path is None:
        return None, ()
    config = read_config(path)
    if any(path.glob("*.safetensors")) or (path / hf_folder.INDEX).is_file():
        return in_text_names(hf_folder.open_hf(path))
    if shell_of(config) is not None:
        raise CheckpointError(
            f"--reference {path} has model_type={config['model_type']!r} and no tensors: those that are not of the "
            "text model would be missing in the output. Give the folder with its safetensors, or export the text "
            "model alone, without --reference."
        )
    return None, ()


def _passing(reference: hf_folder.HfFolder | None, names: Sequence[str]) -> list[tensors.TargetTensor]:
    targets = [as_stored(reference, name) for name in names] if reference else []
    for target in targets:
        if target.dtype in FP8:
            raise CheckpointError(
                f"{target.name} is quantized and not of the text model: the output's config.json could not say so of "
                "it alone. Give an unquantized folder of the same model as --reference."
            )
    return targets


def _taken_notes(
    dist_model: DistModel, reference: hf_folder.HfFolder | None, others: Sequence[str], blocks: Blocks | None
) -> list[str]:
    """Note the tensors `others` that an export copies; CheckpointError unless they are the imported folder's."""
    if reference is None or not (copied := [*others, *(blocks.copied if blocks else ())]):
        return []
    imported, source = import_behind(dist_model.folder.path), HfSource(reference)
    recorded, layouts = imported.get("tensors", {}), imported.get("layouts", {})
    shell, theirs = shell_of(reference.config or {}), shell_of(imported.get("config") or {})
    faults = []
    if shell is not None and theirs is not None:
        names = [name for name in recorded if shell.text_name(name) is None and not name.endswith(FP8_SCALE)]
        faults += [f"{name} is missing" for name in names if name not in others]
        faults += [f"{name} was not there" for name in others if name not in names]
    # An import that had a tensor in fp8 says nothing of its values in another type.
    for name in (name for name in copied if name in recorded and name + FP8_SCALE not in recorded):
        layout = f"{reference.tensors[name].dtype} {reference.tensors[name].shape}"
        if layouts.get(name, layout) != layout or as_hex(source.checksum(name)) != recorded[name]:
            faults.append(f"{name} has other values, or another type or shape")
    if faults:
        raise CheckpointError(
            f"--reference {reference.path} has other tensors than the folder that the model was imported from:\n"
            f"{listed(faults)}\nName that folder, or another copy of it."
        )
    known = "as they were imported" if theirs else "compared with nothing, as no import of them is known"
    note = f"{len(others)} tensors that are not of the text model are copied from the reference, {known}"
    return [note] if others else []


def _source(dist_model: DistModel, reference: hf_folder.HfFolder | None, blocks: Blocks | None) -> tensors.TensorSource:
    source = dist_model.source()
    if blocks is not None:
        return blocks.source(source)
    return source if reference is None else WithReference(source, reference)


def _small_files(
    dist_model: DistModel, options: ExportOptions, targets: Sequence[tensors.TargetTensor]
) -> tuple[dict[str, bytes], list[str]]:
    files: dict[str, bytes] = {}
    special: dict[str, Any] = {}
    notes = []
    if options.text is not None:
        files, special = hf_text.text_files(options.text, dist_model.model, options.reference)
        template = f", chat template {options.text.chat_template}" if options.text.chat_template else ""
        notes.append(f"tokenizer: {options.text.tokenizer.path}{template}")
    elif options.reference is None or not hf_text.has_tokenizer(options.reference):
        notes.append("there is no tokenizer in the output: transformers makes no text of it")
    if dist_model.model.head == "score":
        special, padding_note = score_padding(special)
        notes += padding_note
    config, config_notes = _config(dist_model, options, targets, special)
    card = hf_text.model_card(dist_model.model, dist_model.folder.step, options.run, options.reference)
    return files | {"config.json": config, hf_folder.CARD: card}, [*config_notes, *notes]


def score_padding(special: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the special tokens for the config.json of a model with scores, and a note.

    Transformers reads a score at the last token that is not padding. If texts end in the padding token, this would be
    the token before it. Without a padding token, transformers uses the last token, but only for one text at a time.
    """
    pad = special.get("pad_token_id")
    if pad is not None and pad != special.get("eos_token_id"):
        return special, []
    note = (
        "config.json has no pad_token_id, as no tokenizer is known with a padding that is not also the end of a text: "
        "score one text at a time, or name such a tokenizer (--tokenizer)"
    )
    return special | {"pad_token_id": None}, [note]


def _config(
    dist_model: DistModel, options: ExportOptions, targets: Sequence[tensors.TargetTensor], special: dict[str, Any]
) -> tuple[bytes, list[str]]:
    """Return config.json, the reference's bytes if nothing changes, else with `special` ids, and notes about it."""
    dtype = usual_dtype(targets)
    if options.reference is None:
        config = checked_hf_config(dist_model.model) | special | {"dtype": dtype}
        return as_json(config), ["config.json is made from the checkpoint's settings"]
    raw, config = (options.reference / "config.json").read_bytes(), read_config(options.reference)
    changed = []
    if dist_model.model.head == "score":
        config |= score_config(dist_model.model) | {
            name: token for name, token in special.items() if name == "pad_token_id"
        }
        changed.append("the model is one for sequence classification, with one label")
    # For a model around a text model, both configs describe the weights.
    for part in (config, config[TEXT]) if shell_of(config) is not None else (config,):
        changed += [
            f"{name} is left out, as the weights are not quantized any more"
            for name in QUANTIZATION_KEYS
            if options.quantize == "none" and part.pop(name, None)
        ]
        for name in DTYPE_KEYS:
            # With null, readers use the type of the weights.
            if str(part.get(name) or dtype).removeprefix("torch.") != dtype:
                changed.append(f"{name} is {dtype}, as the weights are, instead of {part[name]}")
                part[name] = dtype
        for name in MTP_COUNTS:
            if part.get(name, dist_model.model.mtp_layers) != dist_model.model.mtp_layers:
                changed.append(f"{name} is {dist_model.model.mtp_layers} instead of {part[name]}")
                part[name] = dist_model.model.mtp_layers
    return (as_json(config) if changed else raw), [f"config.json is the reference's, but {line}" for line in changed]


def usual_dtype(targets: Sequence[tensors.TargetTensor]) -> str:
    """Return the name of the most frequent type of elements: in a bf16 model, expert biases and some norms are fp32."""
    elements: Counter[torch.dtype] = Counter()
    for target in targets:
        elements[target.dtype] += math.prod(target.shape) if target.dtype.is_floating_point else 0
    return str(elements.most_common(1)[0][0]).removeprefix("torch.")


def as_json(content: Mapping[str, Any]) -> bytes:
    """Return an object as the text of a file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def _padding_notes(dist_model: DistModel) -> list[str]:
    notes = []
    source = dist_model.source()
    for key, where in dist_model.weights.padding:
        if key == SCORE_SHIFT:
            continue
        rows = torch.empty(sizes(where), dtype=dist_model.dtype(key))
        source.fill(rows, key, where)
        if rows.any():
            notes.append(f"{key}: the {len(rows)} rows that pad the vocabulary are not zero; they are dropped")
    return notes


def shift_notes(dist_model: DistModel) -> list[str]:
    """Return a note on the number that is subtracted from scores, which Hugging Face's models do not have."""
    if dist_model.model.head != "score":
        return []
    shift = torch.zeros(1)
    dist_model.source().fill(shift, SCORE_SHIFT, (AxisRange(0, 1),))
    if not shift:
        return []
    return [f"scores are {float(shift):+.6g} higher than here, as transformers' models subtract nothing (score.shift)"]


def _merge_notes(dist_model: DistModel, options: ExportOptions) -> list[str]:
    if not options.merges:
        return []
    source = dist_model.source()
    if not dist_model.adapters or not isinstance(source, MergedSource):
        raise CheckpointError(f"{dist_model.folder.path} has no low-rank adapters. Leave out --merge.")
    return list(source.notes(None if options.dtype == "keep" else tensors.OUTPUT_DTYPES[options.dtype]))


def finish_folder(
    copied: Mapping[str, Path],
    files: Mapping[str, bytes],
    description: Mapping[str, Any],
    sources: Callable[[Sequence[RecordedTask]], Mapping[str, Any]],
    folder: Path,
    plan: str,
    done: Sequence[RecordedTask],
) -> None:
    """Add to a folder of shards their index, copied files, `files` (which replace those), and the manifest."""
    file_of = {chunk.target.name: task.file for task, _ in done for chunk in task.chunks}
    if len(set(file_of.values())) > 1:
        total = sum(chunk.num_bytes for task, _ in done for chunk in task.chunks)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / hf_folder.INDEX).write_bytes(as_json(index))
    hf_folder.copy_files(copied, folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    description = {**description, "files": file_checksums(folder, done)}
    write_manifest(folder, plan, description, sources(done), done)


STALE_FILES = (
    *("model*.safetensors", hf_folder.INDEX, GENERATION_CONFIG),
    *(*hf_text.TOKENIZER_FILES, *hf_folder.ADAPTER_FILES, *hf_folder.QUANTIZATION_FILES),
)
"""Files of an earlier export that readers would open in place of a new one's, or with it. A push deletes them unless it
has them itself; the history of the repository keeps them.
"""


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository of a model on the Hub, which need not exist yet."""

    name: str
    is_public: bool
    """Whether it may be public; else it is made private, and a public one is refused."""

    def check(self, *, needs_token: bool) -> None:
        """Raise a ConfigError if the library, a possible name, or (if needed) a valid token is missing."""
        hub = _library()
        try:
            hub.utils.validate_repo_id(self.name)
        except hub.errors.HFValidationError as error:
            raise ConfigError(
                f"--push-to-hub {self.name} is no name of a repository: {error} Give OWNER/NAME, or NAME for your own."
            ) from None
        if not needs_token:
            return
        if hub.get_token() is None:
            raise ConfigError(
                "--push-to-hub finds no token. Set HF_TOKEN, or log in with `hf auth login`; --dry-run needs none."
            )
        # An export may take hours, and is not to end in a refusal that is known before.
        api = hub.HfApi(library_name="mcore_rl")
        try:
            owner = api.whoami()["name"]
            name = self.name if "/" in self.name else f"{owner}/{self.name}"
            is_fit = self.is_public or api.model_info(name).private
        except hub.errors.RepositoryNotFoundError:
            return  # a push makes it
        except (OSError, hub.errors.HfHubHTTPError, hub.errors.HTTPError) as error:
            raise ConfigError(
                f"--push-to-hub {self.name}: the Hub refuses, or cannot be reached: {error} Correct the token or the "
                "network; or leave --push-to-hub out, and push later with `hf upload`."
            ) from None
        if not is_fit:
            raise ConfigError(f"--push-to-hub {name} is public. Add --public to push there, or give another NAME.")

    def preview(self, conversion: Conversion) -> Iterator[str]:
        """Yield lines about an export that is only planned: its files with their bytes, and the repository."""
        sizes: Counter[str] = Counter()
        for task in conversion.tasks:
            sizes[task.file] += task.num_bytes
        for file, num_bytes in sorted(sizes.items()):
            yield f"{file}  {readable_bytes(num_bytes)}"
        kind = "public" if self.is_public else "private"
        yield f"and config, tokenizer, index and model card in {conversion.final}"
        yield f"would be pushed to {self.name}, a {kind} repository of a model. Nothing was written or sent."

    def push(self, folder: Path) -> str:
        """Upload a folder in place of an earlier export; return the address. CheckpointError if refused."""
        hub = _library()
        api = hub.HfApi(library_name="mcore_rl")
        again = f"{folder} is complete; to push it later: hf upload {self.name} {shlex.quote(str(folder))}"
        try:
            url: Any = api.create_repo(self.name, private=not self.is_public, repo_type="model", exist_ok=True)
            if not self.is_public and not api.model_info(url.repo_id).private:
                raise CheckpointError(
                    f"{url} is public. To push there: --public. To another: --push-to-hub NAME. {again}"
                )
            # An adapter is read without the files of a model that may be there.
            is_adapter = (folder / hf_folder.ADAPTER_CONFIG).exists()
            api.upload_folder(
                repo_id=url.repo_id,
                folder_path=folder,
                commit_message="Export by mcore-rl",
                delete_patterns=None if is_adapter else list(STALE_FILES),
            )
        except (OSError, hub.errors.HfHubHTTPError, hub.errors.HTTPError) as error:
            raise CheckpointError(f"the Hub did not take it: {error}. {again}") from None
        return str(url)


def _library() -> Any:
    return optional_package("huggingface_hub", "--push-to-hub", "huggingface_hub")
