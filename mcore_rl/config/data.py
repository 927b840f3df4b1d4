"""The section `data` of pretraining: text as token ids, and the tokenizer that made them."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveInt, model_validator

from mcore_rl.config.section import Section, Text


class TokenizerConfig(Section):
    """The tokenizer that made the data."""

    kind: Literal["sentencepiece", "huggingface", "none"] = "none"
    """Kind of tokenizer. `sentencepiece`: a .model file. `huggingface`: a folder with tokenizer.json or tiktoken.model.
    `none`: no tokenizer, the data are token ids. If only `path` is set, its ending decides."""
    path: Text | None = None
    """Path of the .model file or the folder; `none` with kind = "none"."""

    @model_validator(mode="before")
    @classmethod
    def _kind_of_path(cls, fields: Any) -> Any:
        path = fields.get("path") if isinstance(fields, Mapping) else None
        if not isinstance(path, str) or path == "none" or "kind" in fields:
            return fields
        return {**fields, "kind": "sentencepiece" if path.endswith(".model") else "huggingface"}


class DataConfig(Section):
    """Megatron .bin/.idx datasets, blended by weight and cut into sequences."""

    train: tuple[str, ...] = ()
    """Prefixes (paths without the ending) of .bin/.idx pairs to train on."""
    train_weights: tuple[float, ...] = ()
    """Weight of each prefix in the blend; an empty list: proportional to their tokens."""
    valid: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs to evaluate on. If both `valid` and `test` are empty, `split` divides `train`."""
    test: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs for the test loss at the end; if only `test` is empty, there is no test loss."""
    split: tuple[float, float, float] = (98.0, 1.0, 1.0)
    """Shares of the documents of `train` for training, validation and test, if `valid` and `test` are empty."""
    seq_length: PositiveInt = 256
    """Tokens per training sequence."""
    shuffle: Literal["epoch", "whole"] = "epoch"
    """Order of the sequences of each prefix. `epoch`: every epoch has each sequence once, in its own order, which does
    not depend on the number of epochs. `whole`: as in Megatron-LM, all epochs are shuffled together: a sequence may
    repeat before all have been seen, and the number of epochs changes the order from the first step on."""
    cache_dir: Text | Literal["auto"] = "auto"
    """Folder for index caches; `auto`: `<run_dir>/index_cache`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
