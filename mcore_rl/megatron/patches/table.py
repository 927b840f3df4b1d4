"""Every patch of torch and Megatron-Core, by table.toml: symbol, cause, versions, reason and end.

Importing this module applies the patches that this machine needs, once, and must come before any `import megatron`. A
version that is not in the table is refused.
"""

import importlib
import logging
import os
import pkgutil
import tomllib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_rl.errors import ConfigError
from mcore_rl.megatron.patches.gpu_packages import GpuPackages, find_packages
from mcore_rl.storage.checkpoint import megatron_version

SUPPORTED = ("0.16", "0.19")
Cause = Literal["no CUDA", "no TransformerEngine", "no TransformerEngine or apex", "version"]
"""Why a patch is applied on this machine: torch sees no GPU, TransformerEngine is not usable
(`gpu_packages.GpuPackages`), neither it nor apex is, or always, because the installed version of Megatron or torch is
the cause.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A row of table.toml for one of its symbols: something else takes the place of `module:attribute`."""

    symbol: str
    wrap: str = ""
    """`module:function` in this folder that makes the replacement of the original; empty if there is none."""
    put: str | bool | None = None
    """The replacement: a string names ours, `module:name` in this folder."""
    answer: bool | int | None = None
    """Value that a function in the place of the symbol always returns."""
    cause: Cause = "no CUDA"
    reason: str = "Megatron asks torch.cuda whatever the device"
    until: str = "Megatron asks its config for the device"
    versions: list[str] = field(default_factory=lambda: list(SUPPORTED))
    is_defined: bool = True
    """Whether the symbol exists before the patch; False if its absence is the cause."""

    @property
    def is_of_torch(self) -> bool:
        """Whether it must be in place before Megatron is imported, which copies some of torch's functions."""
        return self.symbol.startswith("torch")

    def apply(self) -> None:
        """Put the replacement in place; AttributeError if the symbol does not exist any more."""
        module_name, _, path = self.symbol.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, self._replacement(getattr(owner, name) if self.is_defined else None))

    def _replacement(self, original: Any) -> Any:
        if self.wrap:
            return pkgutil.resolve_name(f"{__package__}.{self.wrap}")(original)
        if self.answer is not None:
            return lambda *_args, **_kwargs: self.answer
        return pkgutil.resolve_name(f"{__package__}.{self.put}") if isinstance(self.put, str) else self.put


PATCHES = tuple(
    Patch(symbol=symbol, **row)
    for row in tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))["patches"]
    for symbol in row.pop("symbols")
)


def patches_for(version: str, *, has_cuda: bool, has_te: bool, has_apex: bool) -> list[Patch]:
    """Return a machine's patches for Megatron-Core "major.minor", in order; ConfigError for an unknown version."""
    if version not in SUPPORTED:
        raise ConfigError(
            f"megatron-core {version} is installed; this code knows {' and '.join(SUPPORTED)}, whose inner "
            "parts differ. Install one of these."
        )
    causes: dict[Cause, bool] = {
        "no CUDA": not has_cuda,
        "no TransformerEngine": not has_te,
        "no TransformerEngine or apex": not (has_te or has_apex),
        "version": True,
    }
    return [patch for patch in PATCHES if causes[patch.cause] and version in patch.versions]


HARMLESS_WARNINGS = (
    # Message (the beginning, as a regular expression): what Megatron does with torch, or cannot have on a CPU.
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"full scope is deprecated",
    r"When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX",
    r"Apex is not installed",
    r"Transformer Engine and Apex are not installed",
)


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """Replacement for `torch.compile`, as a function and as a decorator with arguments."""
    return model if model is not None else lambda inner: inner


def _install() -> tuple[GpuPackages, tuple[Patch, ...]]:
    if torch.version.cuda:
        # Megatron counts on communication being queued before the computation that hides it. CUDA reads this when it
        # starts, which the first package that asks a GPU for something makes it do.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = find_packages()
    patches = patches_for(megatron_version(), has_cuda=found.has_cuda, has_te=found.has_te, has_apex=found.has_apex)
    # `with torch.device(...)` knows the factories by identity, from the first time it is asked: it must know torch's.
    importlib.import_module("torch.utils._device")._device_constructors()
    for patch in patches:
        if patch.is_of_torch:
            patch.apply()
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    compile_ = torch.compile
    if not found.has_cuda:
        # Megatron's jit_fuser is torch.compile as it is during the import; on a CPU compiling costs more than it saves.
        torch.compile = _uncompiled
    importlib.import_module("megatron.core")
    importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    torch.compile = compile_
    for patch in patches:
        if not patch.is_of_torch:
            patch.apply()
    # On a CPU the CPU's generator is also the "device"'s: the warning would come at every fork.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # 0.16 asks for the class of an MoE layer by name, and warns of ours, which it then builds like its own.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    # 0.19 recommends its hybrid model at every GPTModel, and a layout that it computes by itself at every optimizer.
    for name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    # 0.19 calls its own way to write, and the common.pt that 0.16 can read too, deprecated at every save and load.
    for name in ("torch", "common"):
        logging.getLogger(f"megatron.core.dist_checkpointing.strategies.{name}").setLevel(logging.ERROR)
    return found, tuple(patches)


FOUND, INSTALLED = _install()
"""The packages found when this module was imported, and the patches that are in place for them, in order."""
