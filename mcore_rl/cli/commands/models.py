"""The commands on models: generate, evaluate, convert, check and serve them."""

import argparse
import re
from pathlib import Path

from mcore_rl.cli.commands import CONFIG_HELP, Command, add_overrides, add_ranks
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.launch.arguments import positive

BYTES_PER_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
EVAL_RECIPE = "any_model/eval"


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help="the model, as --model")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="the prompt, as --prompt")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="the model: a Hugging Face folder (imported once, into a cache), an import, a checkpoint, the run_dir of "
        "a training, or a model of the hub that is in its local cache",
    )
    parser.add_argument("--run", type=Path, help="the run_dir of a training; its newest checkpoint is used")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="this checkpoint instead; without --run, its model and tokenizer are those of the run above it",
    )
    parser.add_argument(
        "--prompt",
        default="",
        help="text to continue, in which names of special tokens are these tokens; empty: the start of a document",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the prompt: it is the user's turn in the chat template that the model was trained with; without "
        "--prompt, in a terminal, chat turn by turn",
    )
    parser.add_argument("--system", metavar="TEXT", help="--chat: the system's turn before the user's")
    parser.add_argument("--answer", metavar="TEXT", help="--chat: beginning of the answer, which goes on from there")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens at most (default 64)")
    parser.add_argument("--n", type=positive, default=1, help="number of continuations (default 1)")
    parser.add_argument("--stream", action="store_true", help="show the text as it grows")
    parser.add_argument(
        "--url",
        help="ask this inference server, as http://node7:8000, which has weights of its own (mcore-rl probe); --run "
        "names the model and its tokenizer",
    )
    parser.add_argument("--kind", choices=["vllm", "sglang"], default="vllm", help="--url: its software (default vllm)")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="--url: environment variable with the key that it asks for"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="--url: certificates by which an https server is known")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely token (default)")
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample among this many most likely tokens; 0: all (default)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample among the most likely tokens that have this probability together; 1: all (default)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="sample among tokens with this fraction of the largest probability; 0: all (default)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first continuation; each next one adds 1 (default 0)"
    )


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="the run_dir of a training; its newest checkpoint is used"
    )
    parser.add_argument("--url", required=True, help="the server's address, as http://node7:8000")
    parser.add_argument("--kind", choices=["vllm", "sglang"], default="vllm", help="its software (default vllm)")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="this checkpoint of the run instead")
    parser.add_argument(
        "--older",
        metavar="DIR",
        type=Path,
        help="another checkpoint of the same model, whose weights the server may have in part; default: the one before",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        help="type of the server's weights, as rl.engine.dtype; auto: the run's (default)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="limit of the difference in nats; default: 2e-4 for the largest in fp32, else 0.1 for the mean",
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the key that the server asks for"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="certificates by which an https server is known")


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    add_overrides(parser)
    parser.add_argument("--count", type=positive, default=1, help="servers on this machine (default 1)")
    parser.add_argument(
        "--port", type=positive, default=8000, help="port of the first server; each next one adds 1 (default 8000)"
    )


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help=f"{CONFIG_HELP}; or the run_dir of an RL training, or a reward model's, whose newest checkpoint is "
        "evaluated as its own config says",
    )
    add_overrides(parser)
    add_ranks(parser)
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help=f"without CONFIG: the recipe {EVAL_RECIPE} with model.path=FOLDER, a Hugging Face folder, an import, a "
        "checkpoint or a run",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        action="append",
        help="--model: questions with answers, of a shape that is recognised by its keys; rl.eval.files",
    )
    parser.add_argument(
        "--reward", metavar="PART", action="append", help="--model: rl.reward.parts, as numeric or math"
    )


def eval_config(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the config and the overrides for the arguments of `mcore-rl eval`. Raises ConfigError if they conflict."""
    config, words = args.config, list(args.overrides)
    if args.model is None:
        if config is None or args.data or args.reward:
            raise ConfigError("Give CONFIG, the folder of a run, or --model FOLDER with --data FILE and --reward PART.")
        if (Path(config) / "config.toml").is_file():
            return f"{config}/config.toml", [f"run_dir={config}", *words]
        return config, words
    if config is not None and "=" not in config:
        raise ConfigError(f"--model is given in the place of CONFIG. Leave {config} out, or set model.path in it.")
    if not args.data:
        raise ConfigError("--model needs questions. Give --data FILE, JSON lines with question and answer.")
    if config is not None:
        words.insert(0, config)  # an override that the parser took for the config
    files = toml_value(args.data)
    given = [f"model.path={args.model}", f"rl.eval.files={files}", f"rl.prompts.files={files}"]
    if args.reward:
        given.append(f"rl.reward.parts={toml_value(args.reward)}")
    return EVAL_RECIPE, [*given, *words]


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
        "--merge", action="store_true", help="export: add low-rank adapters to the weights; says what rounding loses"
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
        "--logits", action="store_true", help="verify: also run both models, a layer at a time, on random tokens"
    )


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a Hugging Face folder, a safetensors file, a checkpoint or a run")
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
    parser.add_argument("--workers", type=positive, default=4, metavar="N", help="files read at a time (default 4)")


def num_bytes(text: str) -> int:
    """Parse a number of bytes such as `8G`, `500M` or `1.5T`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write 8G, or 500M.")
    return int(float(match[1]) * BYTES_PER_UNIT[match[2].upper()])


MODELS: dict[str, Command] = {
    "generate": Command(
        brief="continue a text, or chat, with a model",
        summary="Continue a text, or answer in a chat, with a checkpoint of a run of any mesh, on one process.",
        example='mcore-rl generate runs/quickstart/pretrain "def read_" --tokens 40 --temperature 0.7',
        arguments=_generate_arguments,
        module="mcore_rl.cli.generate",
    ),
    "eval": Command(
        brief="accuracy of a run, a model, or a reward model",
        summary="Answer the held-out prompts of an RL config (rl.eval) and print accuracy, mean reward and pass@k; "
        "with a reward model's config score the pairs of data.valid and print accuracy and calibration.",
        example="mcore-rl eval tiny_moe/grpo checkpoint.load=runs/tiny_moe_grpo "
        "rl.eval.samples=4 rl.eval.temperature=0.7",
        arguments=_eval_arguments,
        module="mcore_rl.cli.evaluate",
        program="rl",
        given=eval_config,
        other_programs=("rm",),
        config="rl",
    ),
    "convert": Command(
        brief="Hugging Face's format to Megatron's and back",
        summary="Convert checkpoints between Hugging Face's and Megatron's formats, and prove that nothing was lost.",
        example="mcore-rl convert import models/Qwen3-30B-A3B checkpoints/qwen3 --workers 8 --max-ram 16G",
        arguments=convert_arguments,
        module="mcore_rl.cli.convert",
    ),
    "inspect": Command(
        brief="list or compare what is in checkpoints",
        summary="List what is in a checkpoint of either format, or how it differs from another.",
        example="mcore-rl inspect runs/quickstart/pretrain --diff checkpoints/qwen3",
        arguments=_inspect_arguments,
        module="mcore_rl.cli.convert",
        main="inspect_checkpoint",
    ),
    "check": Command(
        brief="compare files with their recorded checksums",
        summary="Read a checkpoint, an export or a .bin/.idx pair and compare every file with the checksum that was "
        "recorded when it was written; no second copy is needed. Status 1 when a file is damaged.",
        example="mcore-rl check runs/quickstart/pretrain",
        arguments=check_arguments,
        module="mcore_rl.cli.convert",
        main="check_files",
    ),
    "serve": Command(
        brief="start the inference servers of an RL config",
        summary="Start the inference servers of an RL config on this machine, for rl.engine.urls of a training "
        "elsewhere, and start them anew when they end. Their weights come from the training.",
        example="mcore-rl serve qwen3_30b_a3b/gspo rl.engine.kind=vllm --count 4 --port 8000",
        arguments=_serve_arguments,
        module="mcore_rl.cli.servers",
        main="serve",
        config="rl",
    ),
    "probe": Command(
        brief="compare a server's weights with a checkpoint",
        summary="Compare an inference server's weights with those of a run's checkpoint, by logprobs, for each group "
        "of weights. Status 1 when the server has others.",
        example="mcore-rl probe runs/a --url http://node7:8000",
        arguments=_probe_arguments,
        module="mcore_rl.cli.servers",
        main="probe",
    ),
}
