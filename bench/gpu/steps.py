"""One step of `python -m bench.gpu` in this process; it raises where something is wrong.

python -m bench.gpu.steps training --device cpu
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu import equal, measured
from bench.gpu.device import Machine, NotRunError
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import build_mesh, seed_ranks

ALL: dict[str, Callable[[Machine], str]] = {
    "machine": measured.machine,
    "training": equal.training,
    "reference": equal.reference,
    "families": equal.families,
    "kernels": equal.kernels,
    "memory": measured.memory,
    "slice": measured.slice,
    "rl": measured.rl,
    "servers": measured.servers,
    "slots": measured.slots,
    "conversion": equal.conversion,
    "extras": equal.extras,
    "ranks": equal.ranks,
}
"""The function of each step, which returns a line; `STEPS` of __main__ has their order and times. `reference` is a part
of `training`."""
NEEDS_MESH = {"families", "rl", "servers", "slots", "conversion"}


def main() -> None:
    """Run one step and print its result in a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=[*ALL, "rank"])
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--meshes", nargs="+")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    os.environ.setdefault("RANK", "0")  # one rank, unless a launcher says otherwise
    os.environ.setdefault("WORLD_SIZE", "1")
    if args.step == "rank":
        equal.rank(args.meshes, args.folder)
        return
    is_gpu = args.device == "cuda"
    if is_gpu != torch.cuda.is_available():
        raise SystemExit(f"--device {args.device}, but torch sees {'no' if is_gpu else 'a'} GPU")
    mesh: Any = None
    if args.step in NEEDS_MESH:
        platform.start(PlatformConfig(layers="torch"))
        mesh = build_mesh(MeshConfig())
        seed_ranks(1)
    on = Machine(is_gpu=is_gpu, mesh=mesh, is_large=is_gpu)
    try:
        on.print_result(ALL[args.step](on))
    except NotRunError as reason:
        on.print_result(str(reason), is_not_run=True)
    platform.stop()
    if on.wrong:
        raise SystemExit("; ".join(on.wrong))


if __name__ == "__main__":
    main()
