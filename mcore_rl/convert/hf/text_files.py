"""The text files of an exported model: tokenizer, chat template, end tokens, model card."""

import importlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from mcore_rl import __version__
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.data.answer_ends import GENERATION_CONFIG, end_tokens
from mcore_rl.data.chat import load_chat
from mcore_rl.data.chat_template import MORE_TEMPLATES, TOOL_USE, has_template
from mcore_rl.data.tokenizer import TIKTOKEN_MODEL, Tokenizer, load_tokenizer
from mcore_rl.errors import CheckpointError
from mcore_rl.metrics.attempts_file import read_attempts
from mcore_rl.metrics.jsonl import FILE_NAME, read_records

TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "*.tiktoken", TIKTOKEN_MODEL, "tokenization_*.py", "tool_declaration_ts.py",
    TEMPLATE, "chat_template.json", f"{MORE_TEMPLATES}/*.jinja",
)  # fmt: skip
"""Names, with wildcards, of a tokenizer's files in its folder, its code included."""
RAW_TEMPLATE = (
    "{%- for message in messages -%}{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}{%- endfor -%}"
)
PLAIN_TEMPLATE = (
    "{%- for message in messages -%}{{- message['role'] + ':\\n' + message['content'] -}}"
    "{{- eos_token if message['role'] == 'assistant' else '\\n\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant:\\n' -}}{%- endif -%}"
)
OWN_TEMPLATES = {"plain": PLAIN_TEMPLATE, "raw": RAW_TEMPLATE}
"""The texts that `data.chat_template` "plain" and "raw" make (mcore_rl/data/chat.py), as jinja."""
CARD_METRICS = ("eval/", "test/", "train/loss_nats")
"""Beginnings of the names of metrics that the model card lists."""
SPACE = "\u2581"
"""Sentencepiece's sign for a space."""
PROBES = (
    "", " ", "  two  spaces  ", "The quick brown fox, 1234567890 times.", "def f(x):\n    return x ** 2\n\n\n# end\n",
    "tab\tand\r\nline", "Größe, naïveté, Ελληνικά, русский, עברית", "漢字かな交じり文 한국어",
    "🙂👩‍👩‍👧 e\u0301 \u00a0\u3000", "aaaaaaaaaaaaaaaa  ((((((((((", "\u2581 is the sign itself",
)  # fmt: skip
"""Texts that a translated tokenizer must cut as the original does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelText:
    """The tokenizer that a model was trained with, and its run."""

    tokenizer: TokenizerConfig
    chat_template: str | None = None
    """`data.chat_template` of the run; None if the model is not a chat model, or uses the tokenizer's own template."""


def has_tokenizer(folder: Path) -> bool:
    """Return whether transformers finds a tokenizer in a folder."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken", TIKTOKEN_MODEL)
    return any(True for name in names for _ in folder.glob(name))


def is_of_tokenizer(name: str) -> bool:
    """Return whether a file, by its name in its folder, is one of a tokenizer's."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def text_files(text: ModelText, model: ModelConfig, reference: Path | None) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files of tokenizer, chat template and generation, by name, and the special tokens for config.json.
    Raises DataError if a file cannot be read, CheckpointError if the tokenizer does not fit the model or Hugging Face's
    format.
    """
    tokenizer, path = load_tokenizer(text.tokenizer), Path(text.tokenizer.path or "")
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer {path} has {tokenizer.vocab_size} tokens, the model {model.vocab_size}. Name the tokenizer "
            "that it was trained with: --tokenizer."
        )
    if text.tokenizer.kind == "huggingface":
        found = sorted({file for name in TOKENIZER_FILES for file in path.glob(name) if file.is_file()})
        files = {str(file.relative_to(path)): file.read_bytes() for file in found}
    else:
        files = sentencepiece_files(path, tokenizer, model.max_position)
    if text.chat_template in OWN_TEMPLATES:
        files[TEMPLATE] = OWN_TEMPLATES[text.chat_template].encode()
    elif text.chat_template not in (None, "tokenizer"):
        files[TEMPLATE] = Path(str(text.chat_template)).read_bytes()
    if text.chat_template not in (None, "tokenizer"):
        # The run's template was that of conversations with tools, too.
        files.pop(f"{MORE_TEMPLATES}/{TOOL_USE}.jinja", None)
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    generation = _generation_config(text, tokenizer, reference, path)
    content = {name: token for name, token in special.items() if token is not None} | generation
    files[GENERATION_CONFIG] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return files, special


def sentencepiece_files(path: Path, tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Return a sentencepiece model in both formats; CheckpointError if Hugging Face's cuts texts differently."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [
        processor.id_to_piece(index).replace(SPACE, " ")
        for index in range(processor.vocab_size())
        if not (processor.is_control(index) or processor.is_unknown(index) or processor.is_byte(index))
    ]
    probes = (*PROBES, *pieces, " ".join(pieces[::7]))
    for translated in _translations(processor):
        if all(translated.encode(text, add_special_tokens=False).ids == tokenizer.encode(text) for text in probes):
            break
    else:
        raise CheckpointError(
            f"the sentencepiece model {path} normalizes or cuts texts in a way that Hugging Face's tokenizers do not. "
            "Name a folder with the same tokenizer in their format, or leave it out: --tokenizer FOLDER, or none."
        )
    names = {
        "unk_token": processor.unk_id(),
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
    }
    # The import takes a second, for which exports of other tokenizers need not wait.
    transformers = importlib.import_module("transformers")
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=translated,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        **{name: processor.id_to_piece(index) for name, index in names.items() if index >= 0},
    )
    with tempfile.TemporaryDirectory() as folder:
        wrapped.save_pretrained(folder)
        files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
    return files | {"tokenizer.model": path.read_bytes()}


def model_card(model: ModelConfig, step: int, run: Path | None, reference: Path | None) -> bytes:
    """Return README.md: the model, the run and the commit that made it, and its last metrics up to `step`."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    lines += ["---", "", f"# {run.resolve().name if run else model.family}", ""]
    lines += [f"A {model.family} model, exported by mcore_rl {__version__} from step {step} of its training.", ""]
    lines += [f"It was exported beside the files of `{reference.resolve().name}`.", ""] if reference else []
    attempts = [attempt for attempt in read_attempts(run) if attempt.step <= step] if run else []
    if attempts:
        last = attempts[-1]
        rows = {
            "run": run.resolve().name if run else "",
            "started": last.started,
            "command": " ".join(last.command),
            "commit": last.commit or "not known",
            "mesh": ", ".join(f"{axis} {size}" for axis, size in last.mesh.items()),
            "versions": ", ".join(f"{name} {version}" for name, version in last.versions.items()),
        }
        lines += ["## Training", "", "| | |", "|---|---|"]
        cells = {name: value.replace("|", "\\|").replace("\n", " ") for name, value in rows.items()}
        lines += [f"| {name} | {cell} |" for name, cell in cells.items()] + [""]
    metrics: dict[str, tuple[float, int]] = {}
    for record in read_records(run / FILE_NAME) if run and (run / FILE_NAME).is_file() else ():
        at = int(str(record["step"]))
        for name, value in record.items():
            if name.startswith(CARD_METRICS) and isinstance(value, int | float) and at <= step:
                metrics[name] = float(value), at
    if metrics:
        lines += ["## Metrics", "", "| metric | value | step |", "|---|--:|--:|"]
        lines += [f"| {name} | {value:.6g} | {at} |" for name, (value, at) in sorted(metrics.items())] + [""]
    return "\n".join(lines).encode()


def _generation_config(text: ModelText, tokenizer: Tokenizer, reference: Path | None, path: Path) -> dict[str, Any]:
    template = text.chat_template
    if template is None and text.tokenizer.kind == "huggingface" and has_template(path):
        template = "tokenizer"  # it is in the output, even if the model was not trained on it
    chat = load_chat(template, tokenizer, text.tokenizer.path) if template else None
    ends = list(end_tokens(tokenizer, chat, text.tokenizer.path))
    files = [folder / GENERATION_CONFIG for folder in (reference, path) if folder is not None]
    known: dict[str, Any] = next((json.loads(file.read_bytes()) for file in files if file.is_file()), {})
    named = known.get("eos_token_id")
    named = named if isinstance(named, list) else [] if named is None else [named]
    every = list(dict.fromkeys((*named, *ends)))
    return known | {"eos_token_id": every[0] if len(every) == 1 else every}


def _translations(processor: sentencepiece.SentencePieceProcessor) -> Iterator[tokenizers.Tokenizer]:
    """Yield the tokenizers that a sentencepiece model may be: its pieces do not show whether it is BPE or unigram."""
    ids = range(processor.vocab_size())
    pieces = {processor.id_to_piece(index): index for index in ids}
    unknown = processor.unk_id()
    words = {
        piece: processor.get_score(index)
        for piece, index in pieces.items()
        if not (processor.is_control(index) or processor.is_unknown(index) or processor.is_byte(index))
    }
    has_bytes = any(processor.is_byte(index) for index in ids)
    merges = sorted(
        (
            (-score, pieces[piece[:cut]], pieces[piece[cut:]], piece[:cut], piece[cut:])
            for piece, score in words.items()
            for cut in range(1, len(piece))
            if piece[:cut] in words and piece[cut:] in words
        )
    )
    # Sentencepiece puts a space before a text when it was trained so.
    has_prefix = processor.encode("a", out_type=str)[:1] not in ([], ["a"])
    spaces = tokenizers.normalizers.Replace(" ", SPACE)
    decoders = [tokenizers.decoders.Replace(SPACE, " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    for model in (
        tokenizers.models.BPE(
            pieces,
            [merge[3:] for merge in merges],
            unk_token=processor.id_to_piece(unknown),
            fuse_unk=True,
            byte_fallback=has_bytes,
        ),
        tokenizers.models.Unigram(
            [(piece, processor.get_score(index)) for piece, index in pieces.items()], unknown, has_bytes
        ),
    ):
        translated = tokenizers.Tokenizer(model)
        before = [tokenizers.normalizers.Prepend(SPACE)] if has_prefix else []
        translated.normalizer = tokenizers.normalizers.Sequence([*before, spaces])
        after = [tokenizers.decoders.Strip(" ", 1, 0)] if has_prefix else []
        translated.decoder = tokenizers.decoders.Sequence([*decoders, *after])
        translated.add_special_tokens(
            [
                tokenizers.AddedToken(piece, normalized=False, special=True)
                for piece, index in pieces.items()
                if processor.is_control(index) or processor.is_unknown(index)
            ]
        )
        yield translated
