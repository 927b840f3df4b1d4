"""Updates on a rollout that is given, on any mesh."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.replay import ReplayConfig, ReplayKind
from mcore_rl.config.rl.rollout import PromptConfig, RolloutConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.run import PlatformConfig, TrainConfig
from mcore_rl.data.examples import Examples
from mcore_rl.data.packing import PackedSequences, PackingOptions
from mcore_rl.errors import TrainingError
from mcore_rl.megatron.routers import replayed_routers, routers
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.metrics.metrics import reduced
from mcore_rl.model.build import copy_in, settle_weights, unwrap
from mcore_rl.rl.batch import Advantages, LogprobHead, Minibatch, evaluating
from mcore_rl.rl.models.reference import Reference, ReferencePass
from mcore_rl.rl.step.learner import Learner, OptionalParts, policy_logprobs
from mcore_rl.rl.step.policy_routes import PolicyLogprobs, PolicyRoutes
from mcore_rl.rl.step.routing_split import RoutingSplits
from mcore_rl.rl.step.texts import Texts
from mcore_rl.rl.types import Completion, Group, Rollout, SampleShape, StepReward, single_version
from mcore_rl.train.state import TrainState
from tests.generating import prompt_of
from tests.parallel.parity import Tensors, owned, set_up_plain
from tests.sections import advantage_config, loss_config
from tests.tiny_models import without_router_losses

GROUPS, SIZE = 6, 4


def run_config(
    model: ModelConfig, mesh: MeshConfig, replay: ReplayKind, optim: OptimConfig, **sections: Any
) -> RlRunConfig:
    """Two updates of each rollout of GROUPS prompts; `sections` of rl beside prompts and rollout."""
    return RlRunConfig(
        platform=PlatformConfig(layers="torch", precision="fp32"),
        model=without_router_losses(model),
        mesh=mesh,
        replay=ReplayConfig(kind=replay, max_disagreement=None),  # the random routes of R3 are like nobody's
        optim=optim,
        train=TrainConfig(steps=100, global_batch=GROUPS * SIZE // 2),
        rl=RlConfig(
            prompts=PromptConfig(max_tokens=8),
            rollout=RolloutConfig(prompts_per_step=GROUPS, group_size=SIZE, max_new_tokens=12, temperature=0.7),
            **sections,
        ),
    )


def rollout_of(config: RlRunConfig, dp_cp_rank: int, dp_cp_size: int, *, has_segments: bool = True) -> Rollout:
    """Ragged completions of random tokens, always the same; each replica has some of the groups. Some completions have
    tokens that were not sampled.
    """
    generator = torch.Generator().manual_seed(5)
    vocab = config.model.vocab_size

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, vocab, (length,), generator=generator).tolist()

    groups, shapes = {}, {}
    for number in range(GROUPS):
        prompt = prompt_of(tokens(1, 9), str(number))
        # As in an engine, which computes a prompt once.
        of_prompt = random_routes(config, len(prompt.tokens_T) - 1, generator)
        completions = []
        for place in range(SIZE):
            said = tokens(1, 13)
            spans, segments = turns_of(len(said), number + place)
            if segments and not has_segments:
                spans, segments = None, ()
            logprobs = (-1 - 6 * torch.rand(len(said), generator=generator)).tolist()
            completions.append(
                Completion(
                    text="",
                    tokens_T=tuple(said),
                    logprobs_T=tuple(logprobs),
                    versions=single_version(0, len(said)),
                    finish="stop",
                    experts_TLK=torch.cat([of_prompt, random_routes(config, len(said) - len(segments), generator)])
                    if config.wants_engine_routes
                    else None,
                    segments=segments,
                )
            )
            shapes[number * SIZE + place] = SampleShape(
                replica_rank=number % dp_cp_size,
                num_prompt_tokens=len(prompt.tokens_T),
                num_completion_tokens=len(said),
                is_trained=(number, place) != (2, 1),
                sampled_spans=spans,
                segments=segments,
            )
        if number % dp_cp_size == dp_cp_rank:
            groups[number] = Group(prompt=prompt, completions=tuple(completions))
    rewards_PG = torch.rand(GROUPS, SIZE, generator=generator, dtype=torch.float64)
    return Rollout(
        groups=groups,
        rewards_PG=rewards_PG,
        shapes=shapes,
        num_prompts=GROUPS,
        metrics=[],
        steps_PGI=[
            [steps_of(len(sampled_positions(shapes[p * SIZE + g])), rewards_PG[p, g].item()) for g in range(SIZE)]
            for p in range(GROUPS)
        ],
    )


def turns_of(length: int, number: int) -> tuple[tuple[tuple[int, int], ...] | None, tuple[int, ...]]:
    """Spans and segments. For two of three completions that are long enough: two turns, and between them a token of an
    environment, or the first two tokens of another segment.
    """
    if number % 3 == 0 and length > 3:
        return ((0, 2), (3, length)), ()
    return (((0, 2), (4, length)), (2,)) if number % 3 == 1 and length > 4 else (None, ())


def sampled_positions(shape: SampleShape) -> list[int]:
    """Positions at which the sampled tokens of a completion are predicted."""
    spans = shape.sampled_spans or ((0, shape.num_completion_tokens),)
    sampled = [t for start, end in spans for t in range(start, end)]
    # The last token of a segment has no position.
    return [shape.num_prompt_tokens - 1 + t - sum(start <= t for start in shape.segments) for t in sampled]


def steps_of(length: int, reward: float) -> list[StepReward]:
    """One at every third token and one at the last."""
    return [StepReward(end, reward - end) for end in sorted({*range(2, length, 3), length - 1})]


def random_routes(config: RlRunConfig, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Experts of each token and layer that no router would choose, for R3; none without it."""
    if not config.wants_engine_routes:
        return torch.zeros(0)
    moe, num_layers = config.model.moe, sum(config.model.moe_layers)
    scores = torch.rand(num_tokens, num_layers, moe.num_experts, generator=generator)
    return scores.topk(moe.top_k).indices.to(torch.uint8)


def reference_pass(
    config: RlRunConfig, reference: Reference, logprobs: PolicyLogprobs, routes: PolicyRoutes, state: TrainState
) -> ReferencePass:
    return ReferencePass(
        reference,
        config.rl.loss,
        config.replay,
        logprobs,
        routes,
        state,
        updates_per_rollout=config.updates_per_rollout,
    )


def texts_pass(config: RlRunConfig, state: TrainState) -> Texts:
    return Texts(
        conversations(config),
        config.rl.ptx,
        state,
        vocab_size=config.model.vocab_size,
        chunk_tokens=config.rl.loss.logprob_chunk_tokens,
    )


def splits_of(learner: Learner) -> RoutingSplits:
    config, state = learner.config, learner.state
    return RoutingSplits(
        policy_logprobs(state, config.rl, config.model.vocab_size),
        learner.routes,
        config.replay,
        state,
        updates_per_rollout=config.updates_per_rollout,
        is_ahead=bool(config.rl.rollout.max_staleness),
    )


def updates(
    config: RlRunConfig, initial: Tensors, other: Tensors, folder: Path, changes: Sequence[dict[str, Any]]
) -> list[list[dict[str, float]]]:
    """On a rank, for each change of rl.loss: the report of every update of one rollout, from `initial` weights, with
    `other` ones as the reference.
    """
    state = set_up_plain(config)
    mesh = state.mesh
    found = []
    for number, change in enumerate(changes):
        loss = {name: value for name, value in change.items() if name != "advantage"}
        rl = config.rl.model_copy(
            update={"loss": loss_config(**loss), "advantage": advantage_config(kind=change.get("advantage", "zscore"))}
        )
        varied = config.model_copy(update={"rl": rl})
        reference = None
        if varied.rl.loss.kl_coeff:
            copy_in(state.chunks, other)
            reference = Reference(state.chunks, mesh, config.model, folder / str(number), folder / "checkpoints")
        copy_in(state.chunks, initial)
        state.optimizer.reload_model_params()
        routes = PolicyRoutes(state, varied.rl, varied.replay)
        logprobs = policy_logprobs(state, varied.rl, config.model.vocab_size)
        kl = None if reference is None else reference_pass(varied, reference, logprobs, routes, state)
        learner = Learner(state, varied, routes, logprobs, OptionalParts(reference=kl))
        rollout = rollout_of(varied, mesh.dp_cp.rank, mesh.dp_cp.size)
        minibatches = learner.prepared(rollout)
        advantages = learner.advantages(rollout, minibatches)
        reports = [
            learner.update(minibatch, advantages) for _ in range(varied.rl.update.epochs) for minibatch in minibatches
        ]
        found.append(
            [replaced(report.sums) | {"grad_norm": report.grad_norm, "loss": report.loss} for report in reports]
        )
    return found


def begin(config: RlRunConfig, initial: Tensors) -> tuple[Rollout, PolicyRoutes, Learner, list[Minibatch]]:
    """On a rank: a rollout, its routes, and the minibatches of a learner with weights `initial`, with old logprobs."""
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    routes = PolicyRoutes(state, config.rl, config.replay)
    learner = Learner(state, config, routes, policy_logprobs(state, config.rl, config.model.vocab_size))
    rollout = rollout_of(config, state.mesh.dp_cp.rank, state.mesh.dp_cp.size, has_segments=False)
    minibatches = learner.minibatches(rollout)
    routes.begin(rollout, [each for one in minibatches for each in one.microbatches])
    return rollout, routes, learner, learner.with_old_logprobs(minibatches)


def with_overflow(config: RlRunConfig, initial: Tensors) -> list[tuple[bool, int]]:
    """On a rank: of two updates, in the first of which a token's hidden state overflows before the last router, whether
    it was skipped, and the number of skipped steps so far.
    """
    rollout, _, learner, minibatches = begin(config, initial)
    advantages = learner.advantages(rollout, minibatches)
    (*_, (_, router)) = [pair for chunk in learner.state.chunks for pair in routers(chunk)]

    def overflow(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_sBD = inputs[0].clone()
        hidden_sBD[::3] = torch.inf
        return (hidden_sBD, *inputs[1:])

    hook = router.register_forward_pre_hook(overflow)
    found = []
    for minibatch in minibatches:
        report = learner.update(minibatch, advantages)
        assert report is not None
        found.append((report.skipped, learner.state.progress.skipped_steps))
        hook.remove()
    return found


def without_gradients(config: RlRunConfig, initial: Tensors) -> dict[str, str]:
    """On a rank: for each way in which an update has no gradient, its gradient norm, or the error that ends the run."""
    rollout, _, learner, minibatches = begin(config, initial)
    decoder = unwrap(learner.state.chunks[0]).decoder
    output_layer = unwrap(learner.state.chunks[0]).output_layer
    advantages = learner.advantages(rollout, minibatches)
    nothing = replace(advantages, of_samples={index: 0 * one for index, one in advantages.of_samples.items()})

    def outcome(advantages: Advantages) -> str:
        try:
            report = learner.update(minibatches[0], advantages)
        except TrainingError as error:
            return str(error)
        assert report is not None
        return f"gradient norm {report.grad_norm}"

    found = {"no advantage": outcome(nothing)}
    # As where a changed module cuts the graph, and what comes after it is frozen.
    output_layer.requires_grad_(False)
    decoder.final_layernorm.requires_grad_(False)
    cut = decoder.final_layernorm.register_forward_hook(lambda *call: call[-1].detach().requires_grad_())
    found |= {"cut, no advantage": outcome(nothing), "cut": outcome(advantages)}
    cut.remove()
    decoder.final_layernorm.register_forward_hook(lambda *call: call[-1].detach())
    return found | {"detached": outcome(advantages)}


def cached_bytes(config: RlRunConfig, initial: Tensors) -> list[float]:
    """On a rank: bytes of the routes in the caches at the end of three rollouts, one after the other."""
    rollout, routes, learner, minibatches = begin(config, initial)
    found = []
    for _ in range(3):
        advantages = learner.advantages(rollout, minibatches)
        for minibatch in minibatches:
            learner.update(minibatch, advantages)
        found.append([m.value for m in routes.take_metrics() if m.name == "routes/cached_bytes"][-1])
        minibatches = learner.minibatches(rollout)
        routes.begin(rollout, [each for one in minibatches for each in one.microbatches])
        minibatches = learner.with_old_logprobs(minibatches)
    return found


def expert_biases(config: RlRunConfig, initial: Tensors) -> list[Any]:
    """On a rank: the pieces of the biases on the choice of experts after the two updates of a rollout."""
    rollout, _, learner, minibatches = begin(config, initial)
    advantages = learner.advantages(rollout, minibatches)
    for minibatch in minibatches:
        learner.update(minibatch, advantages)
    return [piece for piece in owned(learner.state) if piece[0].endswith("expert_bias")]


def routing_splits(config: RlRunConfig, initial: Tensors) -> dict[str, float]:
    """On a rank: the split of both mismatches of the first of two minibatches, and what its updates measure themselves:
    the first one that of the engine, the one of the second epoch that of the old policy after the two updates.
    """
    rollout, _, learner, minibatches = begin(config, initial)
    advantages = learner.advantages(rollout, minibatches)
    splits = splits_of(learner)
    metrics = splits.before_updates(minibatches)
    first, _ = [learner.update(minibatch, advantages) for minibatch in minibatches]
    metrics += splits.after_updates(minibatches[:1])
    third = learner.update(minibatches[0], advantages)
    assert first is not None and third is not None
    before, after = replaced(first.sums), replaced(third.sums)
    return reduced(metrics) | {
        "update/mismatch_kl": before["mismatch_kl"],
        "update/kl_old": after["kl_old"],
        "update/ratio_variance": after["ratio_minus_1_squared"] - after["ratio_minus_1"] ** 2,
    }


def splits_by_hand(config: RlRunConfig, initial: Tensors) -> dict[str, Any]:
    """On a single rank: KL(rollout policy || trainer) over the first minibatch with the engine's routes from each layer
    on, imposed by hooks of their own, while nothing answers the routers of the layers before it.

    Returns:
        The KL by first imposed layer, and the metrics of the split.
    """
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    (chunk,) = state.chunks
    routes = PolicyRoutes(state, config.rl, config.replay)
    learner = Learner(state, config, routes, policy_logprobs(state, config.rl, config.model.vocab_size))
    rollout = rollout_of(config, 0, 1)
    minibatches = learner.minibatches(rollout)
    routes.begin(rollout, [each for one in minibatches for each in one.microbatches])
    experts = [completion.experts_TLK for _, one in sorted(rollout.groups.items()) for completion in one.completions]
    temperature = config.rl.rollout.temperature
    head = LogprobHead(state.mesh, config.model.vocab_size, temperature=temperature, chunk_tokens=4096)
    by_first = {}
    for first in range(config.model.num_layers + 1):
        total, count = 0.0, 0
        for one in minibatches[0].microbatches:
            # Positions in the order of the samples; padding and last tokens reach no logprob and go anywhere.
            rows_TLK = torch.arange(config.model.moe.top_k).repeat(one.shape[1], config.model.num_layers, 1)
            begin = 0
            for span in one.spans:
                given_TLK = experts[span.sample]
                assert given_TLK is not None
                of_span_TLK = given_TLK[span.first_position :][: span.num_tokens]
                rows_TLK[begin : begin + span.num_tokens] = of_span_TLK.long()
                begin += span.num_positions
            hooks = [
                router.register_forward_hook(imposing_by_hand(rows_TLK[:, layer]))
                for layer, router in replayed_routers(chunk)
                if layer >= first
            ]
            with torch.no_grad(), evaluating(state.chunks):
                (output,) = run_pass(state.chunks, [one], head, backward=False)
            for hook in hooks:
                hook.remove()
            difference_T = (output["logprobs"] - one.rollout_logprobs_T).double()[one.mask_T]
            total += float((difference_T.exp() - 1 - difference_T).sum())
            count += int(one.mask_T.sum())
        by_first[first] = total / count
    return {"by_hand": by_first, "split": reduced(splits_of(learner).before_updates(minibatches))}


def imposing_by_hand(experts_TK: Tensor) -> Any:
    """A hook after a router that gives its tokens to these experts, with the softmax of their logits as gates."""

    def impose(router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits_TE = inputs[0].flatten(0, 1).float() @ router.weight.float().t()
        gates_TK = logits_TE.gather(1, experts_TK).softmax(-1)
        gates_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, gates_TK)
        return gates_TE, torch.zeros_like(output[1]).scatter(1, experts_TK, True)

    return impose


def router_shifts(config: RlRunConfig, initial: Tensors) -> dict[str, float]:
    """On a single rank: the mean router-shift ratio that the two updates of a rollout report, and that of the second
    from the logits and choices of the routers, observed in its pass for old logprobs and in its forward.
    """
    state = set_up_plain(config)
    (chunk,) = state.chunks
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    calls: list[tuple[Tensor, Tensor]] = []

    def observed(router: TopKRouter) -> None:
        gating, logits = router.gating, []

        def keep(*args: Any) -> Tensor:
            logits.append(gating(*args))
            return logits[-1]

        router.gating = keep
        router.register_forward_hook(lambda _, inputs, output: calls.append((logits[-1].detach(), output[1].detach())))

    for module in chunk.modules():
        if isinstance(module, TopKRouter) and module.layer_number <= config.model.num_layers:
            observed(module)
    routes = PolicyRoutes(state, config.rl, config.replay)
    texts = None
    if config.rl.ptx.coeff:
        texts = texts_pass(config, state)
    logprobs = policy_logprobs(state, config.rl, config.model.vocab_size)
    learner = Learner(state, config, routes, logprobs, OptionalParts(texts=texts))
    rollout = rollout_of(config, 0, 1)
    minibatches = learner.minibatches(rollout)
    routes.begin(rollout, [each for one in minibatches for each in one.microbatches])
    first, second = learner.with_old_logprobs(minibatches)
    old_calls = calls.copy()
    advantages = learner.advantages(rollout, minibatches)
    reports = [learner.update(first, advantages)]
    calls.clear()
    reports.append(learner.update(second, advantages))
    num_layers = sum(config.model.moe_layers)
    assert len(old_calls) == num_layers * len(second.microbatches)
    # Texts come after the completions.
    num_texts = 0 if texts is None else len(texts.microbatches(1))
    assert len(calls) == len(old_calls) + num_layers * num_texts
    log = log_sigmoid if config.model.family == "deepseek_v3" else torch.log_softmax
    shifts = []
    for index, microbatch in enumerate(second.microbatches):
        here = slice(index * num_layers, (index + 1) * num_layers)
        moved = [
            (log(old.double(), -1) - log(new.double(), -1)).view(used.shape).abs()[used].view(len(used), -1)
            for (old, used), (new, _) in zip(old_calls[here], calls[here], strict=True)
        ]
        shift_T = torch.stack(moved).mean((0, 2)).neg().exp()
        shifts.append(shift_T[microbatch.mask_T])
    found = [replaced(report.sums)["router_shift"] for report in reports]
    return {"on-policy": found[0], "reported": found[1], "by hand": float(torch.cat(shifts).mean())}


def log_sigmoid(logits: Tensor, _: int) -> Tensor:
    return logits.sigmoid().log()


def conversations(config: RlRunConfig) -> PackedSequences:
    """Ragged conversations of random tokens, packed alike on every mesh; a part of each is the assistant's."""
    generator = numpy.random.default_rng(2)
    lengths = generator.integers(4, 20, 40)
    examples = Examples(
        ids_T=generator.integers(0, config.model.vocab_size, lengths.sum(), dtype=numpy.int32),
        assistant_mask_T=generator.random(lengths.sum()) < 0.5,
        starts_N=numpy.array([0, *lengths.cumsum()]),
        source_sizes=(len(lengths),),
        num_skipped=0,
    )
    packing = PackingOptions(row_length=config.packed_length, length_multiple=4, buffer=40, seed=1, pad_id=0)
    return PackedSequences(examples, packing, 4 * config.rl.ptx.sequences)


def token_advantages(config: RlRunConfig) -> list[tuple[int, int, float]]:
    """On a rank of the last stage: sample, position and advantage of each trained token of its microbatches."""
    state = set_up_plain(config)
    routes = PolicyRoutes(state, config.rl, config.replay)
    learner = Learner(state, config, routes, policy_logprobs(state, config.rl, config.model.vocab_size))
    rollout = rollout_of(config, state.mesh.dp_cp.rank, state.mesh.dp_cp.size)
    minibatches = learner.minibatches(rollout)
    advantages = learner.advantages(rollout, minibatches)
    found = []
    for minibatch in minibatches:
        for one in minibatch.microbatches:
            weighted = one.with_advantages(advantages.of_samples, minibatch.loss_weights_N)
            for t in one.mask_T.nonzero().flatten().tolist():
                sample = one.samples[int(one.sequence_T[t])]
                found.append((sample, int(one.place_T[t]), float(weighted.advantages_T[t])))
    return found if state.mesh.is_last_stage else []


def replaced(sums: dict[str, float]) -> dict[str, float]:
    """Sums as means over tokens, so that numbers of all kinds are about as large."""
    return {name: value if name.startswith("max/") else value / sums["count"] for name, value in sums.items()}


def moved_parameters(config: RlRunConfig) -> dict[str, bool]:
    """On a rank of a single chunk: for each parameter and buffer, whether one rollout's updates change it."""
    state = set_up_plain(config)
    (chunk,) = state.chunks
    tensors = dict(chunk.named_parameters()) | dict(chunk.named_buffers())
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    routes = PolicyRoutes(state, config.rl, config.replay)
    learner = Learner(state, config, routes, policy_logprobs(state, config.rl, config.model.vocab_size))
    rollout = rollout_of(config, state.mesh.dp_cp.rank, state.mesh.dp_cp.size)
    minibatches = learner.minibatches(rollout)
    routes.begin(rollout, [each for one in minibatches for each in one.microbatches])
    minibatches = learner.with_old_logprobs(minibatches)
    for minibatch in minibatches:
        learner.update(minibatch, learner.advantages(rollout, minibatches))
    settle_weights(state.chunks)
    return {name: not torch.equal(tensor, before[name]) for name, tensor in tensors.items()}
