"""Errors of a training or an evaluation that are found before its ranks start."""

from collections.abc import Callable, Sequence

from mcore_rl.config.extension import is_extension, load_extensions
from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SFTConfig, SFTDataConfig
from mcore_rl.data.examples import conversation_of
from mcore_rl.data.preferences import comparison_of
from mcore_rl.data.records import HUB, Record, beyond_max, listed, read_records
from mcore_rl.errors import DataError
from mcore_rl.programs.rollouts import load_prompts
from mcore_rl.rl.rewards.score import ANSWER_PARTS, TRIED_AT_START, try_reward
from mcore_rl.rl.rollouts.prompts import read_problems

FIRST = 100
"""Number of records of each file whose meaning is looked at."""


def refuse_first_records(config: RunConfig) -> None:
    """Try the config's functions, files, first records, prompts and rewards; raise an McoreRlError if any fails."""
    load_extensions(config)
    if isinstance(config, SFTConfig):
        data = config.data
        _refuse((*data.train, *data.valid), data.max_bad, lambda record: conversation_of(record.fields, data))
    elif isinstance(config, PreferenceRunConfig):
        pairs = config.data
        named = (*pairs.train, *pairs.valid)
        _refuse(named, pairs.max_bad, lambda record: pairs.has_steps or comparison_of(record, pairs))
    elif isinstance(config, RlRunConfig):
        rl, texts = config.rl, SFTDataConfig()
        if rl.prompts.task == "file":
            needs_answer = any(part in ANSWER_PARTS for part in rl.reward.parts)
            for files in (rl.prompts.files, rl.eval.files):
                here = tuple(name for name in files if not name.startswith(HUB))
                read_problems(rl.prompts.model_copy(update={"files": here}), needs_answer=needs_answer)
        if own := rl.reward.only(is_extension):
            prompts = load_prompts(config)
            tried = prompts.train.take(0, TRIED_AT_START)
            try_reward(own, rl.max_completion_tokens, tried, prompts.tokenizer.encode)
        _refuse(rl.ptx.files, texts.max_bad, lambda record: conversation_of(record.fields, texts))


def _refuse(files: Sequence[str], max_bad: int | None, read: Callable[[Record], object]) -> None:
    problems = []
    for name in files:
        for index, record in enumerate([] if name.startswith(HUB) else read_records(name)):
            try:
                if record.problem:
                    raise DataError(record.problem)
                if index < FIRST:
                    read(record)
            except DataError as error:
                problems.append(f"{record.file}:{record.line}: {error}.")
    if beyond := beyond_max(problems, max_bad):
        raise DataError(listed(beyond))
