"""The rollout engine that a config names."""

from collections.abc import Callable, Sequence

from torch import nn

from mcore_rl.config.extension import choose
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.engines.base import Engine
from mcore_rl.rl.engines.native.engine import MegatronEngine

Decode = Callable[[Sequence[int]], str]


def native_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> Engine:
    """Engine on the modules `chunks` that train; its completions carry the routes of this pipeline stage's layers,
    which are the ones that this rank trains.
    """
    return MegatronEngine(chunks, mesh, config.model, decode, config.rl.engine, gathers_routes=False)


ENGINES: dict[str, Callable[[RlRunConfig, Sequence[nn.Module], Mesh, Decode], Engine]] = {
    "native": native_engine
}


def make_engine(config: RlRunConfig, chunks: Sequence[nn.Module], mesh: Mesh, decode: Decode) -> Engine:
    """Collective over the world: make the engine of `rl.engine.kind`; `decode` turns token ids into text."""
    return choose("rl.engine.kind", config.rl.engine.kind, ENGINES)(config, chunks, mesh, decode)
