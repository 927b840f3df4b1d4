"""The compiled file: when it is built anew, and what is said where it cannot be."""

import re
from pathlib import Path

import pytest

from mcore_rl.backend.cpu import compiled
from mcore_rl.backend.cpu.compiled import BuildError, build_id, library


def test_a_build_is_named_by_all_that_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a changed file would be taken from the cache as it was."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*compiled.SOURCES, *compiled.HEADERS)}
    included = {name for text in texts.values() for name in re.findall(r'#include "(.+)"', text)}
    assert included == {path.name for path in compiled.HEADERS}
    builds = {build_id.__wrapped__()}
    for kind in ("SOURCES", "HEADERS"):
        paths = getattr(compiled, kind)
        changed = tmp_path / paths[-1].name
        changed.write_text(texts[changed.name] + "\n", encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(compiled, kind, (*paths[:-1], changed))
            builds.add(build_id.__wrapped__())
    assert len(builds) == 3


def test_where_there_is_no_compiler_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "get_cxx_compiler", lambda: str(tmp_path / "c++"))
    for cached in (build_id, library):
        with pytest.raises(BuildError, match=r"there is no compiler: .*No such file.*c\+\+"):
            cached.__wrapped__()
    broken = tmp_path / "broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal error: no assembler" >&2; exit 4\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(compiled, "get_cxx_compiler", lambda: str(broken))
    monkeypatch.setattr(compiled, "build_id", lambda: "other")
    with pytest.raises(BuildError, match="ended with 4: fatal error: no assembler"):
        library.__wrapped__()
    assert not list((tmp_path / "mcore_rl").glob("*.so"))
