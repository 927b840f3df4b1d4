"""An engine with the weights of transformers, on any mesh; apart from its tests, so that ranks need not import it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.megatron.platform import start
from mcore_rl.megatron.routers import routed_layers
from mcore_rl.model.build import build_model, copy_in
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.types import Completion, Problem, Prompt
from tests.hf_weights import to_global
from tests.sections import engine_config

Tensors = dict[str, Tensor]


def loaded(model: ModelConfig, tensors: Tensors, mesh: Mesh) -> list[nn.Module]:
    settings = PlatformConfig()
    chunks = build_model(model, mesh, start(settings), settings)
    copy_in(chunks, to_global(tensors, model))
    return chunks


def engine_on(chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig, **sizes: int) -> MegatronEngine:
    config = engine_config(**({"slots": 8} | sizes))
    return MegatronEngine(chunks, mesh, model, spelled, config)


def spelled(tokens: Sequence[int]) -> str:
    """A tokenizer's decode: the ids as words."""
    return "".join(f"{token} " for token in tokens)


def prompt_of(tokens: Sequence[int], name: str = "p") -> Prompt:
    return Prompt(problem=Problem(problem_id=name, prompt="", answer=""), tokens_T=tuple(tokens))


def ragged_prompts(count: int, vocab: int, longest: int = 12) -> list[Prompt]:
    """Prompts of 1 to `longest` random tokens, always the same."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [
        prompt_of(torch.randint(0, vocab, (length,), generator=generator).tolist(), str(place))
        for place, length in enumerate(lengths)
    ]


def completions_on(
    mesh_config: MeshConfig,
    model: ModelConfig,
    tensors: Tensors,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    sizes: dict[str, int],
) -> tuple[list[int], list[list[Completion]]]:
    """On a rank: the places of its layers among all with experts, and for each sampling two completions of each prompt.

    Other replicas than the first have few prompts.
    """
    start(PlatformConfig())
    mesh = build_mesh(mesh_config)
    seed_ranks(1)
    chunks = loaded(model, tensors, mesh)
    engine = engine_on(chunks, mesh, model, **sizes)
    mine = prompts[: len(prompts) >> (2 * mesh.dp_cp.rank)]
    runs = [engine.generate(mine, sampling, [[7, 8]] * len(mine)) for sampling in samplings]
    places = [sum(model.moe_layers[:layer]) for layer in routed_layers(chunks)]
    return places, [[completion for group in groups for completion in group.completions] for groups in runs]
