"""The served engine on a rank of any mesh; apart from its test, so that ranks need not import it."""

from collections.abc import Sequence

from mcore_rl.backend.platform import start
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import EngineError
from mcore_rl.model.build import build_model
from mcore_rl.parallel.mesh import build_mesh, seed_ranks
from mcore_rl.parallel.routers import routed_layers
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.make import make_engine
from mcore_rl.rl.engines.served import ServedEngine
from mcore_rl.rl.types import Completion, Prompt
from tests.generating import prompt_of, spelled


def served_completions(
    config: RlRunConfig, prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[int, tuple[int, ...], list[Completion], str]:
    """This rank's replica, its layers, the completions of its share of the prompts, and the error of a bad prompt that
    the last replica alone has.
    """
    settings = PlatformConfig()
    platform = start(settings)
    mesh = build_mesh(config.mesh)
    seed_ranks(1)
    chunks = build_model(config.model, mesh, platform, settings)
    engine = make_engine(config, chunks, mesh, spelled)
    assert isinstance(engine, ServedEngine)
    engine.update_weights(4)
    replicas = mesh.dp_cp
    own = prompts[replicas.rank :: replicas.size]
    groups = engine.generate(own, sampling, [[7, 8]] * len(own))
    error = ""
    bad = [prompt_of((1, 10_000))] if replicas.rank == replicas.size - 1 else []
    try:
        engine.generate(bad, sampling, [[1]] * len(bad))
    except EngineError as raised:
        error = str(raised)
    engine.close()
    return replicas.rank, routed_layers(chunks), [one for group in groups for one in group.completions], error
