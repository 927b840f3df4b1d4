"""The optional C++ library with layers for a CPU, built if there is a compiler and kept in the user's cache; attention
and rounded products by it. `model/layers/cpu` makes layers of it.

It is plain C++ without torch's headers, compiles in a second, and computes with a single thread.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import tempfile
from ctypes import Array, c_float, c_int64, c_void_p
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
    """The functions of the built file. Tensors must be laid out as the C++ file describes.

    Calls keep the interpreter's lock: releasing it for microseconds costs more.
    """

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(str(path))
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
        for name, types in SIGNATURES.items():
            function = getattr(self, name)
            function.argtypes, function.restype = types, None
        torchs = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        try:
            address = ctypes.cast(ctypes.CDLL(str(torchs)).sgemm_, c_void_p).value
        except (OSError, AttributeError) as error:
            raise BuildError(f"torch's library has no product that can be called: {error}") from error
        assert address is not None
        self.sgemm = address
        """Address of the product in fp32 of torch's library."""


@functools.cache
def build_id() -> str:
    """Return a hash of sources, options, compiler and processor. Raises BuildError if there is no compiler."""
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
    """Return the built file, built first if no process of this user has done so, and for this process only if another
    user may write to the cache. Raises BuildError if it cannot be built or loaded here.
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
    """Return the path of the built file in the user's cache, whether it exists or not. Raises BuildError without a
    compiler, RuntimeError if the user has no home folder.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # a relative path must be ignored (XDG Base Directory Specification)
        caches = Path.home() / ".cache"
    return caches / "mcore_rl" / f"layers-{build_id()}.so"


def _compile(target: Path) -> None:
    # Its digest is the last bytes, which the loader does not read.
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
    """Return whether a file is this user's or root's and, unless `writable`, only they may write to it."""
    return status.st_uid in (os.geteuid(), 0) and (writable or not status.st_mode & 0o022)


def _is_sound(path: Path) -> bool:
    if not path.is_file() or not _is_own(path.stat()):
        return False
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _processor() -> str:
    # The compiler's "native" depends on these.
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = ("model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


BoundArrays = tuple["Array[c_int64]", "Array[c_int64]"]
"""Bounds of each sequence in the queries, and in the keys."""
LANES, KEYS, ROWS, WIDTH = 48, 64, 8, 16
"""Maximum of each that the file uses, for the size of its scratch memory."""


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: tuple[int, ...] | None = None
) -> Tensor:
    """Return the output `[s, B, N, Dv]` of queries `[s, B, N, D]`, keys `[S, B, G, D]` and values `[S, B, G, Dv]`.

    Query i is at position S - s + i and attends to the keys up to there; its result depends on no others, bit for bit.
    Strides are free but along D, and G divides N. `lengths` are those of packed sequences; they add up to s, which is
    S. The backward pass computes the weights again from log-sum-exps.
    """
    if lengths is None:
        bounds = _numbers(0, query.shape[0]), _numbers(0, key.shape[0])
    else:
        assert sum(lengths) == query.shape[0] == key.shape[0]
        bounds = (_numbers(0, *accumulate(lengths)),) * 2
    operands = query, key, value
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
        mixed: Tensor = _CausalAttention.apply(*operands, scale, bounds)  # type: ignore[no-untyped-call]
        return mixed
    query, key, value = _dense(*operands)
    return _attended(query, key, value, scale, bounds)[0]


def _attended(query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: BoundArrays) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp `[B, N, s]` of each query's scores."""
    length, batch, heads, width = query.shape
    output, lse = query.new_empty(length, batch, heads, value.shape[3]), query.new_empty(batch, heads, length)
    width, value_width = (-(-w // WIDTH) * WIDTH for w in (width, value.shape[3]))
    rows = _longest(bounds[1]) + ROWS + LANES
    scratch = query.new_empty(rows * (width + value_width) + LANES * (KEYS + 3))
    sequences = len(bounds[0]) - 1, _sizes(query, key, value, output)
    library().attention_forward(query, key, value, *bounds, *sequences, scale, output, lse, scratch)
    return output, lse


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: BoundArrays) -> Tensor:
        ctx.scale, ctx.bounds = scale, bounds
        query, key, value = _dense(query, key, value)
        output, lse = _attended(query, key, value, scale, bounds)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, lse = ctx.saved_tensors
        (gradient,) = _dense(gradient)
        d_query, d_key, d_value = (operand.new_empty(operand.shape) for operand in (query, key, value))
        width, value_width = (-(-w // WIDTH) * WIDTH for w in (query.shape[3], value.shape[3]))
        rows = _longest(ctx.bounds[1]) + ROWS + LANES
        scratch = query.new_empty((2 * rows + LANES) * (width + value_width) + LANES * (2 * KEYS + 3))
        operands = gradient, query, key, value, output, lse
        sequences = len(ctx.bounds[0]) - 1, _sizes(query, key, value, gradient)
        results = d_query, d_key, d_value, scratch
        library().attention_backward(*operands, *ctx.bounds, *sequences, ctx.scale, *results)
        return d_query, d_key, d_value, None, None


def _dense(*operands: Tensor) -> tuple[Tensor, ...]:
    # The file reads any strides but of the last axis.
    return tuple(tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in operands)


def _sizes(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> "Array[c_int64]":
    strides = [stride for tensor in (query, key, value, gradient) for stride in tensor.stride()[:3]]
    return _numbers(*query.shape[1:3], key.shape[2], query.shape[3], value.shape[3], *strides)


def _longest(bounds: "Array[c_int64]") -> int:
    return max((end - begin for begin, end in pairwise(bounds)), default=0)


def _numbers(*numbers: int) -> "Array[c_int64]":
    return (c_int64 * len(numbers))(*numbers)


def rounded_product(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return `left_MK @ right_NK.T`, fp32, of operands rounded to bf16. No gradient is recorded.

    AMX is four times as fast as fp32, AVX-512's instruction for bf16 twice on AMD; other processors save nothing.
    """
    product_MN = left_MK.new_empty(len(left_MK), len(right_NK))
    left, is_left_by_column, left_stride = _stored(left_MK)
    right, is_right_by_column, right_stride = _stored(right_NK)
    # The C++ file calls the right operand transposed where it is stored by rows of the left operand's width.
    sizes = is_left_by_column, not is_right_by_column, *product_MN.shape, left_MK.shape[1]
    compiled = library()
    compiled.rounded_product(
        compiled.sgemm, *sizes, left, left_stride, right, right_stride, product_MN, product_MN.stride(0)
    )
    return product_MN


def rounded_linear(input: Tensor, weight_OI: Tensor) -> Tensor:
    """Return `input @ weight_OI.T` over the last axis, fp32; its three products round their operands."""
    rows_NI = input.reshape(-1, weight_OI.shape[1])
    rows_NO: Tensor = _RoundedLinear.apply(rows_NI, weight_OI)  # type: ignore[no-untyped-call]
    # Viewed out here, so that the caller may change the output in place.
    return rows_NO.view(*input.shape[:-1], weight_OI.shape[0])


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NI, weight_OI)
        return rounded_product(rows_NI, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows_NI, weight_OI = ctx.saved_tensors
        d_rows = rounded_product(gradient_NO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        d_weight = rounded_product(gradient_NO.t(), rows_NI.t()) if ctx.needs_input_grad[1] else None
        return d_rows, d_weight


def _stored(matrix: Tensor) -> tuple[Tensor, bool, int]:
    """Return a matrix with contiguous rows or else columns, whether it is columns, and their distance."""
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:
        return matrix, True, matrix.stride(1)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    return matrix, False, matrix.stride(0)
