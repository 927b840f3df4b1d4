"""Processes that tokenize shards, and end when the process that started them does."""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.documents import DocumentFormat
from mcore_rl.data.shards import Shard, ShardReport, tokenize_shard
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError


@contextmanager
def tokenizing(
    shards: Sequence[Shard],
    document_format: DocumentFormat,
    tokenizer: TokenizerConfig,
    folder: Path,
    workers: int,
) -> Iterator[Iterator[ShardReport]]:
    """Start `workers` processes at once; iterating gives each shard's report when it is done, in any order.

    They are forked, so that they need not import Megatron again: enter this before other threads are started.
    Leaving waits for the shards at hand and drops the rest.
    """
    if workers < 1:
        raise DataError(f"{workers} workers: wanted at least 1.")
    executor = ProcessPoolExecutor(
        max_workers=workers, mp_context=multiprocessing.get_context("fork"), initializer=_follow_parent
    )
    try:
        futures = [executor.submit(_tokenize, shard, document_format, tokenizer, folder) for shard in shards]
        yield (future.result() for future in as_completed(futures))
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that tokenized parts of {folder} was killed (out of memory?). Run the same command "
            "again, perhaps with fewer --workers: it resumes."
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _tokenize(
    shard: Shard, document_format: DocumentFormat, config: TokenizerConfig, folder: Path
) -> ShardReport:
    return tokenize_shard(shard, document_format, _tokenizer(config), folder)


@functools.cache
def _tokenizer(config: TokenizerConfig) -> Tokenizer:
    return load_tokenizer(config)


def _follow_parent() -> None:
    """End this worker when its parent ends, so that it does not wait for work forever. The parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
