import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.layers.cpu.experts import CompiledRMSNorm, CompiledZeroCenteredRMSNorm
from mcore_rl.model.layers.cpu.self_attention import CpuSpecProvider
from mcore_rl.model.layers.linear import RMSNorm, ZeroCenteredRMSNorm
from mcore_rl.model.spec import TorchSpecProvider
from tests.unit.model.layers.oracles import assert_close, gradients, small_config

SHAPES = [(7, 2, 32), (5, 3, 4, 8), (0, 2, 32), (700, 2, 33), (1, 1, 7)]
BOTH = pytest.mark.parametrize("kind", [RMSNorm, CompiledRMSNorm])


def closed_form(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = input.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def norm(kind: type[RMSNorm], size: int, eps: float = 1e-3, **changes: bool) -> RMSNorm:
    layer = kind(small_config(**changes), size, eps)
    with torch.no_grad():
        layer.weight.add_(torch.randn(size))
    return layer


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BOTH
def test_output_and_gradients_are_those_of_the_closed_form(
    one_rank: Mesh, kind: type[RMSNorm], shape: tuple[int, ...], is_dense: bool
) -> None:
    layer, input = norm(kind, shape[-1]), torch.randn(shape, requires_grad=True)
    rows = input if is_dense else input.transpose(0, 1)
    expected = closed_form(rows, layer.weight, 1e-3)
    actual = layer(rows)
    wanted = [input, layer.weight]
    for ours, theirs in zip(gradients(actual, wanted), gradients(expected, wanted), strict=True):
        # The gradient of a weight sums over all rows.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, len(input) / 50))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_in_bf16_it_is_transformers_norm_up_to_one_rounding(one_rank: Mesh) -> None:
    layer = RMSNorm(small_config(params_dtype=torch.bfloat16), 32, 1e-6)
    theirs = Qwen3MoeRMSNorm(32, 1e-6).bfloat16()
    with torch.no_grad():
        layer.weight.add_(torch.randn(32))
        theirs.weight.copy_(layer.weight)
    input = torch.randn(64, 32).bfloat16()
    # They round before and after the weight, we once: 2 ** -8 is the distance of neighbours at the smallest mantissa.
    assert layer(input).dtype == torch.bfloat16
    torch.testing.assert_close(layer(input), theirs(input), rtol=2**-7, atol=0.0)
    assert_close(layer(input), closed_form(input, layer.weight, 1e-6), 2**-8)


@pytest.mark.parametrize(
    ("provider", "kind"), [(TorchSpecProvider, ZeroCenteredRMSNorm), (CpuSpecProvider, CompiledZeroCenteredRMSNorm)]
)
def test_gamma_centered_at_zero_is_one_plus_the_parameter(
    one_rank: Mesh, provider: type[TorchSpecProvider], kind: type[RMSNorm]
) -> None:
    config = small_config(layernorm_zero_centered_gamma=True)
    assert provider(config).layer_norm() is kind
    assert torch.equal(kind(config, 4).weight, torch.zeros(4))
    input, centered = torch.randn(3, 32), norm(kind, 32)
    assert_close(centered(input), closed_form(input, 1 + centered.weight, 1e-3), 1e-5)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_the_weight_says_whether_its_gradient_is_partial(one_rank: Mesh, is_parallel: bool) -> None:
    config = small_config(sequence_parallel=is_parallel, tensor_model_parallel_size=2)
    assert RMSNorm(config, 8).weight.sequence_parallel is is_parallel
