"""A training from Python, without the command line: tokenizer, data, pretraining, metrics.

    python examples/train.py OUTPUT TEXT_FILE ...

Under torchrun or srun call only `train`: every rank makes that call.
"""

import sys
from pathlib import Path

from mcore_rl.api import preprocess, read_metrics, train, train_tokenizer

VOCAB_SIZE = 512


def main(output: Path, texts: list[Path]) -> float:
    """Pretrain a tiny model on `texts` and return its last training loss in nats a token."""
    tokenizer = train_tokenizer(texts, output / "tokenizer.model", vocab_size=VOCAB_SIZE)
    data = preprocess(texts, output / "data", tokenizer)
    run = train(
        "pretrain",
        "tiny_moe/pretrain",
        {
            "run_dir": output / "run",
            "model": {"vocab_size": VOCAB_SIZE},
            "data": {"train": [str(data)], "seq_length": 64},
            "data.tokenizer": {"kind": "sentencepiece", "path": str(tokenizer)},
            "train": {"steps": 20, "global_batch": 8, "micro_batch": 4, "eval_batches": "none"},
            "mesh": {"tp": 1, "ep": 1},
        },
    )
    losses = read_metrics(run)["train/loss_nats"]
    return float(losses[max(losses)])


if __name__ == "__main__":
    sys.stdout.write(f"{main(Path(sys.argv[1]), [Path(text) for text in sys.argv[2:]]):.3f} nats a token\n")
