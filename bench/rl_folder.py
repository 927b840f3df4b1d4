"""The start of both trainers of `bench.rl`, made by mcore_rl's programs: tokenizer, model, prompts."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.programs.rollouts import load_prompts
from mcore_rl.storage.run_config import load_run_config

VOCAB = 512
WARM_STEPS, WARM_UP_STEPS, WARM_EXAMPLES = 300, 30, 10_000
MODEL = f"""
[model]
family = "qwen3_moe"
num_layers = 4
hidden_size = 256
num_heads = 8
num_kv_heads = 4
head_dim = 32
ffn_hidden_size = 512
vocab_size = {VOCAB}
max_position = 4096
[model.moe]
num_experts = 16
top_k = 4
ffn_hidden_size = 128
aux_loss_coeff = 0.0
"""
SFT = f"""
extends = "model.toml"
run_dir = "sft"
[data]
train = ["sft.jsonl"]
chat_template = "raw"
seq_length = 512
tokenizer = {{ kind = "huggingface", path = "tokenizer" }}
[train]
steps = {WARM_STEPS}
global_batch = 4
eval_batches = "none"
[optim]
lr = 1e-3
schedule = "constant"
warmup_steps = {WARM_UP_STEPS}
weight_decay = 0.01
beta2 = 0.98
"""
RL = f"""
extends = "model.toml"
run_dir = "rl"
[data]
chat_template = "raw"
tokenizer = {{ kind = "huggingface", path = "tokenizer" }}
[train]
steps = 1000000
global_batch = 64
eval_interval = "none"
[optim]
lr = 5e-5
schedule = "constant"
warmup_steps = 10
weight_decay = 0.0
beta2 = 0.98
[checkpoint]
load = "sft/checkpoints/iter_{WARM_STEPS:07d}"
load_optimizer = false
[rl.prompts]
task = "reversing"
smallest = 4
largest = 12
max_tokens = 16
[rl.rollout]
prompts_per_step = 16
group_size = 8
max_new_tokens = 16
[rl.engine]
slots = 128
[rl.update]
max_tokens_per_microbatch = 2048
[rl.reward]
parts = ["positions"]
"""

RL_OF_FOLDER = """
extends = "any_model/copying"
run_dir = "rl"
[model]
path = "imported"
[data]
chat_template = "raw"
[train]
steps = 1000000
[rl.reward]
parts = ["positions"]
"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Settings of the other trainer, with our own sizes."""

    model: str
    tokenizer: str
    prompts: str
    kind: str
    experts: str | None
    clip_low: float
    clip_high: float
    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    update_size: int
    lr: float
    warmup_updates: int
    beta2: float


def build(folder: Path) -> None:
    """All files, unless they are there; takes a minute or two."""
    if (folder / "hf" / "config.json").is_file():
        return
    write_inputs(folder)
    program(folder, ["sft", "sft.toml"])
    program(folder, ["convert", "export", f"sft/checkpoints/iter_{WARM_STEPS:07d}", "hf"])


def build_from(model: Path, folder: Path) -> None:
    """Make the same files of a Hugging Face folder, as it is, for the task of the recipe any_model/copying."""
    if (folder / "hf").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rl.toml").write_text(RL_OF_FOLDER)
    program(folder, ["convert", "import", str(model), "imported", "--no-check-logits"])
    for name in ("hf", "tokenizer"):
        (folder / name).symlink_to(model, target_is_directory=True)


def write_inputs(folder: Path) -> None:
    """Write the tokenizer, the conversations, and the configs of both programs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer")
    _write_examples(folder / "sft.jsonl")
    for name, text in (("model", MODEL), ("sft", SFT), ("rl", RL)):
        (folder / f"{name}.toml").write_text(text)


def overrides(kind: str) -> list[str]:
    """Return the overrides of rl.toml."""
    return [f"rl.loss.kind={kind}", f"run_dir=rl_{kind}"]


def write_peer(folder: Path, kind: str, steps: int) -> Path:
    """A file for the other trainer: our settings, and the prompts of so many of our steps in our order."""
    words = [*overrides(kind), f"data.tokenizer.path={folder / 'tokenizer'}"]
    if (folder / "imported").is_dir():
        words.append(f"model.path={folder / 'imported'}")
    config = load_run_config(RlRunConfig, folder / "rl.toml", words)
    rollout, clip = config.rl.rollout, config.rl.loss.clip
    problems = [prompt.problem for prompt in load_prompts(config).train.take(0, steps * rollout.prompts_per_step)]
    lines = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    peer = Peer(
        model=str(folder / "hf"),
        tokenizer=str(folder / "tokenizer"),
        prompts=str(prompts),
        kind=kind,
        experts="grouped_mm" if config.model.is_moe else None,
        clip_low=clip.low,
        clip_high=clip.high,
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        max_new_tokens=rollout.max_new_tokens,
        update_size=config.train.global_batch,
        lr=config.optim.lr,
        warmup_updates=config.optim.warmup_steps,
        beta2=config.optim.beta2,
    )
    path = folder / f"peer_{kind}.json"
    path.write_text(json.dumps(asdict(peer), indent=1))
    return path


def write_tokenizer(folder: Path, words: Sequence[str] = ()) -> None:
    """A token a character, and a token for each of `words`; with these, for templates, <eos> is a special token."""
    names = ["<pad>", "<bos>", "<eos>", *map(chr, range(256)), *words]
    names += [f"<x{number}>" for number in range(VOCAB - len(names))]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    pattern = "|".join([*map(re.escape, words), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    if words:
        tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos")}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def _write_examples(path: Path) -> None:
    """Digits, most of them longer than those of the task, and their reverse: after these it is half known."""
    numbers = random.Random(0)
    with path.open("w") as file:
        for _ in range(WARM_EXAMPLES):
            digits = "".join(numbers.choices("0123456789", k=numbers.randint(8, 24)))
            file.write(json.dumps({"prompt": f"{digits}=", "response": digits[::-1]}) + "\n")


def program(folder: Path, words: Sequence[str]) -> None:
    """Run `mcore-rl words...` in the folder; its output goes to a log file beside the configs."""
    with (folder / f"{words[0]}.log").open("w") as log:
        command = [sys.executable, "-m", "mcore_rl.cli.cli", *words]
        # Engines of this package are named in configs, and the folder is not that of the repository.
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
