"""Stand-ins on an emulated GPU for torch's kernel of packed sequences, which this machine does not have."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen
from torch.utils._python_dispatch import _disable_current_modes

from tests.emulated_gpu import GPU, EmulatedGpu, is_on_gpu


def install(gpu: EmulatedGpu) -> None:
    """Put them in the place of torch's, for the rest of this process."""
    packed: Any = torch_varlen
    packed.varlen_attn = attention_on(gpu)
    operators: Any = torch.ops.aten
    operators._flash_attention_backward = backward


def attention_on(gpu: EmulatedGpu) -> Callable[..., Any]:
    """Stand in for `varlen_attn`, of which torch has kernels for GPUs only: the arguments it takes, in float32."""

    def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert query.dtype in (torch.bfloat16, torch.float16) and query.shape[2] % 8 == 0
        assert enable_gqa == (query.shape[1] > key.shape[1]) and window_size[1] == 0
        gpu.packed_calls += 1
        outputs, sums = [], []
        operands = query, key, value, cu_seq_q, cu_seq_k, max_q, max_k
        for q_SND, k_TND, v_TND, hidden_ST in sequences(*operands, window_size[0]):
            scores_NST = torch.einsum("snd,tnd->nst", q_SND, k_TND) * scale
            scores_NST = scores_NST.masked_fill(hidden_ST, -math.inf)
            outputs.append(torch.einsum("nst,tnd->snd", scores_NST.softmax(-1), v_TND))
            sums.append(scores_NST.logsumexp(-1))
        output = torch.cat(outputs).to(query.dtype)
        return output if return_aux is None else (output, torch.cat(sums, 1))

    return attend


def sequences(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, window: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield each sequence's queries, keys and values in float32, keys and values for every head of the queries, and
    what is hidden from which. The last query is at the last key.
    """
    shared, lengths = query.shape[1] // key.shape[1], []
    assert value.shape == key.shape and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    for heads, cumulative, longest in ((query, cu_seq_q, max_q), (key, cu_seq_k, max_k)):
        assert is_on_gpu(cumulative)
        with _disable_current_modes():
            bounds = [int(bound) for bound in cumulative]
        lengths.append([end - begin for begin, end in itertools.pairwise(bounds)])
        assert bounds[0] == 0 and bounds[-1] == len(heads) and longest == max(lengths[-1])
    parts = [query.float().split(lengths[0]), *(x.float().split(lengths[1]) for x in (key, value))]
    for q_SND, k_TGD, v_TGD in zip(*parts, strict=True):
        k_TND, v_TND = (x.repeat_interleave(shared, 1) for x in (k_TGD, v_TGD))
        positions = torch.arange(len(k_TND), device=GPU)
        behind_ST = positions[len(k_TND) - len(q_SND) :, None] - positions
        hidden_ST = (behind_ST < 0) | ((behind_ST > window) if window >= 0 else behind_ST < 0)
        yield q_SND, k_TND, v_TND, hidden_ST


def backward(
    grad,
    query,
    key,
    value,
    output,
    lse_NT,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    dropout,
    is_causal,
    rng_state,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):  # type: ignore[no-untyped-def]
    """Stand in for the backward pass of torch's kernel, which reads probabilities from a log-sum-exp, and the sum over
    the gradient of the probabilities from the output: FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    assert dropout == 0.0 and is_causal == (window_size_left == -1) and window_size_right == 0
    assert is_on_gpu(rng_state) and is_on_gpu(unused) and grad.dtype == output.dtype == query.dtype
    groups, begin = key.shape[1], 0
    found: list[list[Tensor]] = [[], [], []]
    operands = query, key, value, cu_seq_q, cu_seq_k, max_q, max_k
    for q_SND, k_TND, v_TND, hidden_ST in sequences(*operands, window_size_left):
        rows = slice(begin, begin + len(q_SND))
        begin += len(q_SND)
        grad_SND, output_SND = grad[rows].float(), output[rows].float()
        scores_NST = torch.einsum("snd,tnd->nst", q_SND, k_TND) * scale
        probs_NST = (scores_NST - lse_NT[:, rows, None]).exp().masked_fill(hidden_ST, 0.0)
        pull_NST = torch.einsum("snd,tnd->nst", grad_SND, v_TND)
        of_scores_NST = probs_NST * (pull_NST - (grad_SND * output_SND).sum(-1).t()[..., None]) * scale
        of_key = torch.einsum("nst,snd->tnd", of_scores_NST, q_SND)
        of_value = torch.einsum("nst,snd->tnd", probs_NST, grad_SND)
        found[0].append(torch.einsum("nst,tnd->snd", of_scores_NST, k_TND))
        for total, heads in zip(found[1:], (of_key, of_value), strict=True):
            total.append(heads.unflatten(1, (groups, -1)).sum(2))
    of_query, of_key, of_value = (torch.cat(parts).to(query.dtype) for parts in found)
    return of_query, of_key, of_value
