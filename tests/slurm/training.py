"""What the jobs of the tests train: a tiny MoE on the source text of Python, and what they leave behind."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_rl.launch.job import JobScript, render
from tests.slurm.cluster import ROOT, USER, Cluster
from tests.unit.launch.conftest import job_script

MODULES = ("argparse", "ast", "dataclasses", "inspect", "pathlib", "subprocess", "typing", "turtle")
VOCAB_SIZE = 512
MODEL = """
[platform]
deterministic = true
timeout_s = 60.0
[model]
family = "qwen3_moe"
num_layers = 2
hidden_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
ffn_hidden_size = 64
vocab_size = 512
attention_dropout = 0.1
hidden_dropout = 0.1
[model.moe]
num_experts = 4
top_k = 2
ffn_hidden_size = 32
[optim]
lr = 1e-3
[train]
global_batch = 8
eval_batches = "none"
"""
PRETRAIN = """
micro_batch = 4
[data]
train = ["{data}/train"]
seq_length = 64
"""
SFT = """
[data]
train = ["{data}/chat.jsonl"]
chat_template = "plain"
seq_length = 64
tokenizer = {{ kind = "sentencepiece", path = "{data}/tokenizer.model" }}
"""
RL = """
[data]
chat_template = "raw"
tokenizer = {{ kind = "sentencepiece", path = "{data}/tokenizer.model" }}
[rl.prompts]
task = "reversing"
max_tokens = 16
[rl.rollout]
prompts_per_step = 4
group_size = 4
max_new_tokens = 8
[rl.reward]
parts = ["length"]
length_max_tokens = 4
"""
TWO_RANKS = ("mesh.tp=2", "mesh.ep=2")
CACHE = ".cache"
STEPS = 60
"""Of a run that is interrupted, and of the one that is not, with which it is compared."""
BEGIN_S = 300.0
PROGRAM = "^[^ ]*python .*mcore_rl.programs.pretrain"
"""torchrun and its ranks; srun has that name among its words too."""
ABOVE_A_RANK = "^[^ ]*python (-u )?-m mcore_rl.workers.rank_process"


def make_corpus(folder: Path) -> None:
    """train.bin/.idx, tokenizer.model, chat.jsonl, and the compiled layers, which each user's cache keeps."""
    folder.mkdir(parents=True)
    library = Path(json.__file__).parents[1]
    texts = [(library / f"{module}.py").read_text() for module in MODULES]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    answers = [line.strip() for line in texts[0].splitlines() if 8 < len(line.strip()) < 40]
    chats = [{"prompt": f"line {i}", "response": answer} for i, answer in enumerate(answers[:100])]
    (folder / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    learn = ["data", "tokenizer", "text.jsonl", "--output", "tokenizer.model", "--vocab-size", str(VOCAB_SIZE)]
    encode = ["data", "preprocess", "text.jsonl", "--output", "train", "--tokenizer", "tokenizer.model"]
    make = f"""
from mcore_rl.cli.cli import main
from mcore_rl.megatron.compiled import library
assert main({learn}) == main({encode}) == 0
library()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / CACHE)}
    subprocess.run([sys.executable, "-c", make], cwd=folder, env=environment, check=True, capture_output=True)


def make_data(corpus: Path, folder: Path) -> None:
    """Copy what `make_corpus` made, and write the configs pretrain.toml, sft.toml and rl.toml."""
    shutil.copytree(corpus / CACHE, folder.parent / CACHE)  # of the jobs' user, whose home is the parent
    for path in (folder.parent / CACHE, *(folder.parent / CACHE).rglob("*")):
        shutil.chown(path, USER, USER)
    shutil.copytree(corpus, folder, ignore=shutil.ignore_patterns(CACHE))
    folder.chmod(0o755)
    (folder / "pretrain.toml").write_text(MODEL + PRETRAIN.format(data=folder))
    (folder / "sft.toml").write_text(MODEL + SFT.format(data=folder))
    (folder / "rl.toml").write_text(MODEL + RL.format(data=folder))
    for path in folder.iterdir():
        path.chmod(0o644)


def job(cluster: Cluster, name: str, *overrides: str, **fields: Any) -> JobScript:
    """A pretraining job on two nodes of one rank, without the check of the nodes, but for `fields`."""
    values: dict[str, Any] = {
        "name": name,
        "program": "pretrain",
        "module": "mcore_rl.programs.pretrain",
        "arguments": (str(cluster.shared / "data/pretrain.toml"), *overrides),
        "run_dir": str(cluster.shared / name),
        "work_dir": str(cluster.shared),
        "code_dir": str(cluster.code),
        "job_sh": str(cluster.code / "launch/job.sh"),
        "python": str(cluster.python),
        "nodes": 2,
        "time": "30",
        "node_check": False,
    }
    return job_script(**values | fields)


def submit(cluster: Cluster, script: JobScript, *options: str) -> str:
    run_dir = Path(script.run_dir)
    for path in (run_dir, run_dir / "logs"):
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
    path = run_dir / "job.sbatch"
    path.write_text(render(script))
    return cluster.submit(path, *options)


def uninterrupted(cluster: Cluster, name: str, **fields: Any) -> JobScript:
    """The job of STEPS steps on two ranks which interrupted ones of the same words are compared with."""
    return job(cluster, name, f"train.steps={STEPS}", "checkpoint.interval=5", *TWO_RANKS, **fields)


def interrupt(cluster: Cluster, id_: str, run_dir: Path, how: Callable[[], object], within_s: float) -> None:
    """Do `how` once the present attempt has saved; return when the next one is about to start."""
    restarts, reached = int(cluster.job(id_)["Restarts"]) + 1, saved_step(run_dir) + 5
    cluster.until(lambda: saved_step(run_dir) >= reached, f"step {reached} is saved", BEGIN_S)
    how()
    cluster.until(lambda: cluster.job(id_)["Restarts"] == str(restarts), f"restart {restarts}", within_s)


def kill_rank(cluster: Cluster, node: str) -> None:
    """Only the rank: the process above it records how it ended."""
    signal_rank(cluster, node, "KILL")


def signal_rank(cluster: Cluster, node: str, name: str) -> None:
    """Only the rank, not the process above it."""
    above = cluster.run("pgrep", "-o", "-f", ABOVE_A_RANK, node=node)
    cluster.run("pkill", f"-{name}", "-P", above, node=node)


def losses(run_dir: Path) -> dict[int, float]:
    records = _records(run_dir / "metrics.jsonl")
    return {record["step"]: record["train/loss_nats"] for record in records if "train/loss_nats" in record}


def ends(run_dir: Path, job: str = "") -> list[tuple[str, str]]:
    """Why each attempt (of `job` only) ended, and what came then."""
    lines = _records(run_dir / "attempts.jsonl")
    last = {(line["job"], line["attempt"]): line for line in lines if line["event"] == "end"}
    return [(line["why"], line["then"]) for key, line in sorted(last.items()) if job in ("", str(key[0]))]


def saved_step(run_dir: Path) -> int:
    latest = run_dir / "checkpoints/latest_checkpointed_iteration.txt"
    return int(latest.read_text()) if latest.exists() else 0


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rl_words(cluster: Cluster, start: Path) -> tuple[str, ...]:
    """Arguments of reinforcement learning on two ranks, five rollouts of two updates, from the weights of `start`."""
    return (
        str(cluster.shared / "data/rl.toml"),
        *("train.steps=10", "mesh.tp=2", "mesh.ep=2", "model.attention_dropout=0", "model.hidden_dropout=0"),
        *(f"checkpoint.load={start}", "checkpoint.load_optimizer=false", "replay.kind=r2"),
    )
