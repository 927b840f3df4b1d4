"""The arguments of `mcore-rl convert` and `mcore-rl inspect`, without torch."""

import argparse
import re
from pathlib import Path

ACTIONS = {
    "plan": "what import (of a Hugging Face folder) or export (of a checkpoint) would do, and what would be refused",
    "import": "HF_DIR CKPT_DIR: safetensors to CKPT_DIR/iter_0000000, which loads on every mesh",
    "export": "CKPT HF_DIR: a checkpoint, of any mesh, with optimizer state or not, to a folder for transformers",
    "verify": "A B: whether two checkpoints of any formats are the same, bit for bit; status 1 when not",
    "relayout": "CKPT OUT: the same checkpoint under other keys (--keys, --layers)",
}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """An action, its folders, and how to go about it."""
    actions = "; ".join(f"{name} {meaning}" for name, meaning in ACTIONS.items())
    parser.add_argument("action", choices=ACTIONS, help=actions)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="from, to; one for plan")
    _what_is_written(parser.add_argument_group("what is written"))
    _how(parser.add_argument_group("how"))


def _what_is_written(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--dtype",
        choices=("keep", "bf16", "fp32"),
        default="keep",
        help="expert biases stay fp32 (default: keep; fp8 becomes the model's type)",
    )
    what.add_argument("--mtp", choices=("keep", "drop"), default="keep", help="multi-token-prediction layers")
    what.add_argument(
        "--keys",
        choices=("te", "local"),
        default="te",
        help="import, relayout: names of TransformerEngine's layers (default: our training's) or of Megatron's own",
    )
    what.add_argument(
        "--layers",
        choices=("stacked", "each"),
        help="import, relayout: a tensor for all layers, or one each (default: as our training has them)",
    )
    what.add_argument(
        "--vocab-multiple",
        type=_positive,
        default=0,
        metavar="N",
        help="import: pad the vocabulary to a multiple of N (default: model.vocab_multiple's)",
    )
    what.add_argument(
        "--reference",
        type=Path,
        metavar="HF_DIR",
        help="a folder of the same model: export copies config and tokenizer; says what one of Megatron-LM is",
    )


def _how(how: argparse._ArgumentGroup) -> None:
    how.add_argument("--workers", type=_positive, default=2, metavar="N", help="processes (default 2)")
    how.add_argument(
        "--max-ram",
        type=num_bytes,
        default=0,
        metavar="8G",
        help="memory of all processes together; fewer workers are used if need be",
    )
    how.add_argument(
        "--overwrite", action="store_true", help="replace an output that exists, when the new one is complete"
    )
    how.add_argument("--log", type=Path, metavar="FILE", help="append progress as lines of JSON")
    how.add_argument(
        "--mesh",
        type=mesh_sizes,
        default={},
        metavar="tp=2,ep=8",
        help="plan: bytes of weights by rank on this mesh",
    )
    how.add_argument(
        "--logits",
        action="store_true",
        help="verify: also run both models, a layer at a time, on random tokens",
    )


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """A checkpoint."""
    parser.add_argument(
        "path", type=Path, help="a Hugging Face folder, a safetensors file, a checkpoint or a run"
    )
    parser.add_argument(
        "--diff",
        type=Path,
        metavar="OTHER",
        help="list the tensors that differ from another checkpoint's; status 1 when some do",
    )


def num_bytes(text: str) -> int:
    """The number that `8G`, `500M` or `1.5T` means."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write 8G, or 500M.")
    return int(float(match[1]) * UNITS[match[2].upper()])


def mesh_sizes(text: str) -> dict[str, int]:
    """The sizes that `tp=2,ep=8` means."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if (
            name not in ("tp", "pp", "vpp", "ep", "etp", "cp", "first_stage_layers", "last_stage_layers")
            or not size.isdecimal()
        ):
            raise argparse.ArgumentTypeError(f"{part!r} is no part of a mesh. Write tp=2,pp=2,ep=8.")
        sizes[name] = int(size)
    return sizes


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number
