"""Arguments of the commands that convert, list and check checkpoints."""

import argparse
import re
from pathlib import Path

from mcore_rl.launch.arguments import positive

BYTES_PER_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare an action, its folders, and its options."""
    meanings = {
        "plan": "what import (of a Hugging Face folder) or export (of a checkpoint) would do and would refuse",
        "import": "HF_DIR CKPT_DIR: safetensors to CKPT_DIR/iter_0000000, which loads on every mesh",
        "export": "CKPT HF_DIR: a checkpoint of any mesh, with optimizer state or not, to a folder for transformers",
        "verify": "A B: whether two checkpoints of any formats are the same, bit for bit; status 1 when not",
        "relayout": "CKPT OUT: the same checkpoint under other keys (--keys, --layers)",
        "upcycle": "DENSE_HF_DIR HF_DIR: a mixture of experts that begins with the dense model's function",
    }
    actions = "; ".join(f"{name} {meaning}" for name, meaning in meanings.items())
    parser.add_argument("action", choices=meanings, help=actions)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="from, to; one for plan")
    what = parser.add_argument_group("what is written")
    what.add_argument(
        "--dtype",
        choices=("keep", "bf16", "fp32"),
        default="keep",
        help="expert biases stay fp32 (default: keep; fp8 becomes the model's type)",
    )
    what.add_argument("--mtp", choices=("keep", "drop"), default="keep", help="multi-token-prediction layers")
    what.add_argument(
        "--quantize",
        choices=("none", "int4", "fp8"),
        default="none",
        help="export: int4 or fp8 blocks where the reference has them (default: none)",
    )
    what.add_argument(
        "--keys",
        choices=("te", "local"),
        default="te",
        help="import, relayout: names of TransformerEngine's layers (default) or of Megatron's local layers",
    )
    what.add_argument(
        "--layers",
        choices=("stacked", "each", "hybrid"),
        help="import, relayout: a tensor for all layers, one each, or the layers of Megatron's HybridModel (default: "
        "as training reads them)",
    )
    what.add_argument(
        "--vocab-multiple",
        type=positive,
        metavar="N",
        help="import: pad the vocabulary to a multiple of N (default: model.vocab_multiple's)",
    )
    what.add_argument(
        "--family",
        metavar="MODULE:NAME",
        help="import, verify: a model family of your own instead of the one that config.json names",
    )
    what.add_argument(
        "--reference",
        type=Path,
        metavar="HF_DIR",
        help="a folder of the same model, to name its family and, in an export, to copy config and tokenizer from",
    )
    what.add_argument(
        "--check-logits",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="import, upcycle: compare the output's logits with the source's before it has its name (default: up to "
        "2 GiB)",
    )
    what.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="export: a tokenizer's folder or .model file, or none (default: that of the run, else of --reference)",
    )
    what.add_argument(
        "--merge",
        action="store_true",
        help="export: add low-rank adapters to the weights; says what rounding loses",
    )
    what.add_argument(
        "--adapter",
        choices=("each", "fused"),
        help="export: low-rank adapters alone, for the library peft: a module for each expert, or its fused experts",
    )
    hub = parser.add_argument_group("export: to the Hugging Face Hub")
    hub.add_argument(
        "--push-to-hub",
        metavar="NAME",
        help="upload the output to this repository, made private if it is new; the token is that of HF_TOKEN or of "
        "`hf auth login`",
    )
    hub.add_argument("--public", action="store_true", help="the repository may be public")
    hub.add_argument("--dry-run", action="store_true", help="show files and sizes; write and send nothing")
    mixture = parser.add_argument_group("upcycle: the mixture")
    mixture.add_argument("--experts", type=positive, metavar="N", help="experts of a layer")
    mixture.add_argument("--top-k", type=positive, metavar="K", help="experts that a token is sent to")
    mixture.add_argument(
        "--granularity",
        type=positive,
        default=1,
        metavar="G",
        help="an expert is one of G slices of the dense MLP (default 1: all of it)",
    )
    mixture.add_argument(
        "--shared", type=int, metavar="N", help="shared experts; the family's number, which is the default"
    )
    mixture.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="X",
        help="noise on the experts' weights, in root mean squares of a row (default 0: the same function)",
    )
    mixture.add_argument(
        "--router-std",
        type=float,
        metavar="X",
        help="standard deviation of the routers' weights (default: initializer_range of config.json)",
    )
    mixture.add_argument("--seed", type=int, default=0, help="of routers and noise (default 0)")
    how = parser.add_argument_group("how")
    how.add_argument("--workers", type=positive, default=2, metavar="N", help="processes (default 2)")
    how.add_argument(
        "--max-ram",
        type=num_bytes,
        metavar="8G",
        help="memory of all processes together; fewer workers are used if need be",
    )
    how.add_argument(
        "--overwrite", action="store_true", help="replace an output that exists, when the new one is complete"
    )
    how.add_argument("--log", type=Path, metavar="FILE", help="append progress as lines of JSON")
    how.add_argument(
        "--logits",
        action="store_true",
        help="verify: also run both models, a layer at a time, on random tokens",
    )


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a checkpoint, and another to compare it with."""
    parser.add_argument(
        "path", type=Path, help="a Hugging Face folder, a safetensors file, a checkpoint or a run"
    )
    parser.add_argument(
        "--diff",
        type=Path,
        metavar="OTHER",
        help="list the tensors that differ from another checkpoint's; status 1 when some do",
    )


def check_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the paths to check."""
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="a checkpoint, or a run (its newest checkpoint), a Hugging Face folder that was exported, or the prefix "
        "of a .bin/.idx pair",
    )
    parser.add_argument(
        "--workers", type=positive, default=4, metavar="N", help="files read at a time (default 4)"
    )


def num_bytes(text: str) -> int:
    """Parse a number of bytes such as `8G`, `500M` or `1.5T`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write 8G, or 500M.")
    return int(float(match[1]) * BYTES_PER_UNIT[match[2].upper()])
