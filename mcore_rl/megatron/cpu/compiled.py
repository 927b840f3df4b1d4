"""The optional C++ library with layers for a CPU, built if there is a compiler and kept in the user's cache.

It is plain C++ without torch's headers, which compiles in a second where an extension of torch takes half a minute, and
is called with addresses: nothing in it depends on torch's version except the product, which torch's library computes.
It computes with a single thread.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import tempfile
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import get_cxx_compiler

from mcore_rl.errors import DataError
from mcore_rl.storage.files import sole_writer, written_atomically

SOURCES = tuple(Path(__file__).with_name(name) for name in ("compiled.cpp", "compiled_attention.cpp"))
HEADERS = (Path(__file__).with_name("compiled_products.h"),)
OPTIONS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    # GCC would compute an exponential's limits apart from it, for all elements: products with e^-87 are denormal, and
    # each costs an Intel processor 150 cycles.
    "-fno-thread-jumps",
)
BUILD_S = 120.0
"""Seconds that a build, or another process's, may take."""
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "rounded_product": (c_void_p, *[c_int64] * 5, *[c_void_p, c_int64] * 3),
    "rms_norm_forward": (c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_void_p),
    "rms_norm_backward": (*[c_void_p] * 4, c_int64, c_int64, *[c_void_p] * 3),
    "split_heads": (*[c_void_p] * 6, *[c_int64] * 5, c_float, *[c_void_p] * 4),
    "join_heads": (*[c_void_p] * 10, *[c_int64] * 5, *[c_void_p] * 4),
    "decode_attention": (*[c_void_p] * 4, *[c_int64] * 7, c_float, c_void_p, c_void_p),
    "attention_forward": (*[c_void_p] * 5, c_int64, c_void_p, c_float, *[c_void_p] * 3),
    "attention_backward": (*[c_void_p] * 8, c_int64, c_void_p, c_float, *[c_void_p] * 4),
    "experts_forward": (c_void_p, c_int64, *[c_void_p] * 6, *[c_int64] * 3, *[c_void_p] * 3),
    "experts_backward": (c_void_p, c_int64, *[c_void_p] * 7, *[c_int64] * 3, *[c_void_p] * 6),
}
"""Types of the arguments of each function; a tensor is its address."""


def _address(tensor: Tensor) -> int:
    # The library would read, and write, beyond a tensor of a smaller type.
    if tensor.dtype not in (torch.float32, torch.int64):
        raise TypeError(
            f"compiled layers compute in fp32, and a tensor is {tensor.dtype}: build the model with "
            'platform.layers="torch"'
        )
    return tensor.data_ptr()


# ctypes asks an argument that it does not know for this attribute. The tensors themselves are the arguments, so that
# those made for a call live until it is over.
Tensor._as_parameter_ = property(_address)  # type: ignore[attr-defined]


class BuildError(Exception):
    """The file cannot be built or loaded on this machine; the message is the reason."""


class Library(ctypes.PyDLL):
    """The functions of the built file. Tensors must be laid out as the C++ file describes; all other arguments are
    numbers.

    Calls keep the interpreter's lock, because releasing it for microseconds costs more.
    """

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(str(path))
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
        for name, types in SIGNATURES.items():
            function = getattr(self, name)
            function.argtypes, function.restype = types, None
        self.sgemm = _address_of_sgemm()
        """Address of the product in fp32 of torch's library."""


@functools.cache
def build_id() -> str:
    """Return the identity of the build: a hash of sources, options, compiler and processor.

    Raises:
        BuildError: If there is no compiler.
    """
    command = [*_compiler(), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"there is no compiler: {error}") from error
    sources = [source.read_text(encoding="utf-8") for source in (*SOURCES, *HEADERS)]
    parts = *sources, " ".join(OPTIONS), done.stdout, _processor()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def library() -> Library:
    """Return the built file. It is built first if no process of this user has done so, and for this process only if
    another user may write to the cache.

    Raises:
        BuildError: If it cannot be built or loaded on this machine.
    """
    try:
        path = library_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_private(path.parent):
            with tempfile.TemporaryDirectory(prefix="mcore_rl_") as folder:
                if not _is_private(Path(folder)):
                    raise BuildError(
                        f"other users may write to {path.parent}, and to {tempfile.gettempdir()} too. Set "
                        "XDG_CACHE_HOME to a folder of your own"
                    )
                _compile(Path(folder, path.name))
                return Library(Path(folder, path.name))
        if not _is_sound(path):
            with sole_writer(path.with_name(f"{path.name}.lock"), wait_s=BUILD_S, remedy="Delete that file"):
                if not _is_sound(path):
                    with written_atomically(path) as scratch:
                        _compile(scratch)
    except (OSError, RuntimeError, DataError) as error:  # RuntimeError: there is no home folder
        raise BuildError(str(error)) from error
    return Library(path)


def library_path() -> Path:
    """Return the path of the built file in the user's cache, whether it exists or not.

    Raises:
        BuildError: If there is no compiler.
        RuntimeError: If the user has no home folder.
    """
    return _cache() / f"layers-{build_id()}.so"


def _compile(target: Path) -> None:
    """Build `target`, with its digest as the last bytes, which the loader does not read."""
    command = [*_compiler(), *OPTIONS, *map(str, SOURCES), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"there is no compiler: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{' '.join(command)} ended with {done.returncode}: {' '.join(lines[:1])}")
    content = target.read_bytes()
    target.write_bytes(content + hashlib.sha256(content).digest())
    target.chmod(0o700)  # whatever the umask is


def _compiler() -> list[str]:
    try:
        return shlex.split(get_cxx_compiler())
    except ValueError as error:
        raise BuildError(f"CXX={get_cxx_compiler()} is no command: {error}") from error


def _is_private(folder: Path) -> bool:
    """Return whether only this user and root may change the content of `folder`, or replace it."""
    folder = folder.resolve()
    # In a parent folder with the sticky bit, such as /tmp, other users may write, but not rename foreign files.
    return _is_own(folder.stat()) and all(
        _is_own(status, writable=bool(status.st_mode & stat.S_ISVTX)) for status in map(Path.stat, folder.parents)
    )


def _is_own(status: os.stat_result, *, writable: bool = False) -> bool:
    """Return whether a file belongs to this user or root and, unless `writable`, only they may write to it."""
    return status.st_uid in (os.geteuid(), 0) and (writable or not status.st_mode & 0o022)


def _is_sound(path: Path) -> bool:
    """Return whether a build in a private folder is whole, and only this user or root may write to it."""
    if not path.is_file() or not _is_own(path.stat()):
        return False
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path must be ignored (XDG Base Directory Specification).
    return (folder if folder.is_absolute() else Path.home() / ".cache") / "mcore_rl"


def _processor() -> str:
    """Return the properties of the processor that the compiler's "native" depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = ("model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


def _address_of_sgemm() -> int:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        address = ctypes.cast(ctypes.CDLL(str(path)).sgemm_, c_void_p).value
    except (OSError, AttributeError) as error:
        raise BuildError(f"torch's library has no product that can be called: {error}") from error
    assert address is not None
    return address
