"""Likely reasons why every completion of a batch was truncated."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.types import EpisodeEnd, Group


def episodes_reason(groups: Collection[Group], sampling: Sampling) -> str:
    """Return a warning that counts which limits ended the conversations, for use if all of them ended at a limit."""
    ends = Counter(
        completion.episode.end
        for group in groups
        for completion in group.completions
        if completion.episode is not None
    )
    limits: dict[EpisodeEnd, str] = {
        "length": f"rl.rollout.max_new_tokens={sampling.max_new_tokens} within a turn",
        "turns": "rl.environment.max_turns",
        "context": "rl.environment.max_tokens",
    }
    counts = ", ".join(f"{ends[end]} by {limit}" for end, limit in limits.items() if ends[end])
    return (
        f"warning: all conversations were ended by a limit ({counts or 'on other replicas'}), none by the environment. "
        "Raise the limit, or fine-tune the model to end its turns and to answer (mcore-rl sft)."
    )


def truncation_reason(
    groups: Collection[Group],
    sampling: Sampling,
    special_ids: frozenset[int],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Return a warning with the likely reason and a remedy, for use if all completions are truncated.

    A special token that occurs in at least half of the completions and is not a stop token is probably the end token
    that the model was trained with.

    Args:
        groups: truncated completions, at least this replica's.
        sampling: sampling parameters, with the stop tokens.
        special_ids: special tokens of the tokenizer.
        decode: function that decodes token ids to text.
    """
    completions = [completion for group in groups for completion in group.completions]
    holders = Counter(
        token
        for completion in completions
        for token in special_ids.intersection(completion.tokens_T) - sampling.stop_tokens
    )
    what = (
        f"warning: all completions reached rl.rollout.max_new_tokens={sampling.max_new_tokens} without an end"
    )
    token, count = holders.most_common(1)[0] if holders else (-1, 0)
    if 2 * count >= max(1, len(completions)):
        return (
            f"{what}. Likely reason: {count} of {len(completions)} hold the special token "
            f"{_named(token, decode)}, which is no end here and may be the one that the model was trained to end with. "
            f"Set data.chat_template to the template of its fine-tuning, or rl.rollout.stop_tokens=[{token}]."
        )
    ends = ", ".join(_named(token, decode) for token in sorted(sampling.stop_tokens))
    return (
        f"{what}. Likely reason: the model was not trained to end with {ends or 'a stop token (there is none)'}: "
        "fine-tune it with the same data.chat_template first (mcore-rl sft). Or its answers are longer: raise "
        "rl.rollout.max_new_tokens."
    )


def _named(token: int, decode: Callable[[Sequence[int]], str]) -> str:
    """Return a token's text and id; only the id if it has no text, as a control piece of SentencePiece."""
    text = decode([token])
    return f"{text!r} ({token})" if text else f"token {token}"
