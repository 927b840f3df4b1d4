"""Gradients of a pass with every loss of the routers are those of transformers and the papers' formulas."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import copy_in
from mcore_rl.model.router_load import RouterLoad
from mcore_rl.train.setup import set_up
from mcore_rl.train.step import take_mtp_losses
from tests.hf_models import Tensors, oracle
from tests.hf_weights import to_global
from tests.parallel.parity import assembled, config_of, gradients_of, largest, relative_errors
from tests.routed_batches import Case, Sequence, local_microbatch, microbatches_of
from tests.unit.model.test_mtp_equals_transformers import main_and_mtp, named, our_model

COEFF, Z_COEFF, MTP_COEFF = 0.5, 0.1, 0.3
KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
CASES = [Case(balance=kind, micro_batch=rows) for kind in KINDS for rows in (2, 4)]
CASES += [Case(balance=kind, micro_batch=2, is_packed=True) for kind in KINDS]
CASES += [
    Case(balance="seq_aux_loss", micro_batch=2, is_packed=True, recompute=True),
    Case(balance="aux_loss", micro_batch=2, capacity_factor=0.75),
    Case(balance="aux_loss", micro_batch=2, is_packed=True, capacity_factor=0.75),
    Case(balance="seq_aux_loss", micro_batch=4, mtp=True),
    Case(balance="seq_aux_loss", micro_batch=2, is_packed=True, mtp=True),
]


@dataclass
class Formula:
    """The routers' losses of transformers' model, in float64: sums over the groups of T times the group's loss."""

    case: Case
    is_sigmoid: bool
    balance: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    z: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    routed: int = 0
    """Tokens, in one layer."""
    is_token_NS: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Which positions of the batch that the model is reading are tokens."""
    choices_so_far: dict[Any, Tensor] = field(default_factory=dict)

    def __call__(self, gate: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Add the losses of one router, and set the weights of choices beyond the capacity to zero."""
        logits, weights_TK, experts_TK = output
        logits_NSE = logits.double().view(*self.is_token_NS.shape, -1)
        num_experts = logits_NSE.shape[-1]
        top_k = experts_TK.shape[-1]
        scores = logits_NSE.sigmoid() if self.is_sigmoid else logits_NSE.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(top_k).indices, 1.0)
        per_sequence = [(chosen[n][is_token], scores[n][is_token]) for n, is_token in enumerate(self.is_token_NS)]
        groups = (
            per_sequence
            if self.case.balance == "seq_aux_loss"
            else [tuple(torch.cat(parts) for parts in zip(*per_sequence, strict=True))]
        )
        for chosen_TE, scores_TE in groups:
            num_chosen_E = chosen_TE.sum(0)
            if self.case.balance == "global_aux_loss":
                num_chosen_E = num_chosen_E + self.choices_so_far.get(gate, 0)
                self.choices_so_far[gate] = num_chosen_E
            share_E, mean_E = num_chosen_E / num_chosen_E.sum(), scores_TE.mean(0)
            self.balance = self.balance + len(scores_TE) * num_experts * (share_E * mean_E).sum()
        self.z = self.z + logits_NSE[self.is_token_NS].logsumexp(-1).square().sum()
        return logits, weights_TK * self.has_room(weights_TK, experts_TK, num_experts), experts_TK

    def has_room(self, weights_TK: Tensor, experts_TK: Tensor, num_experts: int) -> Tensor:
        """1 for the choices with the largest weights of each expert, up to its capacity."""
        if self.case.capacity_factor is None:
            return torch.ones_like(weights_TK)
        is_token_T = self.is_token_NS.flatten()
        capacity = math.ceil(int(is_token_T.sum()) * experts_TK.shape[1] / num_experts * self.case.capacity_factor)
        kept_TK = torch.zeros_like(weights_TK)
        for expert in range(num_experts):
            asking = ((experts_TK == expert) & is_token_T[:, None]).nonzero().tolist()
            asking.sort(key=lambda place: -weights_TK[tuple(place)].item())
            for place in asking[:capacity]:
                kept_TK[tuple(place)] = 1.0
        return kept_TK


def filled(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, labels, mask and is_token `[N, S]`; what follows a sequence does not reach it."""
    longest = max(sequence.length for sequence in sequences)
    shape = len(sequences), longest
    inputs, labels = torch.zeros(2, *shape, dtype=torch.int64)
    mask, is_token = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for n, sequence in enumerate(sequences):
        inputs[n, : sequence.length], labels[n, : sequence.length] = (sequence.tokens_T[:-1], sequence.tokens_T[1:])
        mask[n, : sequence.length], is_token[n, : sequence.length] = sequence.mask_S, True
    return inputs, labels, mask, is_token


def shifted(values_NS: Tensor, lengths: list[int]) -> Tensor:
    """Each sequence one token further on, with zero after its end."""
    moved = torch.zeros_like(values_NS)
    for n, length in enumerate(lengths):
        moved[n, : length - 1] = values_NS[n, 1:length]
    return moved


def gradients_by_the_formula(main: Any, mtp: Any, case: Case) -> tuple[Tensors, Formula]:
    """Gradients of the training loss, by autograd through transformers' model."""
    formula = Formula(case, is_sigmoid=mtp is not None)
    modules = [*main.modules(), *(mtp.modules() if mtp is not None else ())]
    gates = {module for module in modules if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))}
    hooks = [gate.register_forward_hook(formula) for gate in gates]
    main.zero_grad()
    if mtp is not None:
        mtp.zero_grad()
    loss, counted = torch.zeros((), dtype=torch.float64), 0.0
    for rows in microbatches_of(case):
        sequences = [sequence for row in rows for sequence in row]
        lengths = [sequence.length for sequence in sequences]
        inputs, labels, mask, formula.is_token_NS = filled(sequences)
        formula.routed += sum(lengths)
        counted += mask.sum().item()
        hidden = main.model(inputs).last_hidden_state
        loss = loss + total(main.lm_head(hidden), labels, mask)
        for depth in range(2 if mtp is not None else 0):
            inputs, labels, mask = (shifted(values, lengths) for values in (inputs, labels, mask))
            hidden = mtp.forward_layer(depth, hidden, torch.arange(inputs.shape[1])[None], None, input_ids=inputs)
            loss = loss + MTP_COEFF / 2 * total(main.lm_head(hidden), labels, mask)
    loss = loss / counted + (COEFF * formula.balance + Z_COEFF * formula.z) / formula.routed
    loss.backward()
    for hook in hooks:
        hook.remove()
    tensors = named(main, mtp) if mtp is not None else dict(main.named_parameters())
    return {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in tensors.items()}, formula


def total(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


def both_models(case: Case) -> tuple[Any, Any, ModelConfig, Tensors]:
    """transformers' model, its MTP layers, our config and the weights."""
    if case.mtp:
        main, mtp = main_and_mtp("DeepseekV3")
        model = our_model(main)
        weights = {name: tensor.detach().clone() for name, tensor in named(main, mtp).items()}
    else:
        theirs = oracle("qwen3_moe")
        main, mtp, model, weights = theirs.model, None, theirs.ours, theirs.tensors
    moe = model.moe.model_copy(
        update={
            "balance": case.balance,
            "aux_loss_coeff": COEFF,
            "z_loss_coeff": Z_COEFF,
            "capacity_factor": case.capacity_factor,
        }
    )
    return main, mtp, model.model_copy(update={"moe": moe}), to_global(weights, model)


@pytest.mark.matrix("seq_aux_loss, 4 rows", "aux_loss, 2 rows, capacity")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_those_of_the_formulas(case: Case) -> None:
    main, mtp, model, weights = both_models(case)
    theirs, formula = gradients_by_the_formula(main, mtp, case)
    config = config_of(model, MeshConfig())
    if case.recompute:
        settings = config.platform.model_copy(update={"recompute": "full"})
        config = config.model_copy(update={"platform": settings})
    try:
        state = set_up(config, start(config.platform))
        copy_in(state.chunks, weights)
        microbatches = [local_microbatch(rows, case.is_packed, state) for rows in microbatches_of(case)]
        load = RouterLoad(state.chunks)
        ours = assembled([gradients_of(state, microbatches)])
        taken = [*load.gather(state.mesh).metrics(), *(take_mtp_losses(state) if case.mtp else [])]
        metrics = {metric.name: metric.value for metric in taken}
    finally:
        destroy_mesh()
    expected = {key: value for key, value in to_global(theirs, model).items() if not key.endswith("expert_bias")}
    errors = relative_errors({key: ours[key] for key in expected}, expected)
    assert max(errors.values()) <= 2e-5, largest(errors)
    num_layers = sum(model.moe_layers) + model.mtp_layers
    for name, value in (("moe/aux_loss", formula.balance), ("moe/z_loss", formula.z)):
        assert metrics[name] == pytest.approx(value.item() / formula.routed / num_layers, rel=1e-5)
