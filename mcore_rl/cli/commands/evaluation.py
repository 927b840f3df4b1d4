"""Arguments of `mcore-rl eval`: a config, or else a model, questions and rewards."""

import argparse
from pathlib import Path

from mcore_rl.cli.commands.arguments import CONFIG_HELP, add_overrides, add_ranks
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError

RECIPE = "any_model/eval"


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a config like `config_arguments`, or a model, data and rewards."""
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
        help=f"without CONFIG: the recipe {RECIPE} with model.path=FOLDER, a Hugging Face folder, an import, a "
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
            raise ConfigError(
                "Give CONFIG, the folder of a run, or --model FOLDER with --data FILE and --reward PART."
            )
        if (Path(config) / "config.toml").is_file():
            return f"{config}/config.toml", [f"run_dir={config}", *words]
        return config, words
    if config is not None and "=" not in config:
        raise ConfigError(
            f"--model is given in the place of CONFIG. Leave {config} out, or set model.path in it."
        )
    if not args.data:
        raise ConfigError("--model needs questions. Give --data FILE, JSON lines with question and answer.")
    if config is not None:
        words.insert(0, config)  # an override that the parser took for the config
    files = toml_value(args.data)
    given = [f"model.path={args.model}", f"rl.eval.files={files}", f"rl.prompts.files={files}"]
    if args.reward:
        given.append(f"rl.reward.parts={toml_value(args.reward)}")
    return RECIPE, [*given, *words]
