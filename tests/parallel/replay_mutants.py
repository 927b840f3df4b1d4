"""Faults of routing replay as data, `(file, old text, new text)`, and a context in which one of them is in force."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Literal

import mcore_rl

Scenario = Literal["r2", "padded", "drops", "r3", "r3_left_out", "rl_r2", "rl_r3", "rl_replayed_reference"]
EVERYWHERE = ("1", "tp2-ep2")
SHARDED = ("tp2-ep2",)


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    """Path below mcore_rl."""
    old: str
    """Text that is there once."""
    new: str
    scenario: Scenario = "r2"
    meshes: tuple[str, ...] = EVERYWHERE
    is_harmless: bool = False
    """Whether no loss and no gradient changes by more than rounding."""
    in_short: bool = False
    """Whether the short suite has it."""


HOOKS, LAYOUTS, CACHE, STORAGE, TAPE, EXCHANGE, ROLLOUTS = (
    f"replay/{name}.py" for name in ("router_hooks", "cache", "cache", "cache", "tape", "exchange", "from_rollouts")
)
POLICY, SCHEDULE = "rl/step/policy_routes.py", "megatron/schedule.py"
IMPOSED = "experts_tK = microbatch.imposed_ltK[self._column].long()"
FREE = "if microbatch.imposed_ltK is None:\n            values_tK, live_tK = choose(scores)"
FOUND = "cached = self._samples.get((version, sample))\n            token_n ="
GATES = "return scores.gather(1, experts_tK), experts_tK"
CHOSEN = "experts_tK = live_tK.where(microbatch.is_live_t1, experts_tK)"
RECORDED = "in_chunk.live_ltK.transpose(0, 1)"
HAS_GAPS = "if imposes and not bool(microbatch.locations.has_routes_t.all()):"
ARMED = "with routing(chunk, index):"
SLICE = "all_sB.chunk(mesh.tp.size)[mesh.tp.rank]"
ZIGZAG = "zigzag_spans(full_BS, lengths, mesh.cp)"
MISSING = "token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n)]"
DROPS = "return gates_TE.masked_fill(dropped_TE, 0.0), routed_TE & ~dropped_TE"
REFERENCE = 'if self._replay.reference == "live":'

MUTANTS: tuple[Mutant, ...] = (
    # Between the tape and the router.
    Mutant("every layer takes layer 0's routes", HOOKS, IMPOSED, "experts_tK = microbatch.imposed_ltK[0].long()"),
    Mutant("routes shifted by one token in the hook", HOOKS, IMPOSED, IMPOSED + ".roll(1, 0)"),
    Mutant(
        "layers in reverse in the hook", HOOKS, IMPOSED, "experts_tK = microbatch.imposed_ltK[-1 - self._column].long()"
    ),
    Mutant("an expert twice in every imposed set", HOOKS, IMPOSED, IMPOSED + "[:, :1].repeat(1, topk)", in_short=True),
    Mutant(
        "another expert for one token of a microbatch",
        HOOKS,
        IMPOSED,
        IMPOSED + "\n        experts_tK[1] = (experts_tK[1] + 1) % microbatch.num_experts",
    ),
    Mutant(
        "routes imposed in the forward pass only",
        HOOKS,
        FREE,
        FREE.replace("is None", "is None or not is_forward"),
        in_short=True,
    ),
    Mutant("routes imposed in recomputation only", HOOKS, FREE, FREE.replace("is None", "is None or is_forward")),
    Mutant(
        "every recomputation takes the first microbatch's routes",
        HOOKS,
        "done, self._in_backward = self._in_backward, microbatch",
        "done, self._in_backward = None, self._in_backward or microbatch",
    ),
    Mutant(
        "routes freed before recomputation",
        HOOKS,
        "if done is not None and done is not microbatch:\n            done.imposed_ltK = None",
        "if True:\n            microbatch.imposed_ltK = None",
    ),
    Mutant(
        "padding and unknown tokens take routes, the others choose",
        HOOKS,
        CHOSEN,
        "experts_tK = experts_tK.where(microbatch.is_live_t1, live_tK)",
    ),
    # Gates.
    Mutant("no gradient through the router", HOOKS, GATES, "return scores.detach().gather(1, experts_tK), experts_tK"),
    Mutant(
        "gates of the recording pass",
        HOOKS,
        GATES,
        "return scores.detach().gather(1, experts_tK) + 0.05 * (experts_tK % 2), experts_tK",
    ),
    Mutant(
        "gates of the recording pass with the live router's gradient",
        HOOKS,
        GATES,
        "return scores.gather(1, experts_tK) + 0.05 * (experts_tK % 2), experts_tK",
    ),
    Mutant(
        "half the gradient through the router",
        HOOKS,
        GATES,
        "return ((scores + scores.detach()) / 2).gather(1, experts_tK), experts_tK",
    ),
    Mutant(
        "half the gradient through the router, in the second microbatch",
        HOOKS,
        GATES,
        "half = (scores + scores.detach()) / 2 if microbatch.index == 1 else scores\n"
        "        return half.gather(1, experts_tK), experts_tK",
    ),
    Mutant(
        "gates of the other experts of a set", HOOKS, GATES, "return scores.gather(1, experts_tK.flip(1)), experts_tK"
    ),
    Mutant("gates of the token before", HOOKS, GATES, "return scores.roll(1, 0).gather(1, experts_tK), experts_tK"),
    Mutant("gates of the live choice", HOOKS, GATES, "return choose(scores)[0], experts_tK"),
    # Recording.
    Mutant(
        "an expert twice in every recorded set",
        HOOKS,
        "microbatch.live_ltK[self._column] = live_tK",
        "microbatch.live_ltK[self._column] = live_tK[:, :1]",
    ),
    Mutant(
        "the recording pass goes to the worst experts",
        HOOKS,
        "            values_tK, live_tK = choose(scores)\n            if is_forward:",
        "            values_tK, live_tK = choose(-scores)\n            if is_forward:",
    ),
    Mutant("the record of the next layer", TAPE, RECORDED, "in_chunk.live_ltK.roll(1, 0).transpose(0, 1)"),
    Mutant(
        "the record in another order of each set",
        TAPE,
        RECORDED,
        "in_chunk.live_ltK.flip(2).transpose(0, 1)",
        is_harmless=True,
    ),
    # The tape and the schedule.
    Mutant(
        "one microbatch not imposed",
        TAPE,
        "imposed_ltK=cached_ltK if imposes else None",
        "imposed_ltK=cached_ltK if imposes and index != 1 else None",
    ),
    Mutant(
        "the first microbatch's routes for all",
        TAPE,
        "partial(read, self._microbatches[index].locations, self._device)",
        "partial(read, self._microbatches[0].locations, self._device)",
    ),
    Mutant(
        "the routes that travel are this microbatch's, not the next one's",
        TAPE,
        "= self._begin_reading(index + 1)",
        "= self._begin_reading(index)",
    ),
    Mutant("the schedule arms the first microbatch for all", SCHEDULE, ARMED, "with routing(chunk, 0):"),
    Mutant(
        "the schedule does not arm the last microbatch",
        SCHEDULE,
        ARMED,
        "with routing(chunk, index) if index + 1 < len(microbatches) else nullcontext():",
    ),
    Mutant("padding takes routes", TAPE, HAS_GAPS, "if False:", is_harmless=True),
    Mutant(
        "the first chunk's routes for every chunk of a rank",
        TAPE,
        "in_range_tlK = cached_tLK[:, columns]",
        "in_range_tlK = cached_tLK[:, : columns.stop - columns.start]",
        meshes=("pp2-vpp2",),
        in_short=True,
    ),
    Mutant(
        "every chunk's record in the first chunk's place",
        TAPE,
        "microbatch.recorded_tlK[:, self._columns[chunk]]",
        "microbatch.recorded_tlK[:, : len(in_chunk.live_ltK)]",
        meshes=("pp2-vpp2",),
    ),
    # Layout of tokens.
    Mutant(
        "the sequence-parallel slice of another rank",
        LAYOUTS,
        SLICE,
        "all_sB.chunk(mesh.tp.size)[mesh.tp.rank - 1]",
        meshes=SHARDED,
        in_short=True,
    ),
    Mutant(
        "the sequence-parallel slice of another rank, R3",
        LAYOUTS,
        SLICE,
        "all_sB.chunk(mesh.tp.size)[mesh.tp.rank - 1]",
        scenario="r3",
        meshes=SHARDED,
    ),
    Mutant(
        "no sequence parallelism in the layout",
        LAYOUTS,
        "if mesh.sequence_parallel else all_sB",
        "if False else all_sB",
        meshes=SHARDED,
    ),
    Mutant(
        "zig-zag ignored",
        LAYOUTS,
        ZIGZAG,
        "full_BS.chunk(mesh.cp.size, 1)[mesh.cp.rank]",
        meshes=("cp2",),
        in_short=True,
    ),
    Mutant(
        "zig-zag ignored, R3",
        LAYOUTS,
        ZIGZAG,
        "full_BS.chunk(mesh.cp.size, 1)[mesh.cp.rank]",
        scenario="r3",
        meshes=("cp2",),
    ),
    Mutant(
        "zig-zag over the row instead of each span",
        LAYOUTS,
        ZIGZAG,
        "zigzag_spans(full_BS, [full_BS.shape[1]], mesh.cp)",
        scenario="r3",
        meshes=("cp2",),
    ),
    Mutant(
        "row before position",
        LAYOUTS,
        "return local_sB.reshape(-1)",
        "return local_sB.t().reshape(-1)",
        scenario="padded",
    ),
    Mutant(
        "positions count from one",
        LAYOUTS,
        "- begin_N.repeat_interleave(positions_N)\n    is_real_T",
        "- begin_N.repeat_interleave(positions_N) + 1\n    is_real_T",
    ),
    # Cache, storage, codes.
    Mutant(
        "the rows of the token before",
        CACHE,
        "parts.append((cached.block, cached.first + row_n, token_n))",
        "parts.append((cached.block, cached.first + row_n - 1, token_n))",
    ),
    Mutant(
        "another sample of the same length", CACHE, FOUND, FOUND.replace("sample)", "2 if sample == 5 else sample)")
    ),
    Mutant(
        "recorded in the order of positions, whatever the sample",
        CACHE,
        "(tokens.sample_index_t * 2**32 + tokens.position_t).argsort()",
        "(tokens.sample_index_t.clamp_max(0) * 2**32 + tokens.position_t).argsort()",
    ),
    Mutant(
        "tokens of a block not sorted",
        CACHE,
        "merged.append((block, row_n[order_n], token_n[order_n]))",
        "merged.append((block, row_n, token_n.sort(descending=True).values))",
    ),
    Mutant(
        "every received sample begins at row 0",
        CACHE,
        "            first += len(routes.position_n)",
        "            first += 0",
        scenario="r3",
    ),
    Mutant(
        "the codes of the layers in reverse",
        STORAGE,
        "return to_device(rows[to_device(rows_n, rows.device)], device)",
        "return to_device(rows[to_device(rows_n, rows.device)].flip(1), device)",
    ),
    Mutant(
        "a block's rows in reverse",
        STORAGE,
        "rows[to_device(rows_n, rows.device)]",
        "rows.flip(0)[to_device(rows_n, rows.device)]",
    ),
    # R3: exchange and reader.
    Mutant(
        "answers with the layers in reverse",
        EXCHANGE,
        "picked(offered.read(row_n), columns)",
        "picked(offered.read(row_n), columns[::-1])",
        scenario="r3",
    ),
    Mutant(
        "answers shifted by a token",
        EXCHANGE,
        "row_n = torch.searchsorted(offered.position_n, positions(request.ranges))",
        "row_n = torch.searchsorted(offered.position_n, positions(request.ranges)).roll(1)",
        scenario="r3",
        in_short=True,
    ),
    Mutant(
        "answers put together with the tokens in reverse",
        EXCHANGE,
        "codes.view(-1, len(request.layers), top_k)",
        "codes.view(-1, len(request.layers), top_k).flip(0)",
        scenario="r3",
    ),
    Mutant(
        "the engine's layers in reverse",
        ROLLOUTS,
        "return [given_layers.index(layer) for layer in cache.layers]",
        "return [-1 - given_layers.index(layer) for layer in cache.layers]",
        scenario="r3",
    ),
    Mutant(
        "the engine's routes begin one token late",
        ROLLOUTS,
        "read=lambda index_n: codes_nlK.index_select(0, index_n)",
        "read=lambda index_n: codes_nlK.index_select(0, (index_n - 1).clamp_min(0))",
        scenario="r3",
    ),
    # R3 with tokens that the engine left out.
    Mutant(
        "all tokens are live where some were left out", HOOKS, CHOSEN, "experts_tK = live_tK", scenario="r3_left_out"
    ),
    Mutant(
        "tokens that were left out go to whatever is in their rows", TAPE, HAS_GAPS, "if False:", scenario="r3_left_out"
    ),
    Mutant(
        "tokens that were left out are live in a rank's last chunk only",
        TAPE,
        HAS_GAPS,
        "if imposes and chunk is [*self._routers][-1]:",
        scenario="r3_left_out",
        meshes=("pp2-vpp2",),
    ),
    Mutant(
        "tokens that were left out go to other experts than the best",
        HOOKS,
        CHOSEN,
        "experts_tK = ((live_tK + 1) % microbatch.num_experts).where(microbatch.is_live_t1, experts_tK)",
        scenario="r3_left_out",
    ),
    Mutant(
        "the second token that was left out goes to another expert",
        HOOKS,
        CHOSEN,
        "experts_tK = live_tK.where(microbatch.is_live_t1, experts_tK)\n"
        "            left_t = microbatch.is_live_t1[:, 0].nonzero()[:, 0]\n"
        "            experts_tK[left_t[1]] = scores.detach()[left_t[1]].topk(topk, largest=False).indices",
        scenario="r3_left_out",
        meshes=("1",),
    ),
    Mutant(
        "tokens that were left out take routes in recomputation",
        HOOKS,
        "if microbatch.is_live_t1 is not None:\n            # Recomputation uses",
        "if microbatch.is_live_t1 is not None and is_forward:\n            # Recomputation uses",
        scenario="r3_left_out",
    ),
    Mutant(
        "the token after each that was left out is live in its place",
        CACHE,
        MISSING,
        "token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n + 1)]",
        scenario="r3_left_out",
    ),
    Mutant(
        "one token more is live than was left out",
        CACHE,
        MISSING,
        "token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n)][1:]",
        scenario="r3_left_out",
    ),
    Mutant(
        "a sample with tokens left out is live altogether",
        CACHE,
        MISSING,
        "token_n = token_n[:0]",
        scenario="r3_left_out",
    ),
    Mutant(
        "the exchange forgets what was left out",
        EXCHANGE,
        "missing_n=positions(offer_of[sample].missing)",
        "missing_n=NO_POSITIONS",
        scenario="r3_left_out",
    ),
    Mutant(
        "the exchange loses a sample where tokens may be without routes",
        EXCHANGE,
        "for sample, routes in assembled.items()",
        "for sample, routes in assembled.items() if sample != 5",
        scenario="r3_left_out",
        in_short=True,
    ),
    Mutant(
        "the rows of the next token where one was left out",
        ROLLOUTS,
        "codes_TlK[is_given_T]).to(cache.dtype)",
        "codes_TlK[is_given_T.roll(1)].clamp_min(0)).to(cache.dtype)",
        scenario="r3_left_out",
    ),
    # Drops of experts with a capacity.
    Mutant("drops not imposed", HOOKS, DROPS, "return None", scenario="drops", in_short=True),
    Mutant(
        "drops of the token before",
        HOOKS,
        DROPS,
        "dropped_TE = dropped_TE.roll(1, 0)\n"
        "            return gates_TE.masked_fill(dropped_TE, 0.0), routed_TE & ~dropped_TE",
        scenario="drops",
    ),
    Mutant(
        "drops not recorded",
        HOOKS,
        "live_tK += num_experts * ~routed_TE.gather(1, live_tK.long())",
        "live_tK += 0 * ~routed_TE.gather(1, live_tK.long())",
        scenario="drops",
    ),
    Mutant(
        "live drops beside the imposed ones",
        HOOKS,
        "with_capacity if microbatch.imposed_ltK is None else without_capacity",
        "with_capacity",
        scenario="drops",
    ),
    # Which pass is replayed.
    Mutant(
        "the reference replayed although live",
        POLICY,
        REFERENCE,
        'if self._replay.reference == "replay":',
        scenario="rl_r2",
        in_short=True,
    ),
    Mutant(
        "the reference live although replayed",
        POLICY,
        REFERENCE,
        'if self._replay.reference == "replay":',
        scenario="rl_replayed_reference",
    ),
    Mutant(
        "R2's updates only observed",
        POLICY,
        'RoutingTape.observe if self._replay.kind == "none" else RoutingTape.impose',
        "RoutingTape.observe",
        scenario="rl_r2",
    ),
    Mutant("R2's updates free", POLICY, "if is_old_policy or not self._is_recorded:", "if True:", scenario="rl_r2"),
    Mutant(
        "R3's pass for old logprobs is live",
        POLICY,
        'taped = self._taped(microbatches, RoutingTape.impose, self._from_rollout, "rollout_routes")',
        "taped = nullcontext(free_routing)",
        scenario="rl_r3",
    ),
    Mutant(
        "R3 observes",
        POLICY,
        "return self._taped(microbatches, RoutingTape.impose, self._from_rollout, name)",
        "return self._taped(microbatches, RoutingTape.observe, self._from_rollout, name)",
        scenario="rl_r3",
    ),
    Mutant(
        "the prompt's routes of the token before",
        CACHE,
        "parts.append((giver.block, giver.first + row_n, shared_n))",
        "parts.append((giver.block, giver.first + row_n - 1, shared_n))",
        scenario="rl_r3",
    ),
    Mutant(
        "one token more than the prompt takes the group's first routes",
        ROLLOUTS,
        "if num_positions:\n            shared[sample]",
        "num_positions = min(len(routes.tokens_T), len(first.tokens_T), num_positions + 1)\n"
        "        if num_positions:\n            shared[sample]",
        scenario="rl_r3",
    ),
    Mutant(
        "the routes of the next completion of a group",
        POLICY,
        "group_index * group_size + index: self._given",
        "group_index * group_size + (index + 1) % group_size: self._given",
        scenario="rl_r3",
    ),
)


@contextmanager
def applied(mutant: Mutant | None) -> Iterator[None]:
    """Put a fault into force in this process, for whoever has imported the function; no file is changed."""
    if mutant is None:
        yield
        return
    path = Path(mcore_rl.__file__).parent / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} has its text {source.count(mutant.old)} times"
    mutated = source.replace(mutant.old, mutant.new)
    module_name = "mcore_rl." + mutant.file.removesuffix(".py").replace("/", ".")
    names = _function_at(ast.parse(source), source[: source.index(mutant.old)].count("\n") + 1)
    function = _live_function(module_name, names)
    original = function.__code__
    function.__code__ = _code_of(compile(mutated, str(path), "exec"), names)
    try:
        yield
    finally:
        function.__code__ = original


def _function_at(tree: ast.Module, line: int) -> list[str]:
    """Return the names of the class, if any, and of the function of it that a line is in."""
    names: list[str] = []
    nodes: list[ast.stmt] = tree.body
    while found := [n for n in nodes if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and _has(n, line)]:
        (node,) = found
        names.append(node.name)
        if isinstance(node, ast.FunctionDef):
            return names
        nodes = node.body
    raise AssertionError(f"line {line} is in no function")


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _live_function(module_name: str, names: list[str]) -> FunctionType:
    owner = importlib.import_module(module_name)
    for name in names:
        owner = inspect.getattr_static(owner, name)
    found = inspect.unwrap(owner.fget if isinstance(owner, property) else owner)
    assert isinstance(found, FunctionType), names
    return found


def _code_of(code: CodeType, names: list[str]) -> CodeType:
    for name in names:
        (code,) = [one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name]
    return code
