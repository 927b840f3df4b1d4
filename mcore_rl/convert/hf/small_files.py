"""The files of a Hugging Face folder other than weights: config, tokenizer, chat templates, generation settings."""

from collections.abc import Mapping
from pathlib import Path

from mcore_rl.convert.hf.folder import ADAPTER_FILES
from mcore_rl.data.chat_template import MORE_TEMPLATES
from mcore_rl.storage.checkpoint import FORMAT_FILE, MANIFEST, MARKER
from mcore_rl.storage.huggingface import refuse_cut_off

CARD = "README.md"
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of ModelOpt, GPTQ and AWQ by which engines read the weights as quantized."""
NOT_COPIED = (MANIFEST, MARKER, FORMAT_FILE, CARD, *ADAPTER_FILES, *QUANTIZATION_FILES)
"""Files that belong to the weights of their folder: a copy has its own, or has them merged."""
WEIGHT_FILES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".distcp",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
    ".index.json",
)
"""Endings of files that are not copied."""


def small_files(folder: Path) -> dict[str, Path]:
    """Return the files that an import or export of the model has too, by their names in the folder.

    A checkpoint has them where it was imported, and then config.json. CheckpointError for a file that was cut off.
    """
    found = {
        str(file.relative_to(folder)): file
        for file in (*sorted(folder.iterdir()), *sorted(folder.glob(f"{MORE_TEMPLATES}/*.jinja")))
        if file.is_file()
        and not file.name.startswith(".")
        and not (file.name.endswith(WEIGHT_FILES) or file.name in NOT_COPIED)
    }
    for file in found.values():
        refuse_cut_off(file)
    return found


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files into an output, by their names in it."""
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(file.read_bytes())
