"""The commands of `mcore-rl` and their arguments. No config is imported, nor torch, so that help is quick."""

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.recipes import cluster_file
from mcore_rl.config.trainings import TRAININGS
from mcore_rl.launch.arguments import attach_arguments, jobs_arguments, launch_arguments

BYTES_PER_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
CONFIG_HELP = "the config: a .toml file, or the name of a recipe (`mcore-rl recipes`)"
MESH_FIELDS = ("tp", "pp", "vpp", "ep", "etp", "cp", "first_stage_layers", "last_stage_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of `mcore-rl`; it is imported when it is run, and not before."""

    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    module: str
    """Module whose `main(args)` runs the command; with `program`, whose `main(argv)` is one rank of it."""
    program: str | None = None
    """Name in PROGRAMS of the training whose ranks the command starts; None: it runs in this process."""
    other_programs: tuple[str, ...] = ()
    """Names of further trainings whose configs the command takes; the config's fields decide."""
    config: str = ""
    """Name in KINDS (config/kinds.py) of the config whose fields the help explains; "": it has none."""


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a config file, fields that override it, and the number of local ranks."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    _overrides(parser)
    _ranks(parser)


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of a training and which training's config it is."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    _overrides(parser)
    _ranks(parser)
    _program(parser)


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing beside --help."""


def study_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a study and fields that override it."""
    parser.add_argument("config", metavar="STUDY", help="the study, a file or the name of a recipe")
    _overrides(parser)


def problems_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare an RL config, a count, and an output file."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="an RL config, a file or the name of a recipe, whose rl.prompts.task is used",
    )
    _overrides(parser)
    parser.add_argument("--count", type=positive, default=10000, help="number of problems (default 10000)")
    parser.add_argument(
        "--preferences",
        action="store_true",
        help="write pairs for a reward model: the right answer and a wrong one",
    )
    parser.add_argument(
        "--faults",
        choices=("character", "any"),
        default="character",
        help="what is wrong in a pair's wrong answer: a character; or, each as often, a character replaced, left out, "
        "added, or swapped with the next one, or all of it (default character)",
    )
    parser.add_argument("--output", type=Path, required=True, help="the file to write, JSON lines")
    parser.add_argument(
        "--valid",
        type=int,
        default=0,
        metavar="COUNT",
        help="also write so many problems that are not in OUTPUT to the file beside it (pairs_valid.jsonl for "
        "pairs.jsonl), to validate on (default 0)",
    )


def reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare an RL config, a number of prompts, and a completion to score."""
    parser.add_argument("config", metavar="CONFIG", help="an RL config, a file or the name of a recipe")
    _overrides(parser)
    parser.add_argument("--sample", type=positive, default=4, help="number of prompts (default 4)")
    parser.add_argument(
        "--completion",
        metavar="TEXT",
        help="the completion to score, in which {answer} stands for a reference answer: the prompt's own, then the "
        "next prompt's (default: {answer} alone)",
    )


def tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a corpus and the tokenizer to train on it."""
    parser.set_defaults(data_command="tokenizer")
    _corpus(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.model", help="the file to write")
    parser.add_argument(
        "--vocab-size", required=True, type=int, help="pieces, the 260 of bytes and special tokens included"
    )
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default bpe")
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        help="fraction of characters that get a piece (default 0.9995)",
    )
    parser.add_argument(
        "--max-mb", type=int, default=512, help="train on at most this much of the corpus (default 512)"
    )
    parser.add_argument(
        "--threads", type=int, default=4, help="default 4; the digest of the file depends on it"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")


def preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a corpus and the dataset to make of it."""
    parser.set_defaults(data_command="preprocess")
    _corpus(parser)
    parser.add_argument(
        "--output", required=True, type=Path, metavar="PREFIX", help="where to write, without an ending"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        type=Path,
        help="a sentencepiece .model, or a folder with tokenizer.json",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    cuts = parser.add_mutually_exclusive_group()
    cuts.add_argument(
        "--split-blank-lines", action="store_true", help="plain text: blank lines separate documents"
    )
    cuts.add_argument(
        "--document-separator",
        metavar="LINE",
        help="plain text: lines equal to this separate documents (default: one document a file)",
    )
    parser.add_argument(
        "--max-bad", type=int, metavar="N", help="fail on more than N bad lines (default: report and go on)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing dataset or another unfinished run"
    )


def show_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a training's config and the number of examples to show."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    _overrides(parser)
    parser.add_argument("--num", type=positive, default=3, help="number of examples (default 3)")
    _program(parser)


def probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a run, a server, and what the server's weights are compared with."""
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="the run_dir of a training; its newest checkpoint is used"
    )
    parser.add_argument("--url", required=True, help="the server's address, as http://node7:8000")
    parser.add_argument(
        "--kind", choices=["vllm", "sglang"], default="vllm", help="its software (default vllm)"
    )
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


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a run or a checkpoint, a prompt, and how to sample tokens."""
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
        help="answer the prompt: it is the user's turn in the chat template that the model was trained with",
    )
    parser.add_argument("--system", metavar="TEXT", help="--chat: the system's turn before the user's")
    parser.add_argument("--tokens", type=positive, default=64, help="new tokens at most (default 64)")
    parser.add_argument("--n", type=positive, default=1, help="number of continuations (default 1)")
    parser.add_argument("--stream", action="store_true", help="show the text as it grows")
    parser.add_argument(
        "--url",
        help="ask this inference server, as http://node7:8000, which has weights of its own (mcore-rl probe); --run "
        "names the model and its tokenizer",
    )
    parser.add_argument(
        "--kind", choices=["vllm", "sglang"], default="vllm", help="--url: its software (default vllm)"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="--url: environment variable with the key that it asks for"
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", help="--url: certificates by which an https server is known"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: always the most likely token (default)"
    )
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


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a config, the number of servers on this machine, and their ports."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    _overrides(parser)
    parser.add_argument("--count", type=positive, default=1, help="servers on this machine (default 1)")
    parser.add_argument(
        "--port",
        type=positive,
        default=8000,
        help="port of the first server; each next one adds 1 (default 8000)",
    )


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare an action, its folders, and how to go about it."""
    meanings = {
        "plan": "what import (of a Hugging Face folder) or export (of a checkpoint) would do and would refuse",
        "import": "HF_DIR CKPT_DIR: safetensors to CKPT_DIR/iter_0000000, which loads on every mesh",
        "export": "CKPT HF_DIR: a checkpoint of any mesh, with optimizer state or not, to a folder for transformers",
        "verify": "A B: whether two checkpoints of any formats are the same, bit for bit; status 1 when not",
        "relayout": "CKPT OUT: the same checkpoint under other keys (--keys, --layers)",
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
        "--keys",
        choices=("te", "local"),
        default="te",
        help="import, relayout: names of TransformerEngine's layers (default) or of Megatron's local layers",
    )
    what.add_argument(
        "--layers",
        choices=("stacked", "each"),
        help="import, relayout: a tensor for all layers, or one each (default: as training reads them)",
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
        help="import: compare the output's logits with transformers' before it has its name (default: up to 2 GiB)",
    )
    what.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="export: a tokenizer's folder or .model file, or none (default: that of the run, else of --reference)",
    )
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
    """Declare what is to be checked."""
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


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a config, a cluster, a number of nodes, and what to print about them."""
    parser.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help=CONFIG_HELP)
    _overrides(parser)
    parser.add_argument(
        "--cluster",
        type=cluster_file,
        required=True,
        metavar="CLUSTER",
        help="where it would run: a .toml file, or an example of launch/clusters by its name (example_h100)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=positive, metavar="N", help="number of nodes")
    size.add_argument(
        "--world",
        type=world_sizes,
        metavar="A..B",
        help="a line for each doubling of the number of GPUs from A to B",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--search",
        action="store_true",
        help="try every mesh, micro-batch and kind of recomputation, and list those that fit and are fast",
    )
    what.add_argument("--rank", type=rank, metavar="R", help="what this one rank is, and has")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="also build Megatron's modules of the first, middle and last stage (of one rank with --rank) without "
        "GPUs and without their memory, record Megatron's own schedule, and show where the closed forms differ; takes "
        "seconds, and torch",
    )
    parser.add_argument(
        "--completion-tokens",
        type=positive,
        metavar="N",
        help="mean length of a completion, for the time of rollouts; default: half of the longest",
    )
    parser.add_argument(
        "--server-nodes",
        type=positive,
        default=0,
        metavar="N",
        help="nodes of inference servers beside the trainer's",
    )
    parser.add_argument(
        "--imbalance",
        type=multiple,
        metavar="X",
        help="tokens of the fullest rank's experts, as a multiple of the mean (1.3), for time and memory; default: "
        "that of a calibrated cluster, else even, with the cost of several",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN",
        help="without CONFIG: fit the rates of the cluster to this finished run on it, and print them for its file",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --calibrate: also write the cluster's file with the rates",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan as JSON")
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE.svg",
        help="also draw the pipeline's schedule: who computes when",
    )
    _program(parser)


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the form of the output."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with every patch and its reason"
    )
    parser.add_argument(
        "--nodes",
        type=Path,
        metavar="DIR",
        help="be one node of a job (`mcore-rl launch --check`): write the findings to DIR, where the first node names "
        "what differs between them",
    )


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare runs, and the page to write."""
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the run_dir of a training")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the page (default report.html)"
    )


def positive(text: str) -> int:
    """Return the number; argparse refuses one below 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}, wanted 1 or more")
    return number


def multiple(text: str) -> float:
    """Return a multiple of a mean that is the largest of several; argparse refuses one below 1."""
    number = float(text)
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}, wanted 1 or more")
    return number


def rank(text: str) -> int:
    """Return the number of a rank; argparse refuses a negative one."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}, wanted 0 or more")
    return number


def world_sizes(text: str) -> tuple[int, int]:
    """Return the smallest and the largest world that `8..1024` means."""
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and last.isdecimal() and dots) or not 0 < int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of sizes. Write 8..1024.")
    return int(first), int(last)


def num_bytes(text: str) -> int:
    """Return the number of bytes that `8G`, `500M` or `1.5T` means."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Write 8G, or 500M.")
    return int(float(match[1]) * BYTES_PER_UNIT[match[2].upper()])


def mesh_sizes(text: str) -> dict[str, int]:
    """Return the sizes that `tp=2,ep=8` means."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in MESH_FIELDS or not size.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is no part of a mesh. Write tp=2,pp=2,ep=8.")
        sizes[name] = int(size)
    return sizes


def _ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, help="local ranks; default: the fewest that the mesh needs")


def _program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--program", choices=TRAININGS, help="whose config it is (default: the program that has its fields)"
    )


def _overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override the file's")


def _corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", type=Path, help="files, or folders of files; their order is the documents' order"
    )
    parser.add_argument("--format", choices=("jsonl", "text"), help="default: by the files' endings")
    parser.add_argument("--key", default="text", help="JSON lines: the field with the text (default 'text')")


COMMANDS: dict[str, Command] = {
    "pretrain": Command(
        summary="Pretrain a model on .bin/.idx data, on this machine or as one rank under torchrun or srun.",
        example="mcore-rl pretrain tiny_moe/pretrain mesh.tp=2 mesh.ep=2 optim.lr=1e-3",
        add_arguments=config_arguments,
        module=TRAININGS["pretrain"],
        program="pretrain",
        config="pretrain",
    ),
    "sft": Command(
        summary="Fine-tune a model on conversations, from the weights of checkpoint.load.",
        example="mcore-rl sft tiny_moe/sft checkpoint.load=runs/quickstart/pretrain",
        add_arguments=config_arguments,
        module=TRAININGS["sft"],
        program="sft",
        config="sft",
    ),
    "rm": Command(
        summary="Train a reward model on pairs of answers, from the weights of checkpoint.load.",
        example="mcore-rl rm tiny_moe/rm checkpoint.load=runs/tiny_moe_sft rm.centering_coeff=0.01",
        add_arguments=config_arguments,
        module=TRAININGS["rm"],
        program="rm",
        config="rm",
    ),
    "dpo": Command(
        summary="Optimise a model on pairs of answers: DPO, IPO, SimPO, ORPO and others, from the weights of "
        "checkpoint.load.",
        example="mcore-rl dpo tiny_moe/dpo checkpoint.load=runs/tiny_moe_sft dpo.beta=0.3",
        add_arguments=config_arguments,
        module=TRAININGS["dpo"],
        program="dpo",
        config="dpo",
    ),
    "rl": Command(
        summary="Train a model on rewards: GRPO, GSPO, Kimi K2 and others, from the weights of checkpoint.load.",
        example="mcore-rl rl tiny_moe/grpo rl.loss.kind=gspo mesh.tp=2 mesh.ep=2",
        add_arguments=config_arguments,
        module=TRAININGS["rl"],
        program="rl",
        config="rl",
    ),
    "eval": Command(
        summary="Answer the held-out prompts of an RL config (rl.eval) and print accuracy, mean reward and pass@k; "
        "with a reward model's config score the pairs of data.valid and print accuracy and calibration.",
        example="mcore-rl eval tiny_moe/grpo checkpoint.load=runs/tiny_moe_grpo "
        "rl.eval.samples=4 rl.eval.temperature=0.7",
        add_arguments=config_arguments,
        module="mcore_rl.run.evaluate",
        program="rl",
        other_programs=("rm",),
        config="rl",
    ),
    "study": Command(
        summary="Run arms of an RL config from one start, for some seeds, and compare them in one table.",
        example="mcore-rl study tiny_moe/replay_study seeds=[1,2,3]",
        add_arguments=study_arguments,
        module="mcore_rl.run.study.runs",
        config="study",
    ),
    "data tokenizer": Command(
        summary="Train a sentencepiece tokenizer (byte fallback, single digits) on JSON lines or text. "
        "Ids: 0 unknown, 1 begin of text, 2 end of document, 3 padding.",
        example="mcore-rl data tokenizer corpus/train.jsonl --vocab-size 2048 --output data/tokenizer.model",
        add_arguments=tokenizer_arguments,
        module="mcore_rl.run.data",
    ),
    "data preprocess": Command(
        summary="Encode text files as PREFIX.bin and .idx (Megatron's format) and PREFIX.json (their origin). "
        "A killed run resumes when the same command is given again.",
        example="mcore-rl data preprocess corpus/train.jsonl --output data/train --tokenizer data/tok.model "
        "--workers 8",
        add_arguments=preprocess_arguments,
        module="mcore_rl.run.data",
    ),
    "data show": Command(
        summary="Show the first training examples of a config as the model reads them: sequences of pretraining, chats "
        "with what is trained on marked, prompts with their reference answers. It starts no ranks.",
        example="mcore-rl data show tiny_moe/sft --num 3",
        add_arguments=show_data_arguments,
        module="mcore_rl.run.show_data",
    ),
    "recipes": Command(
        summary="List the recipes that are shipped, by the names under which every command takes them for CONFIG.",
        example="mcore-rl recipes",
        add_arguments=no_arguments,
        module="mcore_rl.run.recipes",
    ),
    "problems": Command(
        summary="Write problems of an RL config's built-in task with their answers, to fine-tune on; none is held out.",
        example="mcore-rl problems tiny_moe/grpo --count 20000 --output runs/quickstart/chat.jsonl",
        add_arguments=problems_arguments,
        module="mcore_rl.run.problems",
    ),
    "reward": Command(
        summary="Show what an RL config's reward gives to completions of its own prompts; it needs no model.",
        example="mcore-rl reward tiny_moe/grpo --sample 4",
        add_arguments=reward_arguments,
        module="mcore_rl.run.reward",
    ),
    "config": Command(
        summary="Print the config of a file and overrides after all checks.",
        example="mcore-rl config qwen3_30b_a3b/pretrain mesh.dp=auto --ranks 64",
        add_arguments=show_arguments,
        module="mcore_rl.run.show_config",
        config="pretrain",
    ),
    "plan": Command(
        summary="Plan a training on a cluster without a GPU: memory of every rank, seconds of a step, meshes that fit.",
        example="mcore-rl plan qwen3_30b_a3b/pretrain --cluster example_h100 --nodes 2 --search",
        add_arguments=plan_arguments,
        module="mcore_rl.run.plan",
    ),
    "generate": Command(
        summary="Continue a text, or answer in a chat, with a checkpoint of a run of any mesh, on one process.",
        example='mcore-rl generate --run runs/quickstart/pretrain --prompt "def read_" --tokens 40 --temperature 0.7',
        add_arguments=generate_arguments,
        module="mcore_rl.run.generate",
    ),
    "probe": Command(
        summary="Compare an inference server's weights with those of a run's checkpoint, by logprobs, for each group "
        "of weights. Status 1 when the server has others.",
        example="mcore-rl probe runs/a --url http://node7:8000",
        add_arguments=probe_arguments,
        module="mcore_rl.run.probe",
    ),
    "serve": Command(
        summary="Start the inference servers of an RL config on this machine, for rl.engine.urls of a training "
        "elsewhere, and start them anew when they end. Their weights come from the training.",
        example="mcore-rl serve qwen3_30b_a3b/gspo rl.engine.kind=vllm --count 4 --port 8000",
        add_arguments=serve_arguments,
        module="mcore_rl.run.serve",
        config="rl",
    ),
    "convert": Command(
        summary="Convert checkpoints between Hugging Face's and Megatron's formats, and prove that nothing was lost.",
        example="mcore-rl convert import models/Qwen3-30B-A3B checkpoints/qwen3 --workers 8 --max-ram 16G",
        add_arguments=convert_arguments,
        module="mcore_rl.run.convert",
    ),
    "inspect": Command(
        summary="List what is in a checkpoint of either format, or how it differs from another.",
        example="mcore-rl inspect runs/quickstart/pretrain --diff checkpoints/qwen3",
        add_arguments=inspect_arguments,
        module="mcore_rl.run.inspect_checkpoint",
    ),
    "check": Command(
        summary="Read a checkpoint, an export or a .bin/.idx pair and compare every file with the checksum that was "
        "recorded when it was written; no second copy is needed. Status 1 when a file is damaged.",
        example="mcore-rl check runs/quickstart/pretrain",
        add_arguments=check_arguments,
        module="mcore_rl.run.check",
    ),
    "doctor": Command(
        summary="Show what this machine has for training: versions, GPUs, layers, kernels, patches of Megatron; what "
        "is missing and what that costs. Status 1 when something is broken.",
        example="mcore-rl doctor --json",
        add_arguments=doctor_arguments,
        module="mcore_rl.run.machine.doctor",
    ),
    "launch": Command(
        summary="Check a training, write its Slurm job, and submit it; with --dry-run show it.",
        example="mcore-rl launch tiny_moe/pretrain --cluster example_cpu --nodes 4",
        add_arguments=launch_arguments,
        module="mcore_rl.launch.submit",
    ),
    "jobs": Command(
        summary="List launched runs: state, attempts, step, speed, last checkpoint, why they ended.",
        example="mcore-rl jobs runs/qwen3_30b_a3b",
        add_arguments=jobs_arguments,
        module="mcore_rl.launch.jobs",
    ),
    "attach": Command(
        summary="Open a shell on a node of a running job, in its container, or run a command there.",
        example="mcore-rl attach runs/qwen3_30b_a3b --node n3 -- nvidia-smi -l 5",
        add_arguments=attach_arguments,
        module="mcore_rl.launch.attach",
    ),
    "report": Command(
        summary="Write one HTML page about runs, side by side: curves, experts, speed, samples, warnings, settings.",
        example="mcore-rl report runs/quickstart/grpo runs/quickstart/gspo --output report.html",
        add_arguments=report_arguments,
        module="mcore_rl.run.report",
    ),
}
"""Every command by name; a name of two words is a command of a group, as `mcore-rl data tokenizer`."""
