"""Where training text comes from."""

from typing import Literal

from pydantic import PositiveInt

from mcore_rl.config.section import Section


class TokenizerConfig(Section):
    """The tokenizer that made the data."""

    kind: Literal["sentencepiece", "huggingface", "none"] = "none"
    """`sentencepiece`: a .model file; `huggingface`: a folder with tokenizer.json; `none`: token ids only."""
    path: str = ""
    """The file or folder."""


class DataConfig(Section):
    """Megatron .bin/.idx datasets, blended by weight and cut into sequences."""

    train: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs to train on (without the ending)."""
    train_weights: tuple[float, ...] = ()
    """One weight a prefix; empty: in proportion to their tokens."""
    valid: tuple[str, ...] = ()
    """Prefixes to evaluate on. With these or `test` given `train` is not split; without both, `split` cuts it."""
    test: tuple[str, ...] = ()
    """Prefixes for the test loss at the end; empty, with `valid` given: there is none."""
    split: tuple[float, float, float] = (98.0, 1.0, 1.0)
    """Shares of documents for train, valid, test, when `valid` and `test` are empty."""
    seq_length: PositiveInt = 256
    """Tokens of a training sequence."""
    cache_dir: str = ""
    """Where index caches lie; empty: `<run_dir>/index_cache`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
