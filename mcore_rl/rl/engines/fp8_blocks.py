"""Weights in fp8 blocks (rl.engine.weights = "fp8_block"): how they are sent, and how the probe computes with them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import target_of
from mcore_rl.convert.hf.quantization import BAND_FP8_BLOCKS, FP8_SCALE, fp8_rounded, fp8_scales, quantize_fp8
from mcore_rl.families import weight_map
from mcore_rl.families.weight_map import FP8_BLOCK, LINEAR
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.build import unwrap
from mcore_rl.model.hf_stream import LAYERS, Bucket, WeightStream, bucket_of, hf_views


class Fp8Stream(WeightStream):
    """A stream with the matrices of linear layers in fp8 blocks, as `convert export --quantize fp8` writes them."""

    def __iter__(self) -> Iterator[Bucket]:
        """Collective over the world: yield the buckets, as `WeightStream` does."""
        quantized = partial(quantize_fp8, known=None, block=FP8_BLOCK, scale_dtype=torch.float32, in_powers=False)
        for bucket in super().__iter__():
            for name in [name for name in bucket.tensors if name.endswith(LINEAR)]:
                # In bands: the fp32 copies of a whole matrix would take eight times its bytes.
                bands = bucket.tensors[name].split(BAND_FP8_BLOCKS * FP8_BLOCK)
                numbers, scales = zip(*map(quantized, bands), strict=True)
                # As bytes: torch does not join numbers of 8 bits everywhere.
                joined = torch.cat([band.view(torch.uint8) for band in numbers])
                bucket.tensors.update({name: joined.view(torch.float8_e4m3fn), name + FP8_SCALE: torch.cat(scales)})
            yield bucket


class BlockRounding:
    """Lets a model compute with what fp8 blocks represent of its weights; ranks may have parts of a block."""

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig) -> None:
        """Take this rank's chunks, and plan which blocks its weights are in."""
        self._chunks, self._mesh, self._views = list(chunks), mesh, hf_views(chunks, model, LINEAR)
        shapes = weight_map(model).hf_shapes
        self._blocks = {n: tuple(-(-size // FP8_BLOCK) for size in shapes[n]) for n in shapes if n.endswith(LINEAR)}

    @contextmanager
    @torch.no_grad()
    def weights(self) -> Iterator[None]:
        """Collective over the world: context in which each layer's weights are rounded before it computes. They are put
        back bit for bit when the next layer computes, or at the end; until then their copy is on the device.
        """
        counts = [rows * columns for rows, columns in self._blocks.values()]
        flat = torch.zeros(sum(counts), device=next(self._chunks[0].parameters()).device)
        of_names = zip(self._blocks.items(), flat.split(counts), strict=True)
        scales = {name: part.view(shape) for (name, shape), part in of_names}
        layers = defaultdict[str, list[Any]](list)
        kept: list[tuple[Tensor, Tensor]] = []
        for name, where, view in self._views():
            rows, columns = (torch.arange(*axis, device=flat.device) // FP8_BLOCK for axis in where)
            before = [axis.start % FP8_BLOCK for axis in where]  # zeros in the place of other ranks' part of a block
            padded = pad(view.abs().float(), (before[1], 0, before[0], 0))
            found = max_pool2d(padded[None], FP8_BLOCK, ceil_mode=True)[0]
            own = scales[name][rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            torch.maximum(own, found, out=own)
            layers[bucket_of(name)].append((view, scales[name], rows, columns))
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=self._mesh.world.group)
        flat.copy_(fp8_scales(flat))

        def put_back() -> None:
            while kept:
                view, own = kept.pop()
                view.copy_(own)

        def round_layer(bucket: str, *_: Any) -> None:
            put_back()
            for view, of_tensor, rows, columns in layers[bucket]:
                kept.append((view, view.clone()))
                view.copy_(fp8_rounded(view, of_tensor[rows][:, columns]))

        with ExitStack() as stack:
            stack.callback(put_back)
            for layer in (layer for chunk in self._chunks for layer in unwrap(chunk).decoder.layers):
                hook = partial(round_layer, f"{LAYERS}{layer.layer_number - 1}.")
                stack.callback(layer.register_forward_pre_hook(hook).remove)
            yield

    @contextmanager
    def inputs(self) -> Iterator[None]:
        """Context in which servers' rounding of the inputs of linear layers and experts is done here too, in groups of
        FP8_BLOCK for each token; but for the experts' second product.
        """

        def rounded(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            parts = [part.float() for value in inputs[:1] for part in value.split(FP8_BLOCK, -1)]
            done = [fp8_rounded(part, fp8_scales(part.abs().amax(-1, keepdim=True))) for part in parts]
            return (torch.cat(done, -1).to(inputs[0].dtype), *inputs[1:]) if done else inputs

        with ExitStack() as stack:
            for name, module in (named for chunk in self._chunks for named in chunk.named_modules()):
                if target_of(name) and name.rpartition(".")[2].startswith(("linear_", "experts")):
                    stack.callback(module.register_forward_pre_hook(rounded).remove)
            yield
