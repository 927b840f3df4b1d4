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
EVERYWHERE = ("one", "tp2-ep2")
SHARDED = ("tp2-ep2",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One fault, put into one function."""

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
POLICY = "rl/step/policy_routes.py"
IMPOSED = "experts_tK = microbatch.imposed_ltK[self._column].long()"
FREE = "if microbatch.imposed_ltK is None:\n            values_tK, live_tK = choose(scores)"
FOUND = "cached = self._samples.get((version, sample))\n            token_n ="
GATES = "return scores.gather(1, experts_tK), experts_tK"

MUTANTS: tuple[Mutant, ...] = (
    # Between the tape and the router.
    Mutant(
        name="every layer takes layer 0's routes",
        file=HOOKS,
        old=IMPOSED,
        new="experts_tK = microbatch.imposed_ltK[0].long()",
        in_short=True,
    ),
    Mutant(
        name="routes shifted by one token in the hook",
        file=HOOKS,
        old=IMPOSED,
        new=IMPOSED + ".roll(1, 0)",
        in_short=True,
    ),
    Mutant(
        name="layers in reverse in the hook",
        file=HOOKS,
        old=IMPOSED,
        new="experts_tK = microbatch.imposed_ltK[-1 - self._column].long()",
        in_short=True,
    ),
    Mutant(
        name="an expert twice in every imposed set",
        file=HOOKS,
        old=IMPOSED,
        new=IMPOSED + "[:, :1].repeat(1, topk)",
        in_short=True,
    ),
    Mutant(
        name="another expert for one token of a microbatch",
        file=HOOKS,
        old=IMPOSED,
        new=IMPOSED + "\n        experts_tK[1] = (experts_tK[1] + 1) % microbatch.num_experts",
    ),
    Mutant(
        name="routes imposed in the forward pass only",
        file=HOOKS,
        old=FREE,
        new=FREE.replace("is None", "is None or not is_forward"),
        in_short=True,
    ),
    Mutant(
        name="routes imposed in recomputation only",
        file=HOOKS,
        old=FREE,
        new=FREE.replace("is None", "is None or is_forward"),
    ),
    Mutant(
        name="every recomputation takes the first microbatch's routes",
        file=HOOKS,
        old="done, self._in_backward = self._in_backward, microbatch",
        new="done, self._in_backward = None, self._in_backward or microbatch",
    ),
    Mutant(
        name="routes freed before recomputation",
        file=HOOKS,
        old="if done is not None and done is not microbatch:\n            done.imposed_ltK = None",
        new="if True:\n            microbatch.imposed_ltK = None",
    ),
    Mutant(
        name="padding and unknown tokens take routes, the others choose",
        file=HOOKS,
        old="experts_tK = live_tK.where(microbatch.is_live_t1, experts_tK)",
        new="experts_tK = experts_tK.where(microbatch.is_live_t1, live_tK)",
    ),
    # Gates.
    Mutant(
        name="no gradient through the router",
        file=HOOKS,
        old=GATES,
        new="return scores.detach().gather(1, experts_tK), experts_tK",
        in_short=True,
    ),
    Mutant(
        name="gates of the recording pass",
        file=HOOKS,
        old=GATES,
        new="return scores.detach().gather(1, experts_tK) + 0.05 * (experts_tK % 2), experts_tK",
    ),
    Mutant(
        name="gates of the recording pass with the live router's gradient",
        file=HOOKS,
        old=GATES,
        new="return scores.gather(1, experts_tK) + 0.05 * (experts_tK % 2), experts_tK",
        in_short=True,
    ),
    Mutant(
        name="half the gradient through the router",
        file=HOOKS,
        old=GATES,
        new="return ((scores + scores.detach()) / 2).gather(1, experts_tK), experts_tK",
    ),
    Mutant(
        name="half the gradient through the router, in the second microbatch",
        file=HOOKS,
        old=GATES,
        new="half = (scores + scores.detach()) / 2 if microbatch.index == 1 else scores\n"
        "        return half.gather(1, experts_tK), experts_tK",
        in_short=True,
    ),
    Mutant(
        name="gates of the other experts of a set",
        file=HOOKS,
        old=GATES,
        new="return scores.gather(1, experts_tK.flip(1)), experts_tK",
    ),
    Mutant(
        name="gates of the token before",
        file=HOOKS,
        old=GATES,
        new="return scores.roll(1, 0).gather(1, experts_tK), experts_tK",
    ),
    Mutant(name="gates of the live choice", file=HOOKS, old=GATES, new="return choose(scores)[0], experts_tK"),
    # Recording.
    Mutant(
        name="an expert twice in every recorded set",
        file=HOOKS,
        old="microbatch.live_ltK[self._column] = live_tK",
        new="microbatch.live_ltK[self._column] = live_tK[:, :1]",
        in_short=True,
    ),
    Mutant(
        name="the recording pass goes to the worst experts",
        file=HOOKS,
        old="            values_tK, live_tK = choose(scores)\n            if is_forward:",
        new="            values_tK, live_tK = choose(-scores)\n            if is_forward:",
    ),
    Mutant(
        name="the record of the next layer",
        file=TAPE,
        old="in_chunk.live_ltK.transpose(0, 1)",
        new="in_chunk.live_ltK.roll(1, 0).transpose(0, 1)",
    ),
    Mutant(
        name="the record in another order of each set",
        file=TAPE,
        old="in_chunk.live_ltK.transpose(0, 1)",
        new="in_chunk.live_ltK.flip(2).transpose(0, 1)",
        is_harmless=True,
    ),
    # The tape and the schedule.
    Mutant(
        name="one microbatch not imposed",
        file=TAPE,
        old="imposed_ltK=cached_ltK if imposes else None",
        new="imposed_ltK=cached_ltK if imposes and index != 1 else None",
        in_short=True,
    ),
    Mutant(
        name="the first microbatch's routes for all",
        file=TAPE,
        old="partial(read, self._microbatches[index].locations, self._device)",
        new="partial(read, self._microbatches[0].locations, self._device)",
    ),
    Mutant(
        name="the routes that travel are this microbatch's, not the next one's",
        file=TAPE,
        old="= self._begin_reading(index + 1)",
        new="= self._begin_reading(index)",
    ),
    Mutant(
        name="the schedule arms the first microbatch for all",
        file="megatron/schedule.py",
        old="with routing(chunk, index):",
        new="with routing(chunk, 0):",
    ),
    Mutant(
        name="the schedule does not arm the last microbatch",
        file="megatron/schedule.py",
        old="with routing(chunk, index):",
        new="with routing(chunk, index) if index + 1 < len(microbatches) else nullcontext():",
    ),
    Mutant(
        name="padding takes routes",
        file=TAPE,
        old="if imposes and not bool(microbatch.locations.has_routes_t.all()):",
        new="if False:",
        is_harmless=True,
    ),
    Mutant(
        name="the first chunk's routes for every chunk of a rank",
        file=TAPE,
        old="in_range_tlK = cached_tLK[:, columns]",
        new="in_range_tlK = cached_tLK[:, : columns.stop - columns.start]",
        meshes=("pp2-vpp2",),
        in_short=True,
    ),
    Mutant(
        name="every chunk's record in the first chunk's place",
        file=TAPE,
        old="microbatch.recorded_tlK[:, self._columns[chunk]]",
        new="microbatch.recorded_tlK[:, : len(in_chunk.live_ltK)]",
        meshes=("pp2-vpp2",),
    ),
    # Layout of tokens.
    Mutant(
        name="the sequence-parallel slice of another rank",
        file=LAYOUTS,
        old="all_sB.chunk(mesh.tp.size)[mesh.tp.rank]",
        new="all_sB.chunk(mesh.tp.size)[mesh.tp.rank - 1]",
        meshes=SHARDED,
        in_short=True,
    ),
    Mutant(
        name="the sequence-parallel slice of another rank, R3",
        file=LAYOUTS,
        old="all_sB.chunk(mesh.tp.size)[mesh.tp.rank]",
        new="all_sB.chunk(mesh.tp.size)[mesh.tp.rank - 1]",
        scenario="r3",
        meshes=SHARDED,
    ),
    Mutant(
        name="no sequence parallelism in the layout",
        file=LAYOUTS,
        old="if mesh.sequence_parallel else all_sB",
        new="if False else all_sB",
        meshes=SHARDED,
    ),
    Mutant(
        name="zig-zag ignored",
        file=LAYOUTS,
        old="zigzag_spans(full_BS, lengths, mesh.cp)",
        new="full_BS.chunk(mesh.cp.size, 1)[mesh.cp.rank]",
        meshes=("cp2",),
        in_short=True,
    ),
    Mutant(
        name="zig-zag ignored, R3",
        file=LAYOUTS,
        old="zigzag_spans(full_BS, lengths, mesh.cp)",
        new="full_BS.chunk(mesh.cp.size, 1)[mesh.cp.rank]",
        scenario="r3",
        meshes=("cp2",),
    ),
    Mutant(
        name="zig-zag over the row instead of each span",
        file=LAYOUTS,
        old="zigzag_spans(full_BS, lengths, mesh.cp)",
        new="zigzag_spans(full_BS, [full_BS.shape[1]], mesh.cp)",
        scenario="r3",
        meshes=("cp2",),
    ),
    Mutant(
        name="row before position",
        file=LAYOUTS,
        old="return local_sB.reshape(-1)",
        new="return local_sB.t().reshape(-1)",
        scenario="padded",
    ),
    Mutant(
        name="positions count from one",
        file=LAYOUTS,
        old="- begin_N.repeat_interleave(positions_N)\n    is_real_T",
        new="- begin_N.repeat_interleave(positions_N) + 1\n    is_real_T",
    ),
    # Cache, storage, codes.
    Mutant(
        name="the rows of the token before",
        file=CACHE,
        old="parts.append((cached.block, cached.first + row_n, token_n))",
        new="parts.append((cached.block, cached.first + row_n - 1, token_n))",
    ),
    Mutant(
        name="another sample of the same length",
        file=CACHE,
        old=FOUND,
        new=FOUND.replace("sample)", "2 if sample == 5 else sample)"),
    ),
    Mutant(
        name="recorded in the order of positions, whatever the sample",
        file=CACHE,
        old="(tokens.sample_index_t * 2**32 + tokens.position_t).argsort()",
        new="(tokens.sample_index_t.clamp_max(0) * 2**32 + tokens.position_t).argsort()",
    ),
    Mutant(
        name="tokens of a block not sorted",
        file=CACHE,
        old="merged.append((block, row_n[order_n], token_n[order_n]))",
        new="merged.append((block, row_n, token_n.sort(descending=True).values))",
    ),
    Mutant(
        name="every received sample begins at row 0",
        file=CACHE,
        old="            first += len(routes.position_n)",
        new="            first += 0",
        scenario="r3",
    ),
    Mutant(
        name="the codes of the layers in reverse",
        file=STORAGE,
        old="return to_device(rows[to_device(rows_n, rows.device)], device)",
        new="return to_device(rows[to_device(rows_n, rows.device)].flip(1), device)",
    ),
    Mutant(
        name="a block's rows in reverse",
        file=STORAGE,
        old="rows[to_device(rows_n, rows.device)]",
        new="rows.flip(0)[to_device(rows_n, rows.device)]",
        in_short=True,
    ),
    # R3: exchange and reader.
    Mutant(
        name="answers with the layers in reverse",
        file=EXCHANGE,
        old="offered.read(row_n)[:, columns], ",
        new="offered.read(row_n)[:, columns[::-1]], ",
        scenario="r3",
    ),
    Mutant(
        name="answers shifted by a token",
        file=EXCHANGE,
        old="row_n = torch.searchsorted(offered.position_n, positions(request.ranges))",
        new="row_n = torch.searchsorted(offered.position_n, positions(request.ranges)).roll(1)",
        scenario="r3",
        in_short=True,
    ),
    Mutant(
        name="answers put together with the tokens in reverse",
        file=EXCHANGE,
        old="codes.view(-1, len(request.layers), top_k)",
        new="codes.view(-1, len(request.layers), top_k).flip(0)",
        scenario="r3",
    ),
    Mutant(
        name="the engine's layers in reverse",
        file=ROLLOUTS,
        old="return [given_layers.index(layer) for layer in cache.layers]",
        new="return [-1 - given_layers.index(layer) for layer in cache.layers]",
        scenario="r3",
    ),
    Mutant(
        name="the engine's routes begin one token late",
        file=ROLLOUTS,
        old="read=lambda index_n: codes_nlK[index_n]",
        new="read=lambda index_n: codes_nlK[index_n - 1]",
        scenario="r3",
    ),
    # R3 with tokens that the engine left out.
    Mutant(
        name="all tokens are live where some were left out",
        file=HOOKS,
        old="experts_tK = live_tK.where(microbatch.is_live_t1, experts_tK)",
        new="experts_tK = live_tK",
        scenario="r3_left_out",
        in_short=True,
    ),
    Mutant(
        name="tokens that were left out go to whatever is in their rows",
        file=TAPE,
        old="if imposes and not bool(microbatch.locations.has_routes_t.all()):",
        new="if False:",
        scenario="r3_left_out",
    ),
    Mutant(
        name="tokens that were left out are live in a rank's last chunk only",
        file=TAPE,
        old="if imposes and not bool(microbatch.locations.has_routes_t.all()):",
        new="if imposes and chunk is [*self._routers][-1]:",
        scenario="r3_left_out",
        meshes=("pp2-vpp2",),
        in_short=True,
    ),
    Mutant(
        name="tokens that were left out go to other experts than the best",
        file=HOOKS,
        old="experts_tK = live_tK.where(microbatch.is_live_t1, experts_tK)",
        new="experts_tK = ((live_tK + 1) % microbatch.num_experts).where(microbatch.is_live_t1, experts_tK)",
        scenario="r3_left_out",
        in_short=True,
    ),
    Mutant(
        name="the second token that was left out goes to another expert",
        file=HOOKS,
        old="experts_tK = live_tK.where(microbatch.is_live_t1, experts_tK)",
        new="experts_tK = live_tK.where(microbatch.is_live_t1, experts_tK)\n"
        "            left_t = microbatch.is_live_t1[:, 0].nonzero()[:, 0]\n"
        "            experts_tK[left_t[1]] = scores.detach()[left_t[1]].topk(topk, largest=False).indices",
        scenario="r3_left_out",
        meshes=("one",),
    ),
    Mutant(
        name="tokens that were left out take routes in recomputation",
        file=HOOKS,
        old="if microbatch.is_live_t1 is not None:\n            # Recomputation uses",
        new="if microbatch.is_live_t1 is not None and is_forward:\n            # Recomputation uses",
        scenario="r3_left_out",
    ),
    Mutant(
        name="the token after each that was left out is live in its place",
        file=CACHE,
        old="token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n)]",
        new="token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n + 1)]",
        scenario="r3_left_out",
    ),
    Mutant(
        name="one token more is live than was left out",
        file=CACHE,
        old="token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n)]",
        new="token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n)][1:]",
        scenario="r3_left_out",
        in_short=True,
    ),
    Mutant(
        name="a sample with tokens left out is live altogether",
        file=CACHE,
        old="token_n = token_n[~torch.isin(tokens.position_t[token_n], cached.missing_n)]",
        new="token_n = token_n[:0]",
        scenario="r3_left_out",
    ),
    Mutant(
        name="the exchange forgets what was left out",
        file=EXCHANGE,
        old="missing_n=positions(offer_of[sample].missing)",
        new="missing_n=NO_POSITIONS",
        scenario="r3_left_out",
    ),
    Mutant(
        name="the exchange loses a sample where tokens may be without routes",
        file=EXCHANGE,
        old="for sample, routes in assembled.items()",
        new="for sample, routes in assembled.items() if sample != 5",
        scenario="r3_left_out",
        in_short=True,
    ),
    Mutant(
        name="the rows of the next token where one was left out",
        file=ROLLOUTS,
        old="codes_TlK[is_given_T]).to(cache.dtype)",
        new="codes_TlK[is_given_T.roll(1)].clamp_min(0)).to(cache.dtype)",
        scenario="r3_left_out",
    ),
    # Drops of experts with a capacity.
    Mutant(
        name="drops not imposed",
        file=HOOKS,
        old="return gates_TE.masked_fill(dropped_TE, 0.0), routed_TE & ~dropped_TE",
        new="return None",
        scenario="drops",
        in_short=True,
    ),
    Mutant(
        name="drops of the token before",
        file=HOOKS,
        old="return gates_TE.masked_fill(dropped_TE, 0.0), routed_TE & ~dropped_TE",
        new="dropped_TE = dropped_TE.roll(1, 0)\n"
        "            return gates_TE.masked_fill(dropped_TE, 0.0), routed_TE & ~dropped_TE",
        scenario="drops",
    ),
    Mutant(
        name="drops not recorded",
        file=HOOKS,
        old="live_tK += num_experts * ~routed_TE.gather(1, live_tK.long())",
        new="live_tK += 0 * ~routed_TE.gather(1, live_tK.long())",
        scenario="drops",
    ),
    Mutant(
        name="live drops beside the imposed ones",
        file=HOOKS,
        old="with_capacity if microbatch.imposed_ltK is None else without_capacity",
        new="with_capacity",
        scenario="drops",
    ),
    # Which pass is replayed.
    Mutant(
        name="the reference replayed although live",
        file=POLICY,
        old='if self._replay.reference == "live":',
        new='if self._replay.reference == "replay":',
        scenario="rl_r2",
        in_short=True,
    ),
    Mutant(
        name="the reference live although replayed",
        file=POLICY,
        old='if self._replay.reference == "live":',
        new='if self._replay.reference == "replay":',
        scenario="rl_replayed_reference",
    ),
    Mutant(
        name="R2's updates only observed",
        file=POLICY,
        old='RoutingTape.observe if self._replay.kind == "none" else RoutingTape.impose',
        new="RoutingTape.observe",
        scenario="rl_r2",
    ),
    Mutant(
        name="R2's updates free",
        file=POLICY,
        old="if is_old_policy or not self._is_recorded:",
        new="if True:",
        scenario="rl_r2",
    ),
    Mutant(
        name="R3's pass for old logprobs is live",
        file=POLICY,
        old='return self._taped(microbatches, RoutingTape.impose, self._from_rollout, "rollout_routes")',
        new="return nullcontext(free_routing)",
        scenario="rl_r3",
    ),
    Mutant(
        name="R3 observes",
        file=POLICY,
        old="return self._taped(microbatches, RoutingTape.impose, self._from_rollout, name)",
        new="return self._taped(microbatches, RoutingTape.observe, self._from_rollout, name)",
        scenario="rl_r3",
    ),
    Mutant(
        name="the prompt's routes of the token before",
        file=CACHE,
        old="parts.append((giver.block, giver.first + row_n, shared_n))",
        new="parts.append((giver.block, giver.first + row_n - 1, shared_n))",
        scenario="rl_r3",
    ),
    Mutant(
        name="one token more than the prompt takes the group's first routes",
        file=ROLLOUTS,
        old="num_positions = int(is_other_T.int().argmax()) if is_other_T.any() else length",
        new="num_positions = min(length, int(is_other_T.int().argmax()) + 1)",
        scenario="rl_r3",
        in_short=True,
    ),
    Mutant(
        name="the routes of the next completion of a group",
        file=POLICY,
        old="group_index * group_size + index: self._given",
        new="group_index * group_size + (index + 1) % group_size: self._given",
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
