"""Texts mixed into the policy's updates: this rank's microbatches for each optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.data import DataConfig
from mcore_rl.config.rl.loss import PtxConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.batch import BatchSource, SampleDataset
from mcore_rl.data.chat import Chat
from mcore_rl.data.examples import read_examples
from mcore_rl.data.megatron.indexed import DataPlan, SampleCounts, build_datasets, plan_data
from mcore_rl.data.packing import PackedSequences, PackingOptions
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.schedule import MAX, Head, HeadOutput, ReadsDeferredLogits
from mcore_rl.megatron.vocab import Logits, logprobs_and_entropy
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.rl.batch import PolicyMicrobatch
from mcore_rl.train.loop import Run
from mcore_rl.train.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """The data of `rl.ptx`, after all checks."""

    packed: PackedSequences | None
    """Conversations; None if the texts are tokens on disk."""
    plan: DataPlan | None
    """Tokens on disk; None if the texts are conversations."""


class MixedHead(ReadsDeferredLogits):
    """Computes the policy's loss on completions and the cross entropy on the texts that follow them (PTX). The schedule
    divides both by completion tokens, so the texts' sum is first multiplied by completion tokens / text tokens.
    """

    wants_losses = False

    def __init__(
        self, policy: Head[PolicyMicrobatch], mesh: Mesh, *, vocab_size: int, chunk_tokens: int, weight: float
    ) -> None:
        """Prepare one optimizer step. Ids from `vocab_size` on have no probability; `chunk_tokens` positions at a time
        have logits in fp32. `weight` is rl.ptx.coeff x completion tokens / text tokens, trained tokens of the world.
        """
        self._policy, self._mesh, self._weight = policy, mesh, weight
        self._vocab_size, self._chunk_tokens = vocab_size, chunk_tokens
        self._without_completions: dict[str, Tensor] = {}

    def count(self, microbatch: PolicyMicrobatch | LocalMicrobatch) -> Tensor:
        """Return the number of trained completion tokens."""
        if isinstance(microbatch, PolicyMicrobatch):
            return self._policy.count(microbatch)
        return microbatch.loss_mask_Bs.new_zeros((), dtype=torch.int)

    def __call__(self, microbatch: PolicyMicrobatch | LocalMicrobatch, output: Logits) -> HeadOutput:
        """Return the loss of one microbatch, with `PolicyHead`'s outputs and the sum and count of the cross entropy."""
        if isinstance(microbatch, PolicyMicrobatch):
            result = self._policy(microbatch, output)
            self._without_completions = {
                name: torch.full_like(value, -torch.inf if name.startswith(MAX) else 0)
                for name, value in result.outputs.items()
            }
            zero = result.loss.detach().new_zeros(())
            result.outputs.update({"ptx_loss": zero, "ptx_count": zero})
            return result
        mask_T = microbatch.loss_mask_Bs[0]
        logprobs_T, _ = logprobs_and_entropy(
            output[0],
            microbatch.labels_Bs[0],
            self._mesh.tp,
            rows_N=microbatch.rows_N,
            vocab_size=self._vocab_size,
            temperature=1.0,
            chunk_tokens=self._chunk_tokens,
        )
        loss = -(logprobs_T * mask_T).sum()
        # A rank's first microbatches are completions; their statistics are zero (or -inf for maxima) for texts.
        outputs = self._without_completions | {"ptx_loss": loss.detach(), "ptx_count": mask_T.sum()}
        return HeadOutput(loss=self._weight * loss, count=self.count(microbatch), outputs=outputs)


class Texts:
    """Adds texts to each update. They depend only on the optimizer step, so a resumed run continues where it was."""

    def __init__(
        self, dataset: SampleDataset, ptx: PtxConfig, state: TrainState, *, vocab_size: int, chunk_tokens: int
    ) -> None:
        """Prepare this rank. `dataset` has sequences for all steps of the run; ids from `vocab_size` on have no
        probability; `chunk_tokens` positions at a time have logits in fp32.
        """
        self._state, self._mesh, self._device = state, state.mesh, state.platform.device
        self._source = BatchSource(dataset, micro_batch=1, dp_rank=self._mesh.dp.rank, dp_size=self._mesh.dp.size)
        self._ptx, self._vocab_size, self._chunk_tokens = ptx, vocab_size, chunk_tokens

    def in_update(
        self, head: Head[Any], microbatches: Sequence[PolicyMicrobatch | LocalMicrobatch], num_tokens: int
    ) -> tuple[Head[Any], Sequence[PolicyMicrobatch | LocalMicrobatch]]:
        """Return a head that computes both losses, and the microbatches followed by the texts' microbatches."""
        texts = self.microbatches(self._state.progress.step)
        mixed = MixedHead(
            head,
            self._mesh,
            vocab_size=self._vocab_size,
            chunk_tokens=self._chunk_tokens,
            weight=self._ptx.coeff * (num_tokens / max(self.num_tokens(texts), 1.0)),
        )
        return mixed, [*microbatches, *texts]

    def microbatches(self, step: int) -> list[LocalMicrobatch]:
        """Return this rank's microbatches of texts for optimizer step `step`, counted from 0."""
        size = self._ptx.sequences
        batch = self._source.microbatches(step * size, size)
        return [localize(microbatch, self._mesh.cp, self._device) for microbatch in batch]

    def num_tokens(self, microbatches: Sequence[LocalMicrobatch]) -> float:
        """Collective over the data- and context-parallel ranks: count the tokens in the cross entropy."""
        total = torch.stack([microbatch.loss_mask_Bs.double().sum() for microbatch in microbatches]).sum()
        dist.all_reduce(total, group=self._mesh.dp_cp.group)
        return total.item()


def read_texts(config: RlRunConfig, chat: Chat, pad_id: int) -> TextSource:
    """Return the texts of `rl.ptx` for all steps, padded with `pad_id`; DataError for lines of another form."""
    ptx, train, length = config.rl.ptx, config.train, config.packed_length
    num_sequences = train.steps * ptx.sequences
    if ptx.tokens:
        data = DataConfig(train=ptx.tokens, split=(1.0, 0.0, 0.0), seq_length=length)
        counts = SampleCounts(train=num_sequences, valid=0, test=0)
        return TextSource(packed=None, plan=plan_data(data, vocab_size=config.model.vocab_size, samples=counts))
    form = SFTDataConfig(train=ptx.files, seq_length=length, too_long="skip")
    packing = PackingOptions(
        row_length=length, length_multiple=config.mesh.zigzag, buffer=form.pack_buffer, seed=train.seed, pad_id=pad_id
    )
    packed = PackedSequences(read_examples(ptx.files, form, chat), packing, num_sequences)
    return TextSource(packed=packed, plan=None)


def load_texts(rl: RlConfig, seed: int, run: Run, source: TextSource, vocab_size: int) -> Texts:
    """Collective over the world: return the part that mixes texts into updates."""
    if source.packed is not None:
        examples = source.packed.examples
        counts = f"{len(examples)} conversations, {examples.num_skipped} too long and left out"
        for line in (f"rl.ptx: {counts}", *examples.notes):
            run.log.message(line)
        dataset: SampleDataset = source.packed
    else:
        assert source.plan is not None
        for text in source.plan.sources:
            run.log.message(f"rl.ptx: {text.describe(source.plan.samples.train)}")
        cache = run.folder.path / "index_cache"
        dataset = build_datasets(source.plan, seed=seed, cache_dir=cache).train
    return Texts(dataset, rl.ptx, run.state, vocab_size=vocab_size, chunk_tokens=rl.loss.logprob_chunk_tokens)
