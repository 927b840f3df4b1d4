"""The commands of `mcore-rl`. Neither configs nor torch are imported, so that help is quick."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.cli.commands.arguments import config_arguments, no_arguments
from mcore_rl.cli.commands.checkpoints import check_arguments, convert_arguments, inspect_arguments
from mcore_rl.cli.commands.data import (
    preprocess_arguments,
    problems_arguments,
    reward_arguments,
    show_data_arguments,
    tokenizer_arguments,
)
from mcore_rl.cli.commands.evaluation import eval_arguments, eval_config
from mcore_rl.cli.commands.models import generate_arguments, probe_arguments, serve_arguments
from mcore_rl.cli.commands.plans import init_arguments, plan_arguments
from mcore_rl.cli.commands.runs import (
    completion_arguments,
    doctor_arguments,
    fields_arguments,
    report_arguments,
    show_arguments,
    study_arguments,
)
from mcore_rl.config.trainings import TRAININGS
from mcore_rl.launch.arguments import attach_arguments, jobs_arguments, launch_arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of `mcore-rl`, imported only when it runs."""

    brief: str
    """Purpose in a few words, for the list of all commands, which is 80 columns wide."""
    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    module: str
    """Module with a `main(args)` that runs the command or, with `program`, a `main(argv)` that runs one rank of it."""
    program: str | None = None
    """Name in PROGRAMS of the training program that the command starts ranks of; None if it runs in this process."""
    given: Callable[[argparse.Namespace], tuple[str, list[str]]] = lambda args: (
        args.config,
        [*args.overrides, *args.console],
    )
    """Return the config and the overrides for the arguments of a command with `program`."""
    other_programs: tuple[str, ...] = ()
    """Names of further training programs with configs that the command accepts; the config's fields decide."""
    config: str = ""
    """Name in KINDS (config/kinds.py) of the config that the help explains field by field; "" without a config."""


COMMANDS: dict[str, Command] = {
    "pretrain": Command(
        brief="pretrain a model on .bin/.idx data",
        summary="Pretrain a model on .bin/.idx data, on this machine or as one rank under torchrun or srun.",
        example="mcore-rl pretrain tiny_moe/pretrain mesh.tp=2 mesh.ep=2 optim.lr=1e-3",
        add_arguments=config_arguments,
        module=TRAININGS["pretrain"],
        program="pretrain",
        config="pretrain",
    ),
    "sft": Command(
        brief="fine-tune a model on conversations",
        summary="Fine-tune a model on conversations, from the weights of checkpoint.load.",
        example="mcore-rl sft tiny_moe/sft checkpoint.load=runs/quickstart/pretrain",
        add_arguments=config_arguments,
        module=TRAININGS["sft"],
        program="sft",
        config="sft",
    ),
    "rm": Command(
        brief="train a reward model on pairs of answers",
        summary="Train a reward model on pairs of answers, from the weights of checkpoint.load.",
        example="mcore-rl rm tiny_moe/rm data.train=pairs.jsonl rm.centering_coeff=0.01",
        add_arguments=config_arguments,
        module=TRAININGS["rm"],
        program="rm",
        config="rm",
    ),
    "dpo": Command(
        brief="DPO, IPO, SimPO, ORPO and others on pairs of answers",
        summary="Optimise a model on pairs of answers: DPO, IPO, SimPO, ORPO and others, from the weights of "
        "checkpoint.load.",
        example="mcore-rl dpo tiny_moe/dpo checkpoint.load=runs/tiny_moe_sft dpo.beta=0.3",
        add_arguments=config_arguments,
        module=TRAININGS["dpo"],
        program="dpo",
        config="dpo",
    ),
    "rl": Command(
        brief="GRPO, GSPO, PPO and others on rewards",
        summary="Train a model on rewards: GRPO, GSPO, Kimi K2 and others, from the weights of checkpoint.load.",
        example="mcore-rl rl tiny_moe/grpo rl.loss.kind=gspo mesh.tp=2 mesh.ep=2",
        add_arguments=config_arguments,
        module=TRAININGS["rl"],
        program="rl",
        config="rl",
    ),
    "eval": Command(
        brief="accuracy of a run, a model, or a reward model",
        summary="Answer the held-out prompts of an RL config (rl.eval) and print accuracy, mean reward and pass@k; "
        "with a reward model's config score the pairs of data.valid and print accuracy and calibration.",
        example="mcore-rl eval tiny_moe/grpo checkpoint.load=runs/tiny_moe_grpo "
        "rl.eval.samples=4 rl.eval.temperature=0.7",
        add_arguments=eval_arguments,
        module="mcore_rl.cli.evaluate",
        program="rl",
        given=eval_config,
        other_programs=("rm",),
        config="rl",
    ),
    "study": Command(
        brief="compare arms of an RL config over seeds",
        summary="Run arms of an RL config from one start, for some seeds, and compare them in one table.",
        example="mcore-rl study tiny_moe/replay_study seeds=[1,2,3]",
        add_arguments=study_arguments,
        module="mcore_rl.cli.study.runs",
        config="study",
    ),
    "init": Command(
        brief="write a short config for a model",
        summary="Write a short config for a training of a model, on the GPUs named or on this machine.",
        example="mcore-rl init models/Qwen3-30B-A3B --program rl --gpus 8xH100",
        add_arguments=init_arguments,
        module="mcore_rl.cli.init",
    ),
    "data tokenizer": Command(
        brief="train a sentencepiece tokenizer",
        summary="Train a sentencepiece tokenizer (byte fallback, single digits) on JSON lines or text. "
        "Ids: 0 unknown, 1 begin of text, 2 end of document, 3 padding.",
        example="mcore-rl data tokenizer corpus/train.jsonl --vocab-size 2048 --output data/tokenizer.model",
        add_arguments=tokenizer_arguments,
        module="mcore_rl.cli.data",
    ),
    "data preprocess": Command(
        brief="encode text as .bin/.idx",
        summary="Encode text files as PREFIX.bin and .idx (Megatron's format) and PREFIX.json (their origin). "
        "A killed run resumes when the same command is given again.",
        example="mcore-rl data preprocess corpus/train.jsonl --output data/train --tokenizer data/tok.model "
        "--workers 8",
        add_arguments=preprocess_arguments,
        module="mcore_rl.cli.data",
    ),
    "data show": Command(
        brief="show training examples, or how a file is read",
        summary="Show the first training examples of a config as the model reads them: sequences of pretraining, chats "
        "with what is trained on marked, prompts with their reference answers. It starts no ranks.",
        example="mcore-rl data show tiny_moe/sft --num 3",
        add_arguments=show_data_arguments,
        module="mcore_rl.cli.show_data",
    ),
    "recipes": Command(
        brief="list the recipes that are shipped",
        summary="List the recipes that are shipped, by the names under which every command takes them for CONFIG.",
        example="mcore-rl recipes",
        add_arguments=no_arguments,
        module="mcore_rl.cli.recipes",
    ),
    "problems": Command(
        brief="write problems of a built-in task to fine-tune on",
        summary="Write problems of an RL config's built-in task with their answers, to fine-tune on; none is held out.",
        example="mcore-rl problems tiny_moe/grpo --count 20000 --output runs/quickstart/chat.jsonl",
        add_arguments=problems_arguments,
        module="mcore_rl.cli.problems",
    ),
    "reward": Command(
        brief="try a reward on completions, without a model",
        summary="Show what an RL config's reward gives to completions of its own prompts; it needs no model.",
        example="mcore-rl reward tiny_moe/grpo --sample 4",
        add_arguments=reward_arguments,
        module="mcore_rl.cli.reward",
    ),
    "config": Command(
        brief="print a config after all checks",
        summary="Print the config of a file and overrides after all checks.",
        example="mcore-rl config qwen3_30b_a3b/pretrain mesh.dp=auto --ranks 64",
        add_arguments=show_arguments,
        module="mcore_rl.cli.show_config",
        config="pretrain",
    ),
    "plan": Command(
        brief="memory, time and meshes of a training, without a GPU",
        summary="Plan a training on a cluster without a GPU: memory of every rank, seconds of a step, meshes that fit.",
        example="mcore-rl plan qwen3_30b_a3b/pretrain --cluster example_h100 --nodes 2 --search",
        add_arguments=plan_arguments,
        module="mcore_rl.cli.plan",
    ),
    "generate": Command(
        brief="continue a text, or chat, with a model",
        summary="Continue a text, or answer in a chat, with a checkpoint of a run of any mesh, on one process.",
        example='mcore-rl generate runs/quickstart/pretrain "def read_" --tokens 40 --temperature 0.7',
        add_arguments=generate_arguments,
        module="mcore_rl.cli.generate",
    ),
    "probe": Command(
        brief="compare a server's weights with a checkpoint",
        summary="Compare an inference server's weights with those of a run's checkpoint, by logprobs, for each group "
        "of weights. Status 1 when the server has others.",
        example="mcore-rl probe runs/a --url http://node7:8000",
        add_arguments=probe_arguments,
        module="mcore_rl.cli.probe",
    ),
    "serve": Command(
        brief="start the inference servers of an RL config",
        summary="Start the inference servers of an RL config on this machine, for rl.engine.urls of a training "
        "elsewhere, and start them anew when they end. Their weights come from the training.",
        example="mcore-rl serve qwen3_30b_a3b/gspo rl.engine.kind=vllm --count 4 --port 8000",
        add_arguments=serve_arguments,
        module="mcore_rl.cli.serve",
        config="rl",
    ),
    "convert": Command(
        brief="Hugging Face's format to Megatron's and back",
        summary="Convert checkpoints between Hugging Face's and Megatron's formats, and prove that nothing was lost.",
        example="mcore-rl convert import models/Qwen3-30B-A3B checkpoints/qwen3 --workers 8 --max-ram 16G",
        add_arguments=convert_arguments,
        module="mcore_rl.cli.convert",
    ),
    "inspect": Command(
        brief="list or compare what is in checkpoints",
        summary="List what is in a checkpoint of either format, or how it differs from another.",
        example="mcore-rl inspect runs/quickstart/pretrain --diff checkpoints/qwen3",
        add_arguments=inspect_arguments,
        module="mcore_rl.cli.inspect_checkpoint",
    ),
    "check": Command(
        brief="compare files with their recorded checksums",
        summary="Read a checkpoint, an export or a .bin/.idx pair and compare every file with the checksum that was "
        "recorded when it was written; no second copy is needed. Status 1 when a file is damaged.",
        example="mcore-rl check runs/quickstart/pretrain",
        add_arguments=check_arguments,
        module="mcore_rl.cli.check",
    ),
    "doctor": Command(
        brief="what this machine has for training, and lacks",
        summary="Show what this machine has for training: versions, GPUs, layers, kernels, patches of Megatron; what "
        "is missing and what that costs. Status 1 when something is broken.",
        example="mcore-rl doctor --json",
        add_arguments=doctor_arguments,
        module="mcore_rl.cli.machine.doctor",
    ),
    "launch": Command(
        brief="write and submit the Slurm job of a training",
        summary="Check a training, write its Slurm job, and submit it; with --dry-run show it.",
        example="mcore-rl launch tiny_moe/pretrain --cluster example_cpu --nodes 4",
        add_arguments=launch_arguments,
        module="mcore_rl.launch.submit",
    ),
    "jobs": Command(
        brief="list launched runs, and why they ended",
        summary="List launched runs: state, attempts, step, speed, last checkpoint, why they ended.",
        example="mcore-rl jobs runs/qwen3_30b_a3b",
        add_arguments=jobs_arguments,
        module="mcore_rl.launch.jobs",
    ),
    "attach": Command(
        brief="open a shell on a node of a running job",
        summary="Open a shell on a node of a running job, in its container, or run a command there.",
        example="mcore-rl attach runs/qwen3_30b_a3b --node n3 -- nvidia-smi -l 5",
        add_arguments=attach_arguments,
        module="mcore_rl.launch.attach",
    ),
    "fields": Command(
        brief="explain fields of configs, such as rl.loss",
        summary="Explain the fields of a config, or of a section of it, or one field: default, type, meaning.",
        example="mcore-rl fields rl.loss",
        add_arguments=fields_arguments,
        module="mcore_rl.cli.fields_help",
    ),
    "completion": Command(
        brief="completion of commands and fields for bash",
        summary="Print the bash functions that complete commands, options, recipes and fields.",
        example="mcore-rl completion bash",
        add_arguments=completion_arguments,
        module="mcore_rl.cli.completion",
    ),
    "report": Command(
        brief="one HTML page about runs",
        summary="Write one HTML page about runs, side by side: curves, experts, speed, samples, warnings, settings.",
        example="mcore-rl report runs/quickstart/grpo runs/quickstart/gspo --output report.html",
        add_arguments=report_arguments,
        module="mcore_rl.cli.report",
    ),
}
"""Every command by name; a name of two words is a command in a group, such as `mcore-rl data tokenizer`."""

COMMAND_GROUPS = {
    "train": ("pretrain", "sft", "rm", "dpo", "rl", "study", "init", "recipes", "config", "plan"),
    "data": ("data tokenizer", "data preprocess", "data show", "problems", "reward"),
    "models": ("generate", "eval", "convert", "inspect", "check", "serve", "probe"),
    "cluster": ("launch", "jobs", "attach", "doctor"),
    "look": ("report", "fields", "completion"),
}
"""All commands by subject, in the order of the overview."""
