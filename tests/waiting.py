"""Models that leave the device in main memory, which a CPU's do not: `python -m tests.waiting MODULE WORDS...`."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from mcore_rl.config.section import Store
from mcore_rl.rl import frozen_model
from mcore_rl.train import offload


@contextmanager
def leaving() -> Iterator[None]:
    """Context in which what waits in main memory is copied there, and its tensors are emptied, on a CPU too."""

    def store_on(_: torch.device, store: Store) -> Store:
        return store

    with mock.patch.object(offload, "store_on", store_on), mock.patch.object(frozen_model, "store_on", store_on):
        yield


def main(argv: Sequence[str]) -> int:
    """Run the main function of a module in that context."""
    module, *words = argv
    with leaving():
        return int(importlib.import_module(module).main(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
