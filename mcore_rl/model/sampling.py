"""Continuing a text with a model that lies whole in this process: plain, without a cache, for a look at a run."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def continue_tokens(
    chunk: nn.Module, prompt: Sequence[int], *, temperature: float, generator: torch.Generator, limit: int
) -> Iterator[int]:
    """Tokens after `prompt`, one by one, without end; `limit` is the longest sequence that the model reads.

    Temperature 0 takes the likeliest token. Only the last `limit` tokens are read once there are more.
    """
    tokens = list(prompt)
    device = next(chunk.parameters()).device
    chunk.eval()
    while True:
        window_1S = torch.tensor([tokens[-limit:]], device=device)
        positions_1S = torch.arange(window_1S.shape[1], device=device)[None]
        logits_1SV = chunk(input_ids=window_1S, position_ids=positions_1S, attention_mask=None)
        tokens.append(pick(logits_1SV[0, -1].float().cpu(), temperature, generator))
        yield tokens[-1]


def pick(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token, drawn from the softmax at `temperature`; 0: the likeliest."""
    if temperature == 0.0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
