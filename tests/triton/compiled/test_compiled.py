"""Every kernel compiles for Hopper and Blackwell: without a GPU, by the compiler of Triton and NVIDIA's assembler."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mcore_rl.backend.gpu import experts, logprobs, routing
from mcore_rl.backend.gpu.kernels import Tile

ARCHITECTURES = (90, 100)
MOST_REGISTERS = 255
"""Registers that a thread may have."""
MOST_SHARED_BYTES = 227 * 1024
"""Shared memory that a block may have on either architecture."""
TENSOR_CORES = {90: "wgmma", 100: "tcgen05.mma"}
"""Beginning of the instruction that multiplies 16-bit operands."""
ELEMENTS = {2: "bf16", 4: "fp32"}
POINTERS = {"rows": "i64", "targets": "i64", "found": "fp32", "log_partitions": "fp32", "entropies": "fp32"}
POINTERS |= {"grad_logprobs": "fp32", "grad_entropies": "fp32"}
POINTERS |= dict.fromkeys(("scores", "values", "logits", "gates", "grad_gates", "grad_logits"), "fp32")
POINTERS |= {"experts": "i64", "routed": "u8"}
POINTERS |= {"ends": "i32"}
OF_LOGPROBS = ("hidden", "weight", "grads")
OF_EXPERTS = ("rows", "weight", "gates", "hidden", "active", "output", "grads", "grad_hidden")
FACTORS = ("inverse_temperature", "scaling")
MULTIPLES_OF_16 = (
    "width",
    "hidden_stride",
    "weight_stride",
    "num_experts",
    "inner",
    "columns",
    "num_out",
    "num_in",
)
"""Numbers of which Triton is told at run time that they are multiples of 16, as hidden sizes are."""


@dataclass(frozen=True)
class Case:
    """A kernel with the types and constants of one of its launches."""

    name: str
    kernel: Any
    operands: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    pointers: tuple[str, ...] = ()
    """Arguments that are tensors of the operands' format; others are in POINTERS."""
    has_product: bool = True

    def source(self) -> ASTSource:
        signature, attributes = {}, {}
        for index, argument in enumerate(self.kernel.arg_names):
            if argument in self.constants:
                signature[argument] = "constexpr"
                continue
            if argument in self.pointers or argument in POINTERS:
                signature[argument] = f"*{self.operands if argument in self.pointers else POINTERS[argument]}"
            else:
                signature[argument] = "fp32" if argument in FACTORS else "i32"
            if signature[argument].startswith("*") or argument in MULTIPLES_OF_16:
                attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, self.constants, attributes)


def cases() -> Iterator[Case]:
    for num_bytes, tile in logprobs.TILES.items():
        blocks = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
        name = ELEMENTS[num_bytes]
        for has_entropy in (True, False):
            constants = {"has_entropy": has_entropy, "per_program": logprobs.COLUMNS_PER_PROGRAM} | blocks
            yield Case(
                f"sums-{name}-{has_entropy}", logprobs._sums_kernel, name, constants, *tile[3:], OF_LOGPROBS
            )
            of = {"of_logprobs": True, "of_entropy": has_entropy}
            yield Case(
                f"gradient-{name}-{has_entropy}",
                logprobs._gradient_kernel,
                name,
                of | blocks,
                *tile[3:],
                OF_LOGPROBS,
            )
    for num_bytes, name in ELEMENTS.items():
        yield from cases_of_experts(name, experts.TILES[num_bytes], experts.PRODUCT_TILES[num_bytes])
    for num_experts in (128, 384):
        rows, padded = routing._block(num_experts)
        blocks = {"top_k": 8, "ROWS": rows, "EXPERTS": padded}
        yield Case(f"top-{num_experts}", routing._top_kernel, "fp32", blocks, routing.NUM_WARPS)
        for score in (routing.TOP, routing.WHOLE, routing.SIGMOID):
            for kernel in (routing._gates_kernel, routing._gates_backward_kernel):
                name = f"{kernel.__name__}-{num_experts}-{score}"
                yield Case(name, kernel, "fp32", blocks | {"score": score}, routing.NUM_WARPS)


def cases_of_experts(name: str, tile: Tile, of_products: Tile) -> Iterator[Case]:
    """Yield the kernels of 128 experts with operands of this format."""
    blocks = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "EXPERTS": 128}
    launch = tile.num_warps, tile.num_stages, OF_EXPERTS
    for keeps in (True, False):
        constants = {"keeps_hidden": keeps} | blocks
        yield Case(f"swiglu-{name}-{keeps}", experts._swiglu_kernel, name, constants, *launch)
    block = {"ROWS": experts.GRADIENT_ROWS, "COLUMNS": experts.GRADIENT_COLUMNS}
    kernel = experts._activation_gradient_kernel
    yield Case(f"activation-{name}", kernel, name, block, 4, 3, OF_EXPERTS, has_product=False)
    blocks |= {"ROWS": of_products.rows, "COLUMNS": of_products.columns, "DEPTH": of_products.depth}
    launch = of_products.num_warps, of_products.num_stages, OF_EXPERTS
    for is_transposed in (True, False):
        constants = {"is_transposed": is_transposed} | blocks
        yield Case(f"product-{name}-{is_transposed}", experts._product_kernel, name, constants, *launch)
    del blocks["EXPERTS"]
    for adds in (True, False):
        # What is added to is float32, what is written has the weight's format.
        launch = of_products.num_warps, of_products.num_stages, OF_EXPERTS + (() if adds else ("found",))
        constants = {"adds": adds} | blocks
        yield Case(f"weight-{name}-{adds}", experts._weight_gradient_kernel, name, constants, *launch)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_a_kernel_fits_a_gpu_without_spills(case: Case, architecture: int, tmp_path: Any) -> None:
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(case.source(), GPUTarget("cuda", architecture, 32), options)
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    command = [cuobjdump, "--dump-resource-usage", tmp_path / "kernel.cubin"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    # A register that is spilled lies in the stack.
    assert (found["STACK"], found["LOCAL"]) == ("0", "0"), usage
    assert 16 <= int(found["REG"]) <= MOST_REGISTERS
    assert compiled.metadata.shared <= MOST_SHARED_BYTES
    uses_tensor_cores = case.operands == "bf16" and case.has_product
    assert (TENSOR_CORES[architecture] in compiled.asm["ptx"]) == uses_tensor_cores
