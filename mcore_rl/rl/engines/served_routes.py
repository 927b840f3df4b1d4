"""Routes recorded by a server: they are checked, and reduced to the MoE layers (R3)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.model import ModelConfig
from mcore_rl.rl.engines.server_api import ServerError
from mcore_rl.rl.types import VersionSpan

FLAG = "--enable-return-routed-experts"
"""Argument that makes vLLM and SGLang record routes."""
FEW_TOKENS = 8
"""With one expert per token, fewer tokens than this may all have expert 0; more tokens count as not recorded."""


def pick_layers(
    url: str,
    experts_TLK: NDArray[np.int32] | None,
    model: ModelConfig,
    *,
    num_tokens: int,
    may_miss: bool = False,
) -> NDArray[np.int32]:
    """Return the experts `[num_tokens, MoE layers, K]` of a completion.

    Args:
        url: The server's address, for error messages.
        experts_TLK: The server's routes, of all hidden layers (dense layers have zeros) or only of the MoE layers;
            None if the answer has no routes.
        model: The model's config.
        num_tokens: Number of tokens of prompt and completion, without the last token, which enters no layer.
        may_miss: Whether the server may leave out some tokens (replay.missing). It fills their rows with -1, or with
            zeros, which are not valid routes if a token has several experts. These rows are -1 in the result.

    Raises:
        ServerError: if routes are missing or invalid. If the server recorded nothing, routes are zeros; if recording
            was cut short, rows are missing. Such a completion must be generated again.
    """
    if experts_TLK is None:
        raise ServerError(f"{url}: the completion came without routes. Start the server with {FLAG}")
    moe_layers = [layer for layer, has_router in enumerate(model.moe_layers) if has_router]
    num_rows, num_layers, top_k = experts_TLK.shape
    if num_rows != num_tokens:
        raise ServerError(f"{url}: routes of {num_rows} tokens, and {num_tokens} entered the model")
    if top_k != model.moe.top_k or num_layers not in (model.num_layers, len(moe_layers)):
        raise ServerError(
            f"{url}: routes of {num_layers} layers with {top_k} experts a token; the model has {model.num_layers} "
            f"layers, {len(moe_layers)} of them with routers, and {model.moe.top_k} experts a token"
        )
    picked_TLK = experts_TLK if num_layers == len(moe_layers) else experts_TLK[:, moe_layers]
    if may_miss:
        is_missing_T = (picked_TLK == -1).all(axis=(1, 2))
        if top_k > 1:
            is_missing_T |= (picked_TLK == 0).all(axis=(1, 2))
        if is_missing_T.any() and not is_missing_T.all():
            _check(url, picked_TLK[~is_missing_T], model, moe_layers)
            return np.where(is_missing_T[:, None, None], np.int32(-1), picked_TLK)
    _check(url, picked_TLK, model, moe_layers)
    return picked_TLK


def without_recomputed(
    url: str,
    experts_TLK: NDArray[np.int32],
    versions: Sequence[VersionSpan],
    num_prompt: int,
    *,
    may_miss: bool,
) -> NDArray[np.int32]:
    """Set rows that were recomputed under newer weights to -1, and return the experts.

    A server that gets new weights while a request runs recomputes the request's tokens so far (SGLang's "retract",
    vLLM's reset of running requests), and overwrites the routes that it returns at the end of the request. The logprobs
    of these tokens are still from the weights that sampled them, so the routes no longer match.

    Args:
        url: The server's address, for error messages.
        experts_TLK: Experts `[T, layers, K]` of prompt and completion, without the last token.
        versions: Versions of the weights that sampled the completion's tokens.
        num_prompt: Number of tokens of the prompt.
        may_miss: Whether tokens may have no routes (replay.missing).

    Raises:
        ServerError: if there are such rows and `may_miss` is false.
    """
    # The last older token entered the model only under the newer weights, which then sampled the next token.
    num_recomputed = num_prompt + versions[-1].start - 1 if len(versions) > 1 else 0
    if not num_recomputed:
        return experts_TLK
    if not may_miss:
        raise ServerError(
            f"{url}: weights came after {versions[-1].start} tokens of the completion, and the server computed the "
            f"routes of {num_recomputed} tokens again with them: they are not the routes with which these were "
            'sampled. replay.missing="live" routes them live, "refuse" leaves their completion out'
        )
    kept_TLK = experts_TLK.copy()
    kept_TLK[:num_recomputed] = -1
    return kept_TLK


def _check(url: str, picked_TLK: NDArray[np.int32], model: ModelConfig, moe_layers: Sequence[int]) -> None:
    """Raise a ServerError if these are not valid routes of the MoE layers."""
    if picked_TLK.size and (picked_TLK.min() < 0 or picked_TLK.max() >= model.moe.num_experts):
        raise ServerError(
            f"{url}: routes name experts {picked_TLK.min()} to {picked_TLK.max()}, and a layer has "
            f"{model.moe.num_experts}"
        )
    if zero := _zero_layers(picked_TLK, moe_layers):
        raise ServerError(f"{url}: the routes of layers {zero} are all zero: they were not recorded")
    if model.moe.top_k > 1 and (np.diff(np.sort(picked_TLK, axis=2), axis=2) == 0).any():
        raise ServerError(f"{url}: the routes name an expert of a token twice")


def _zero_layers(experts_TLK: NDArray[np.int32], layers: Sequence[int]) -> list[int]:
    """Return the layers in which every expert is 0; none for few tokens with one expert each, where this can occur."""
    few = experts_TLK.shape[2] == 1 and experts_TLK.shape[0] < FEW_TOKENS
    is_zero_L = (experts_TLK == 0).all(axis=(0, 2))
    return [] if few else [layer for layer, is_zero in zip(layers, is_zero_L, strict=True) if is_zero]
