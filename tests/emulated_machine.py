"""A machine with other hardware and packages than this one, as far as Python can see it.

    python -m tests.emulated_machine --cuda --te module:function    prints what the function returns, as JSON

Emulated are answers, not devices. `--cuda` is tests/emulated_gpu.py. `--te` and `--apex` make packages of these names
importable whose every attribute is an empty class: enough for Megatron to find them, not to compute; only the Adam
and the multi-tensor functions compute, by torch. `--broken-te` is a TransformerEngine whose import fails, as one does
that was built for another torch; `--other-apex` is the package of that name that has nothing to do with NVIDIA's.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

TE = ("transformer_engine", "transformer_engine_torch")
APEX = ("apex", "amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda")


def emulated(machine: str, function: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a function, of tests/emulated_runs.py unless it names another, on a machine that has what its name lists."""
    target = function if ":" in function else f"tests.emulated_runs:{function}"
    options = [f"--{part}" for part in machine.split("+") if part != "none"]
    command = [sys.executable, "-m", "tests.emulated_machine", *options, target, *arguments]
    repository = Path(__file__).parents[1]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600, check=False)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("cuda", "te", "apex", "broken-te", "other-apex"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("function")
    parser.add_argument("arguments", nargs="*")
    args = parser.parse_args(argv)
    empty = (*(TE if args.te else ()), *(APEX if args.apex else ()))
    broken = (*(TE[:1] if args.broken_te else ()), *(("apex.optimizers",) if args.other_apex else ()))
    sys.meta_path.insert(0, EmulatedPackages((*empty, *(name.partition(".")[0] for name in broken)), broken))
    if args.cuda:
        # Not in the tests that start this: it takes a second to import torch's compiler.
        from tests import emulated_gpu, emulated_varlen

        emulated_varlen.install(emulated_gpu.install())
    module, _, function = args.function.partition(":")
    result = getattr(importlib.import_module(module), function)(*args.arguments)
    sys.stdout.write(f"{json.dumps(result)}\n")


class AnyAttribute(type):
    """Makes classes that have every attribute: empty classes again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        made = AnyAttribute(name, (torch.nn.Module,), {})
        setattr(cls, name, made)
        return made


class EmptyModule(ModuleType):
    """A module that has every attribute, each an empty class, and any submodule."""

    __path__: ClassVar[list[str]] = []
    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = COMPUTING[name]() if name in COMPUTING else AnyAttribute(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class EmulatedPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module under `roots`; those named in `broken` fail while they are imported."""

    def __init__(self, roots: Sequence[str], broken: Sequence[str]) -> None:
        self._roots, self._broken = roots, broken

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self._broken:
            raise ImportError(f"{module.__name__}: undefined symbol: _ZN3c104cuda9SetDeviceEab")


def _fused_adam() -> Any:
    from mcore_rl.megatron.patches.standins import FusedAdam

    class ApexAdam(FusedAdam):
        """The interface of apex's, which Megatron calls with further options."""

        def __init__(self, params: Any, set_grad_none: bool = False, **options: Any) -> None:
            super().__init__(params, **options)

    return ApexAdam


def _l2norm(_: int, __: Any, lists: Sequence[list[torch.Tensor]], ___: bool = False) -> Any:
    norms = torch.stack(torch._foreach_norm(list(lists[0])))
    return torch.linalg.vector_norm(norms).view(1), None


def _scale(_: int, __: Any, lists: Sequence[list[torch.Tensor]], factor: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


COMPUTING: dict[str, Any] = {
    "FusedAdam": _fused_adam,
    "multi_tensor_applier": lambda: lambda op, flag, lists, *rest: op(0, flag, lists, *rest),
    "multi_tensor_l2norm": lambda: _l2norm,
    "multi_tensor_scale": lambda: _scale,
}
"""Attributes of packages that compute, by what makes them."""

if __name__ == "__main__":
    main(sys.argv[1:])
