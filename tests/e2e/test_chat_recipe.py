"""The recipe for chats trains on conversations of several turns, in the words of its template."""

import json
import math
from pathlib import Path

import pytest

from mcore_rl.api import is_done, read_metrics, train, train_tokenizer
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.load import load_config
from mcore_rl.config.sft import SFTConfig

ROOT = Path(__file__).parents[2]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": f"What follows {number}?"},
            {"role": "assistant", "content": f"{number + 1}"},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": f"{number + 2}"},
        ]
    }
    for number in range(60)
]


@pytest.mark.full
def test_the_recipe_for_chats_trains_two_steps(tmp_path: Path, capfd) -> None:
    tokenizer = train_tokenizer([ROOT / "README.md"], tmp_path / "tokenizer.model", vocab_size=400)
    too_long = {"messages": [{"role": "user", "content": "x " * 2000}, {"role": "assistant", "content": "y"}]}
    chats = tmp_path / "chat.jsonl"
    chats.write_text("".join(json.dumps(chat) + "\n" for chat in [*CHATS, too_long]))
    fields = {
        "run_dir": tmp_path / "run",
        "model.vocab_size": 400,
        "data.train": [str(chats)],
        "data.tokenizer.path": str(tokenizer),
        "checkpoint": {"load": "none", "interval": "none"},
        "mesh": {"tp": 1, "ep": 1},
        "train.steps": 2,
        "optim.warmup_steps": 1,
    }
    run = train("sft", "tiny_moe/sft_chat", fields)
    shown = capfd.readouterr()
    assert is_done(run) and "warning" not in (shown.out + shown.err).replace("warnings.warn", "")
    metrics = read_metrics(run)
    losses = metrics["train/loss_nats"]
    # Random weights know nothing, and the first update changes that.
    assert abs(losses[1] - math.log(400)) < 0.5 and losses[2] < losses[1]
    # Records of the caller's are as a file of them.
    del fields["data.train"]
    again = train("sft", "tiny_moe/sft_chat", {**fields, "run_dir": tmp_path / "again"}, data=[*CHATS, too_long])
    assert read_metrics(again)["train/loss_nats"] == losses


def test_the_recipe_for_chats_passes_its_checks_with_a_template_that_separates_turns() -> None:
    config = load_config(SFTConfig, Path("tiny_moe/sft_chat"))
    assert (config.data.chat_template, config.data.seq_length) == ("plain", config.model.max_position)
    assert config.checkpoint.load == "runs/quickstart/pretrain"
    assert PROGRAMS["sft"].checked_ranks(config, None) == 2
