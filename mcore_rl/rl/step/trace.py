"""Some completions of a rollout batch token by token, for people to read: ratios, advantages, changed routes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.data.answer_ends import text_ends
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.batch import PolicyMicrobatch
from mcore_rl.rl.types import Rollout

TRACED_GROUPS, TRACED_TOKENS = 4, 1000
"""Groups of a rollout batch that are traced, its first, and the leading tokens of each of their completions."""


class TokenTrace:
    """Collects on each rank what the passes over a rollout batch compute for single tokens of its first groups, by
    (sample, position): a logprob belongs to the token after its position, a route to the token at it.
    """

    def __init__(self, group_size: int) -> None:
        self._num_samples = TRACED_GROUPS * group_size
        self._learned: dict[tuple[int, int], tuple[float, float]] = {}
        """Log ratio of the policy to the engine's logprob, and advantage, in the last update of the token."""
        self._changed: dict[str, set[tuple[int, int]]] = defaultdict(set)
        """Tokens with a changed choice in a layer of this rank, by the first part of the metrics' names."""

    def add_update(self, microbatch: PolicyMicrobatch, logprobs_T: Tensor) -> None:
        """Add the trained tokens of an update's microbatch, with their logprobs under the policy."""
        assert microbatch.advantages_T is not None
        if not microbatch.samples:
            return
        sample_T = torch.tensor(microbatch.samples, device=logprobs_T.device)[microbatch.sequence_T]
        is_traced_T = microbatch.mask_T & (sample_T < self._num_samples)
        log_ratio_T = logprobs_T.detach() - microbatch.rollout_logprobs_T
        columns = (sample_T, microbatch.place_T, log_ratio_T, microbatch.advantages_T)
        for sample, position, *numbers in zip(*(x[is_traced_T].tolist() for x in columns), strict=True):
            self._learned[sample, position] = (numbers[0], numbers[1])

    def forget_updates(self) -> None:
        """Drop the numbers of updates that are not made. Changed routes stay: they are why completions were refused."""
        self._learned.clear()

    def add_changed(self, name: str, tokens: Iterable[tuple[int, int]]) -> None:
        """Add (sample, position) of the tokens with a changed choice in a pass; `name` as in its metrics."""
        self._changed[name] |= {token for token in tokens if token[0] < self._num_samples}

    def gathered(
        self, rollout: Rollout, decode: Callable[[Sequence[int]], str], mesh: Mesh
    ) -> dict[int, dict[str, Any]]:
        """Collective over the world: return the fields to add to each traced sample, on rank 0; empty elsewhere.
        `pieces` are the texts of the completion's tokens, `log_ratios` belong to them (None: not trained), `advantage`
        is the mean over trained tokens, and `changed_routes` has indices of tokens by the comparison's name.
        """
        group_size = rollout.rewards_PG.shape[1]
        pieces = {
            group_index * group_size + index: pieces_of(completion.tokens_T, decode)[:TRACED_TOKENS]
            for group_index, group in rollout.groups.items()
            if group_index < TRACED_GROUPS
            for index, completion in enumerate(group.completions)
        }
        own = (pieces, self._learned, dict(self._changed))
        gathered: list[Any] = [None] * mesh.world.size
        dist.gather_object(own, gathered if mesh.world.rank == 0 else None, group=mesh.world.group, group_dst=0)
        if mesh.world.rank:
            return {}
        learned = {token: numbers for _, part, _ in gathered for token, numbers in part.items()}
        names = sorted({name for *_, part in gathered for name in part})
        changed = {name: set().union(*(part.get(name, ()) for *_, part in gathered)) for name in names}
        found = {}
        for sample, texts in sorted({n: x for part, *_ in gathered for n, x in part.items()}.items()):
            first = rollout.shapes[sample].num_prompt_tokens
            position_of = {token: p for p, token in enumerate(rollout.shapes[sample].input_P.tolist())}
            numbers = [learned.get((sample, position_of.get(first - 1 + index, -1))) for index in range(len(texts))]
            advantages = [both[1] for both in numbers if both]
            found[sample] = {
                "advantage": fmean(advantages) if advantages else None,
                "pieces": texts,
                "log_ratios": [None if both is None else round(both[0], 4) for both in numbers],
                "changed_routes": {
                    name: [n for n in range(len(texts)) if (sample, position_of.get(first + n, -1)) in changed[name]]
                    for name in names
                },
            }
        return found


def pieces_of(tokens_T: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text that each token adds. A character of several tokens belongs to its last one, and a space before a
    word to the word, though a tokenizer may drop it when it decodes the word alone (sentencepiece).
    """
    text = decode(tokens_T)
    return [text[begin:end] for begin, end in pairwise([0, *text_ends(tokens_T, decode)])]
