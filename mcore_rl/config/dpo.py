"""The config of preference optimisation: DPO and its family."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.config.section import Section, Text

DPOKind = Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo"]


class DPOSection(Section):
    """Loss on pairs of answers. The reward of an answer is beta times its gain in logprob over the reference."""

    loss: DPOKind = "sigmoid"
    """Loss of a pair; `sigmoid`: DPO (arXiv 2305.18290), with `label_smoothing` cDPO; `robust`: DPO without the bias of
    flipped labels (arXiv 2403.00409); `ipo`: squared distance to 1 / (2 beta) (arXiv 2310.12036); `hinge`: the hinge
    loss of RSO (arXiv 2309.06657); `simpo`: mean logprobs, without a reference (arXiv 2405.14734); `orpo`: odds ratio
    and cross entropy, without a reference (arXiv 2403.07691)."""
    beta: PositiveFloat = 0.1
    """Factor on the rewards: with a larger value the policy stays closer to the reference. For orpo, the weight of the
    odds ratio. SimPO's paper uses 2.0 to 2.5, ORPO's 0.1."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair in the data has its answers swapped."""
    length_normalised: bool | Literal["auto"] = "auto"
    """Whether an answer's logprob is divided by its number of tokens; `auto`: for simpo and orpo."""
    target_margin: NonNegativeFloat = 0.0
    """Margin by which the chosen answer's reward should be larger, SimPO's gamma; its paper uses 0.3 to 1.6 for its
    betas."""
    margin_coeff: NonNegativeFloat = 0.0
    """Factor on the margin of a pair in the data (data.margin_field), which is added to `target_margin` as in ODPO
    (arXiv 2402.10571); 0: margins are not used."""
    nll_coeff: NonNegativeFloat | Literal["auto"] = "auto"
    """Weight of the chosen answer's cross entropy per token, which keeps its logprob from falling (arXiv 2404.19733);
    `auto`: 1 for orpo, otherwise 0."""
    reference: Text | None = None
    """Checkpoint of the reference model; `none`: the weights that the run starts from."""
    reference_cache: Text | Literal["auto"] = "auto"
    """Folder for the reference's logprobs, which runs on the same data from the same checkpoint can share; `auto`:
    `<run_dir>/reference_logprobs`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Number of tokens with fp32 logits at a time; for deferred logits, `platform.logits_chunk_tokens` applies."""

    @cached_property
    def uses_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return self.loss not in ("simpo", "orpo")

    @cached_property
    def is_length_normalised(self) -> bool:
        """`length_normalised` with "auto" resolved."""
        auto = self.length_normalised == "auto"
        return self.loss in ("simpo", "orpo") if auto else bool(self.length_normalised)

    @cached_property
    def nll_weight(self) -> float:
        """`nll_coeff` with "auto" resolved."""
        return float(self.loss == "orpo") if self.nll_coeff == "auto" else self.nll_coeff


class DPOConfig(PreferenceRunConfig):
    """`mcore-rl dpo`."""

    run_dir: str = "runs/dpo"
    """Folder of everything that the run writes; one run, one folder, one writer."""
    dpo: DPOSection = DPOSection()
