"""The compiled file: when it is built anew, and what is said where it cannot be."""

import hashlib
import os
import re
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from mcore_rl.megatron import compiled
from mcore_rl.megatron.compiled import BuildError, build_id, library, library_path


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


def test_where_there_is_no_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "get_cxx_compiler", lambda: str(tmp_path / "c++"))
    for cached in (build_id, library):
        with pytest.raises(BuildError, match=r"there is no compiler: .*No such file.*c\+\+"):
            cached.__wrapped__()
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal error: no assembler" >&2; exit 4\n')
    broken.chmod(0o755)
    monkeypatch.setattr(compiled, "get_cxx_compiler", lambda: str(broken))
    monkeypatch.setattr(compiled, "build_id", lambda: "other")
    with pytest.raises(BuildError, match="ended with 4: fatal error: no assembler"):
        library.__wrapped__()
    assert not list((tmp_path / "mcore_rl").glob("*.so"))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of builds of this test, which is there and this user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "mcore_rl"
    folder.mkdir(parents=True, mode=0o700)
    return folder


@pytest.mark.full
def test_no_file_is_loaded_from_a_folder_that_others_may_write(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is a command of two words, as `ccache g++`."""
    monkeypatch.setattr(compiled, "get_cxx_compiler", lambda: "env c++")
    monkeypatch.setattr(compiled, "build_id", lambda: "planted")
    planted, ran = library_path(), tmp_path / "ran"
    source = f'#include <stdio.h>\n__attribute__((constructor)) void run() {{ fclose(fopen("{ran}", "w")); }}'
    command = ["cc", "-x", "c", "-shared", "-fPIC", "-o", str(planted), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    planted.write_bytes(planted.read_bytes() + hashlib.sha256(planted.read_bytes()).digest())
    before = planted.read_bytes()
    cache.chmod(0o777)
    assert library.__wrapped__().rms_norm_forward is not None
    assert not ran.exists()
    assert planted.read_bytes() == before and [*cache.iterdir()] == [planted]


def test_where_others_may_write_to_all_folders_nothing_is_built(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    for folder in (cache, shared):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    with pytest.raises(BuildError, match=rf"other users may write to {cache}, and to {shared} too. Set XDG"):
        library.__wrapped__()
    assert not [*cache.iterdir(), *shared.iterdir()]


@pytest.mark.full
def test_a_build_that_is_empty_or_cut_is_built_again(cache: Path) -> None:
    path = library_path()
    path.touch(mode=0o700)
    assert library.__wrapped__().rms_norm_forward is not None
    whole = path.read_bytes()
    assert hashlib.sha256(whole[:-32]).digest() == whole[-32:]
    path.unlink()  # the library that is loaded has its pages in this file
    path.write_bytes(whole[: len(whole) // 2])
    assert library.__wrapped__().rms_norm_forward is not None
    assert len(path.read_bytes()) == len(whole) and stat.S_IMODE(path.stat().st_mode) == 0o700
    inode = path.stat().st_ino
    library.__wrapped__()
    assert path.stat().st_ino == inode
    path.chmod(0o707)
    assert not compiled._is_sound(path)


@pytest.mark.parametrize(
    ("uid", "mode", "is_own"),
    [
        (os.geteuid(), 0o700, True),
        (0, 0o755, True),
        (os.geteuid() + 1, 0o700, False),
        (os.geteuid(), 0o720, False),
        (0, 0o702, False),
    ],
)
def test_a_file_is_trusted_by_its_owner_and_mode(uid: int, mode: int, is_own: bool) -> None:
    assert compiled._is_own(os.stat_result((stat.S_IFREG | mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))) == is_own


@pytest.mark.parametrize(
    ("above", "mode", "is_private"),
    [
        (0o755, 0o700, True),
        (0o1777, 0o755, True),  # as /tmp
        (0o777, 0o700, False),  # another folder may be put in its place
        (0o700, 0o770, False),
        (0o700, 0o1777, False),
    ],
)
def test_a_folder_is_private_if_no_other_user_may_write_to_it_or_move_it(
    tmp_path: Path, above: int, mode: int, is_private: bool
) -> None:
    folder = tmp_path / "above/folder"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    folder.parent.chmod(above)
    (tmp_path / "link").symlink_to(folder)
    assert compiled._is_private(folder) == compiled._is_private(tmp_path / "link") == is_private


def test_a_cache_folder_that_is_no_whole_path_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("cache", "./cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert library_path().parent == tmp_path / ".cache/mcore_rl"


def test_a_compiler_that_is_no_command_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "get_cxx_compiler", lambda: "'g++")
    with pytest.raises(BuildError, match="CXX='g\\+\\+ is no command: No closing quotation"):
        build_id.__wrapped__()
