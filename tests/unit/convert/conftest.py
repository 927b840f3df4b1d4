"""Conversions that several tests begin with."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conversion import imported, saved

Converted = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A function from a case to its folder and its import, which are written once: tests must not change them."""

    @cache
    def imported_case(case: str, **changes: Any) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(case)
        source = saved(case, folder / "hf", **changes)
        return source, imported(source, folder / "ckpt")

    return imported_case
