"""One rank of preference optimisation: `mcore-rl dpo`, or `torchrun ... -m mcore_rl.programs.dpo CONFIG.toml`."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor

from mcore_rl.checks.tuning import check_dpo
from mcore_rl.config.preferences import DPOConfig
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.model.adapters import adapters_off
from mcore_rl.programs.open_run import run_rank
from mcore_rl.programs.preferences import PreferenceData, train_on_preferences
from mcore_rl.rl.models.reference import Reference
from mcore_rl.storage.checkpoint import saved_steps
from mcore_rl.storage.checkpoints.read import inspect
from mcore_rl.storage.checkpoints.write import load_weights, refuse_other_adapters
from mcore_rl.train import preferences
from mcore_rl.train.loop import Run
from mcore_rl.train.preference_losses import DPOHead

GROUPS_AT_A_TIME = 64
"""Prompts per data-parallel rank in a pass of the reference."""


def main(argv: Sequence[str]) -> int:
    """Optimise on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped as asked."""
    return run_rank(train, DPOConfig, argv)


def trainer_of(config: DPOConfig, run: Run, data: PreferenceData) -> preferences.PreferenceTrainer:
    """Collective over the world: return the trainer, once the reference's logprobs are there."""
    mesh = run.state.mesh
    logprobs = preferences.AnswerLogprobHead(mesh, config.model.vocab_size, config.dpo.logprob_chunk_tokens)
    sources = [data.train] if data.valid is None else [data.train, data.valid]
    if config.dpo.uses_reference:
        sources = with_reference(config, run, sources, logprobs)
    head = DPOHead(logprobs, mesh, config.dpo)
    return preferences.PreferenceTrainer(run, head, train=sources[0], valid=sources[1] if len(sources) > 1 else None)


def with_reference(
    config: DPOConfig, run: Run, sources: Sequence[preferences.PreferenceSource], head: preferences.AnswerLogprobHead
) -> list[preferences.PreferenceSource]:
    """Collective over the world: return the sources with the reference's logprobs, from the cache if they are there.

    Raises CheckpointError if they must be computed, and the run's reference is gone or has changed.
    """
    origin = on_rank_zero(partial(preferences.find_origin, config, run.folder))
    found = []
    for source in sources:
        path = preferences.cache_path(config, origin, source.preferences, run.folder.path)
        logprobs, warning = on_rank_zero(partial(preferences.read_cached, path, len(source.preferences.starts_N) - 1))
        if warning:
            run.log.message(warning)
        if logprobs is not None:
            run.log.message(f"the reference's logprobs of {len(logprobs)} answers are those of {path}")
        else:
            logprobs = _computed(config, run, source, head, origin)
            on_rank_zero(partial(preferences.write_cached, path, logprobs))
        found.append(source.with_reference(logprobs))
    return found


def _computed(
    config: DPOConfig,
    run: Run,
    source: preferences.PreferenceSource,
    head: preferences.AnswerLogprobHead,
    origin: preferences.ReferenceOrigin,
) -> Tensor:
    """Collective over the world: return the logprobs of all answers under the reference."""
    state, start_s = run.state, time.perf_counter()
    # Rank 0 decides: another rank may see a shared folder later, and would not join the passes below.
    has_trained = on_rank_zero(lambda: bool(saved_steps(run.folder.checkpoints)))
    with ExitStack() as stack:
        if has_trained or config.dpo.reference is not None:
            # The modules do not have the reference's weights, which replace theirs for this pass.
            on_rank_zero(partial(preferences.refuse_changed_origin, origin))
            refuse_other_adapters(inspect(Path(origin.checkpoint)), config.lora)
            folder = run.folder
            reference = Reference(state.chunks, state.mesh, config.model, folder.path / "reference", folder.checkpoints)
            stack.enter_context(reference.installed())
            stored = load_weights(
                state.chunks,
                state.mesh,
                config.model,
                Path(origin.checkpoint),
                verify_checksums=config.checkpoint.verify_checksums,
                allowed=config.checkpoint.allow_changes,
            )
            if not stored.has_adapters:
                stack.enter_context(adapters_off(state.chunks))
        with state.timers.phase("reference"):
            logprobs = preferences.answer_logprobs(
                state,
                source,
                head,
                groups_at_a_time=GROUPS_AT_A_TIME * state.mesh.dp.size,
                # The pass over all data may take hours: each batch has the time of a save.
                before_each=partial(run.watchdog.begin, "pause"),
            )
    run.log.message(
        f"the reference's logprobs of {len(logprobs)} answers took {time.perf_counter() - start_s:.1f} s; "
        f"reference: {origin.checkpoint or origin.fingerprint}"
    )
    return logprobs


train = partial(train_on_preferences, check=check_dpo, trainer=trainer_of)
"""Collective over the ranks that a launcher started: train to a config's last step, or until a stop is asked for."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
