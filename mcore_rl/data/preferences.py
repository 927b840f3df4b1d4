"""Preferences between answers as token arrays: pairs, rankings and ties, each line that cannot be used named."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from typing import Any

import numpy
from numpy.typing import NDArray

from mcore_rl.config.preferences import PreferenceDataConfig
from mcore_rl.data import shapes
from mcore_rl.data.answer_ends import num_common, read_steps
from mcore_rl.data.chat import RAW_JOINS, Chat, Conversation, Message, raw_joins
from mcore_rl.data.packing import padded
from mcore_rl.data.records import Record, RecordReader, beside, beyond_max, filled, listed
from mcore_rl.errors import DataError

HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
"""Opening of a turn in Anthropic's HH-RLHF."""
HH_ROLES = {"Human": "user", "Assistant": "assistant"}
TIE = 0.5
"""Probability that the first answer of a pair is better if neither is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preferences:
    """Comparisons as tokens: groups of a prompt with answers, sequences of the prompt with one answer, pairs of two
    sequences. With labelled steps, a group has one answer, a pair with itself.
    """

    ids_T: NDArray[numpy.int32]
    """Tokens of all sequences, one after another."""
    is_answer_T: NDArray[numpy.bool_]
    """True at the tokens of the answer, its end-of-turn token included."""
    starts_N: NDArray[numpy.int64]
    """Offset of each sequence's first token, and finally the end of the last sequence."""
    sequence_starts_G: NDArray[numpy.int64]
    """First sequence of each group, and finally the number of sequences."""
    pair_starts_G: NDArray[numpy.int64]
    """First pair of each group, and finally the number of pairs."""
    pairs_P2: NDArray[numpy.int64]
    """Sequences of each pair: the chosen answer, then the rejected answer."""
    margins_P: NDArray[numpy.float64]
    """Margin by which the chosen answer is better; 0 if the data has no margins."""
    probabilities_P: NDArray[numpy.float64]
    """Probability that the chosen answer is better: 1, or 0.5 for a tie."""
    source_sizes: tuple[int, ...]
    """Number of groups from each file, in the order of the files."""
    num_skipped: int
    """Groups that were left out because they are too long."""
    num_skipped_ties: int
    bad_lines: tuple[str, ...] = ()
    """File, line and reason of each line that was left out because it is not a comparison."""
    notes: tuple[str, ...] = ()
    """A sentence on the shape of each file, and warnings of fields with text that are not read."""
    labels_T: NDArray[numpy.float32] | None = None
    """Probability that a step is right, at the last token of each labelled step, and NaN elsewhere; None if answers
    are compared and no steps are labelled."""

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.sequence_starts_G) - 1

    @property
    def num_pairs(self) -> int:
        """Number of pairs of all groups."""
        return len(self.pairs_P2)

    @property
    def lengths_N(self) -> NDArray[numpy.int64]:
        """Number of tokens in each sequence; all are model inputs, because a score is read at the last token."""
        lengths: NDArray[numpy.int64] = numpy.diff(self.starts_N)
        return lengths

    @property
    def answer_lengths_N(self) -> NDArray[numpy.int64]:
        """Tokens of each sequence's answer."""
        ends_T = numpy.concatenate([[0], numpy.cumsum(self.is_answer_T, dtype=numpy.int64)])
        lengths: NDArray[numpy.int64] = numpy.diff(ends_T[self.starts_N])
        return lengths

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides the logprobs of the answers, which a cache of them depends on."""
        hashed = hashlib.sha256()
        for array in (self.ids_T, self.is_answer_T, self.starts_N):
            hashed.update(f"{array.dtype} {array.shape} ".encode())
            hashed.update(array.tobytes())
        return hashed.hexdigest()


@dataclass(frozen=True, slots=True)
class Comparison:
    """A line of the data: answers to one prompt, and pairs of them."""

    prompt: Conversation
    answers: tuple[tuple[Message, ...], ...]
    """Turns of each answer; the last turn is the assistant's."""
    pairs: tuple[tuple[int, int], ...]
    """Indices in `answers` of the chosen and the rejected answer."""
    margins: tuple[float, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Sequence:
    ids_T: tuple[int, ...]
    is_answer_T: tuple[bool, ...]
    labels: tuple[tuple[int, float], ...] = ()
    """Last token and label of each labelled step."""


def read_preferences(
    paths: Sequence[str], config: PreferenceDataConfig, chat: Chat, *, packed_length: int, length_multiple: int
) -> Preferences:
    """Return the comparisons of `paths`, in order; one DataError lists the lines that cannot be trained on. A group
    fits into `packed_length` positions, each sequence padded to a multiple of `length_multiple`.
    """
    reader = PreferenceReader(config, chat, packed_length, length_multiple)
    ids, is_answer, labels = [], [], []
    sequence_starts, pair_starts, source_ends = [0], [0], [0]
    pairs: list[tuple[int, int]] = []
    margins: list[float] = []
    probabilities: list[float] = []
    for path in paths:
        for comparison, sequences in reader.read(path):
            first = sequence_starts[-1]
            # Converted at once: as Python's numbers a million answers would not fit in memory.
            ids += [numpy.array(sequence.ids_T, numpy.int32) for sequence in sequences]
            is_answer += [numpy.array(sequence.is_answer_T, numpy.bool_) for sequence in sequences]
            labels += [labels_of(sequence) for sequence in sequences]
            pairs += [(first + chosen, first + rejected) for chosen, rejected in comparison.pairs]
            margins += comparison.margins
            probabilities += comparison.probabilities
            sequence_starts.append(len(ids))
            pair_starts.append(len(pairs))
        source_ends.append(len(sequence_starts) - 1)
    if mistakes := [*beyond_max(reader.problems, config.max_bad), *reader.refused]:
        raise DataError(listed(mistakes))
    if not ids:
        reasons = [f"{reader.num_skipped} are too long"] * bool(reader.num_skipped)
        reasons += [f"{reader.num_skipped_ties} are ties"] * bool(reader.num_skipped_ties)
        left_out = f" ({', '.join(reasons)})" if reasons else ""
        raise DataError(
            f"{', '.join(paths)}: no comparison is left{left_out}. Name files with preferences, raise data.seq_length="
            f'{config.seq_length}, or set data.ties="train".'
        )
    return Preferences(
        ids_T=numpy.concatenate(ids),
        is_answer_T=numpy.concatenate(is_answer),
        starts_N=numpy.cumsum([0, *map(len, ids)], dtype=numpy.int64),
        sequence_starts_G=numpy.array(sequence_starts, numpy.int64),
        pair_starts_G=numpy.array(pair_starts, numpy.int64),
        pairs_P2=numpy.array(pairs, numpy.int64),
        margins_P=numpy.array(margins, numpy.float64),
        probabilities_P=numpy.array(probabilities, numpy.float64),
        source_sizes=tuple(numpy.diff(source_ends).tolist()),
        num_skipped=reader.num_skipped,
        num_skipped_ties=reader.num_skipped_ties,
        bad_lines=tuple(reader.problems),
        notes=tuple(reader.notes),
        labels_T=numpy.concatenate(labels) if config.has_steps else None,
    )


def labels_of(sequence: _Sequence) -> NDArray[numpy.float32]:
    """Return the labels of a sequence's tokens, NaN where no labelled step ends."""
    labels_T = numpy.full(len(sequence.ids_T), numpy.nan, numpy.float32)
    for token, label in sequence.labels:
        labels_T[token] = label
    return labels_T


class PreferenceReader(RecordReader[tuple[Comparison, list[_Sequence]]]):
    """A reader of comparisons, each with its answers as tokens, those that fit in a microbatch."""

    def __init__(self, config: PreferenceDataConfig, chat: Chat, packed_length: int, length_multiple: int) -> None:
        super().__init__("preferences", skips_long=config.too_long == "skip")
        self._config = config
        self._chat = chat
        self._packed_length = packed_length
        self._length_multiple = length_multiple
        self.num_skipped_ties = 0

    def _example(self, record: Record) -> tuple[Comparison, list[_Sequence]] | None:
        if self._config.has_steps:
            whole, sequence = _stepped(record.fields, self._config, self._chat)
            self.note(*_shape(record.fields, whole, self._config))
            return whole, [sequence]
        whole = comparison_of(record, self._config)
        self.note(*_shape(record.fields, whole, self._config))
        if self._config.chat_template == "raw" and raw_joins(whole.prompt.messages):
            self.warn(RAW_JOINS)
        comparison = self._without_ties(whole)
        return (comparison, _encode(comparison, self._chat)) if comparison.pairs else None

    def _without_ties(self, comparison: Comparison) -> Comparison:
        if self._config.ties == "train" or TIE not in comparison.probabilities:
            return comparison
        rest = [index for index, known in enumerate(comparison.probabilities) if known != TIE]
        self.num_skipped_ties += len(comparison.pairs) - len(rest)
        # An answer that is in no pair any more is not read either.
        answers = sorted({answer for index in rest for answer in comparison.pairs[index]})
        place = {answer: position for position, answer in enumerate(answers)}
        return Comparison(
            comparison.prompt,
            tuple(comparison.answers[answer] for answer in answers),
            tuple((place[comparison.pairs[i][0]], place[comparison.pairs[i][1]]) for i in rest),
            tuple(comparison.margins[i] for i in rest),
            tuple(comparison.probabilities[i] for i in rest),
        )

    def _excess(self, example: tuple[Comparison, list[_Sequence]]) -> str | None:
        _, sequences = example
        longest = max(sequences, key=lambda sequence: len(sequence.ids_T))
        limit = self._config.seq_length
        if len(longest.ids_T) > limit:
            num_prompt = len(longest.ids_T) - sum(longest.is_answer_T)
            if num_prompt >= limit:
                what = f"the prompt alone has {num_prompt} tokens"
            else:
                what = f"prompt and answer have {num_prompt} + {sum(longest.is_answer_T)} tokens"
            return f"{what}, and data.seq_length={limit}. Raise it"
        total = sum(padded(len(sequence.ids_T), self._length_multiple) for sequence in sequences)
        if total > self._packed_length:
            return (
                f"its {len(sequences)} answers with their prompts have {total} tokens together, and a microbatch has "
                f"{self._packed_length}. Raise data.tokens_per_microbatch"
            )
        return None


def comparison_of(record: Record, config: PreferenceDataConfig) -> Comparison:
    """Return the comparison of a line. Raises DataError, without file and line, if it is not a comparison."""
    entry = record.fields
    shapes.refuse_labels(entry, "preference", _named(config))
    wanted = config.format
    if wanted in ("auto", "ranking"):
        entry = shapes.as_ranking(entry, config.responses_field, config.scores_field)
    if wanted == "auto":
        sides = (entry.get(config.chosen_field), entry.get(config.rejected_field))
        is_hh = config.prompt_field not in entry and config.messages_field not in entry
        is_hh = is_hh and all(isinstance(side, str) and HH_TURN.match(side) for side in sides)
        has_sides = config.chosen_field in entry or config.rejected_field in entry
        is_ranking = config.responses_field in entry and not has_sides
        wanted = "hh" if is_hh else "ranking" if is_ranking else "pair"
    return _ranking(entry, config) if wanted == "ranking" else _pair(entry, config, is_hh=wanted == "hh")


def _named(config: PreferenceDataConfig) -> set[str]:
    return {value for name, value in config if name.endswith("_field") and value is not None}


def _shape(entry: Mapping[str, Any], comparison: Comparison, config: PreferenceDataConfig) -> tuple[str, list[str]]:
    sides = [config.chosen_field, config.rejected_field]
    is_pair = sides[0] in entry
    rated = config.responses_field if config.responses_field in entry else "completions"
    name = "rankings" if rated == config.responses_field else "UltraFeedback completions"
    name, rated = ("steps", config.steps_field) if config.has_steps else ("pairs" if is_pair else name, rated)
    turns = [*comparison.prompt.messages, *(turn for answer in comparison.answers for turn in answer)]
    said = [str(turn.get("content")) for turn in turns]
    prompts = [
        key
        for key, value in entry.items()
        if key not in (*sides, rated)
        and (
            key in (config.prompt_field, config.messages_field)
            or value in said
            or (key in shapes.PROMPTS and isinstance(value, str) and any(value in text for text in said))
        )
    ]
    read = [*prompts, *(sides if is_pair else [rated])]
    used = {*read, *_named(config), *(entry.keys() - beside(config.prompt_template, entry).keys())}
    unread = shapes.unread_keys(entry, "preference", {*used, rated, "tools", "history"}, turns)
    return f"{name} ({', '.join(read)})", unread


def _pair(entry: Mapping[str, Any], config: PreferenceDataConfig, *, is_hh: bool) -> Comparison:
    keys = (config.chosen_field, config.rejected_field)
    # In LLaMA-Factory's format each side is a single turn.
    sides: list[Any] = [[side] if isinstance(side := entry.get(key), dict) else side for key in keys]
    for number, (key, side) in enumerate(zip(keys, sides, strict=True)):
        if side is None or side == "" or side == []:
            state = "empty" if key in entry else "not there"
            raise DataError(f'"{key}" is {state}, and a pair has two sides (keys: {", ".join(entry)})')
        if is_hh and not (isinstance(side, str) and HH_TURN.match(side)):
            raise DataError(f'"{key}" does not begin with "Human:" or "Assistant:" after two line breaks')
        if is_hh:
            marks = list(HH_TURN.finditer(side))
            ends = [mark.start() for mark in marks[1:]] + [len(side)]
            sides[number] = [
                {"role": HH_ROLES[mark[1]], "content": side[mark.end() : end].strip()}
                for mark, end in zip(marks, ends, strict=True)
            ]
    prompt, answers = _prompt_and_answers(entry, sides, keys, config)
    if answers[0] == answers[1]:
        raise DataError(f'"{keys[0]}" and "{keys[1]}" are the same, so that nothing is preferred')
    is_tie = entry.get(config.tie_field)
    if not (is_tie is None or isinstance(is_tie, bool)):
        raise DataError(f'"{config.tie_field}" is {is_tie!r}, wanted true or false')
    margin = None if config.margin_field is None else entry.get(config.margin_field)
    if not (margin is None or _is_number(margin)):
        raise DataError(f'"{config.margin_field}" is {margin!r}, wanted a finite number')
    return Comparison(prompt, answers, ((0, 1),), (float(margin or 0.0),), (TIE if is_tie else 1.0,))


def _ranking(entry: Mapping[str, Any], config: PreferenceDataConfig) -> Comparison:
    key = config.responses_field
    responses = entry.get(key)
    if not isinstance(responses, list) or len(responses) < 2:
        raise DataError(f'"{key}" is {shapes.kind_of(entry, key)}, wanted a list of two answers or more')
    names = [f"{key}[{index}]" for index in range(len(responses))]
    for name, response in zip(names, responses, strict=True):
        if response is None or response in ("", []):
            raise DataError(f'"{name}" is empty, and an answer has text')
    prompt, answers = _prompt_and_answers(entry, responses, names, config)
    scores = [-float(index) for index in range(len(responses))]  # from best to worst, where there are no scores
    if config.scores_field in entry:
        given = entry[config.scores_field]
        if not isinstance(given, list) or len(given) != len(responses) or not all(map(_is_number, given)):
            shown = shapes.kind_of(entry, config.scores_field)
            raise DataError(f'"{config.scores_field}" is {shown}, wanted a list of {len(responses)} finite numbers')
        scores = [float(score) for score in given]
    pairs, margins, probabilities = [], [], []
    for first, second in combinations(range(len(responses)), 2):
        if answers[first] == answers[second]:
            raise DataError(f'"{names[first]}" and "{names[second]}" are the same')
        better, worse = (first, second) if scores[first] >= scores[second] else (second, first)
        pairs.append((better, worse))
        is_of_scores = config.margin_field == config.scores_field and config.scores_field in entry
        margins.append(scores[better] - scores[worse] if is_of_scores else 0.0)
        probabilities.append(TIE if scores[first] == scores[second] else 1.0)
    return Comparison(prompt, answers, tuple(pairs), tuple(margins), tuple(probabilities))


def _prompt_and_answers(
    entry: Mapping[str, Any], sides: Sequence[Any], names: Sequence[str], config: PreferenceDataConfig
) -> tuple[Conversation, tuple[tuple[Message, ...], ...]]:
    kinds = {type(side) for side in sides}
    if kinds not in ({str}, {list}):
        shown = ", ".join(f'"{name}" a {type(side).__name__}' for name, side in zip(names, sides, strict=True))
        raise DataError(f"{shown}: wanted text on every side, or a list of turns on every side")
    prompt = _prompt(entry, config)
    if kinds == {str}:
        if prompt is None:
            begin, rest = _common_text(sides)
            prompt = [{"role": "user", "content": begin}] if begin else []
        else:
            rest = list(sides)
        answers: list[tuple[Message, ...]] = [({"role": "assistant", "content": text},) for text in rest]
    else:
        turns = [shapes.read_turns(side, name) for side, name in zip(sides, names, strict=True)]
        # Some datasets have a prompt and repeat its turns on both sides; a side may also be only the answer.
        repeats = prompt is None or all(side[0].get("role") != "assistant" for side in turns)
        if repeats:
            # The last turn of a side is always its own.
            others = range(min(map(len, turns)) - 1)
            shared = len([*takewhile(lambda i: all(side[i] == turns[0][i] for side in turns), others)])
            repeated = turns[0][:shared]
            if prompt and prompt[-1].get("content") not in [turn.get("content") for turn in repeated]:
                raise DataError("its sides begin with turns that are not those of its prompt")
            prompt, turns = repeated, [side[shared:] for side in turns]
        answers = [tuple(side) for side in turns]
    for name, answer in zip(names, answers, strict=True):
        if not answer or answer[-1]["role"] != "assistant":
            raise DataError(f'"{name}" does not end in a turn of the assistant after the prompt')
    messages = shapes.with_earlier(beside(config.prompt_template, entry), prompt or ())
    return Conversation(messages=tuple(messages), tools=tuple(shapes.read_tools(entry))), tuple(answers)


def _prompt(entry: Mapping[str, Any], config: PreferenceDataConfig) -> list[Message] | None:
    if config.prompt_template is not None:
        return [{"role": "user", "content": filled(config.prompt_template, entry)}]
    for key in (config.prompt_field, config.messages_field):
        value = entry.get(key)
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if isinstance(value, list):
            return shapes.read_turns(value, key)
        if value is not None:
            raise DataError(f'"{key}" is {shapes.kind_of(entry, key)}, wanted text or a list of turns')
    is_named = config.prompt_field != PreferenceDataConfig.model_fields["prompt_field"].default
    return None if is_named else shapes.recognise_prompt(entry)


def _common_text(sides: Sequence[str]) -> tuple[str, list[str]]:
    """Return the whole words that all texts begin with, and the rest of each; no rest is empty."""
    # At each place of the shortest text, the characters of all; no rest may be empty.
    alike = takewhile(lambda characters: len(set(characters)) == 1, zip(*sides, strict=False))
    begin = sides[0][: min(sum(1 for _ in alike), min(map(len, sides)) - 1)]
    # The cut moves back to the space before the word that differs, which stays with the answers: half a word is other
    # tokens than the model has seen.
    end = max((match.start() for match in re.finditer(r"\s+", begin)), default=0)
    return begin[:end], [side[end:] for side in sides]


def _stepped(entry: Mapping[str, Any], config: PreferenceDataConfig, chat: Chat) -> tuple[Comparison, _Sequence]:
    shapes.refuse_labels(entry, "preference", _named(config))
    prompt = shapes.with_earlier(beside(config.prompt_template, entry), _prompt(entry, config) or ())
    if not prompt:
        raise DataError(f'it has no prompt ("{config.prompt_field}" or "{config.messages_field}")')
    steps, labels = entry.get(config.steps_field), entry.get(config.labels_field)
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step for step in steps):
        shown = shapes.kind_of(entry, config.steps_field)
        raise DataError(f'"{config.steps_field}" is {shown}, wanted a list of texts that are not empty')
    if not isinstance(labels, list) or len(labels) != len(steps) or not all(map(_is_label, labels)):
        shown = shapes.kind_of(entry, config.labels_field)
        raise DataError(
            f'"{config.labels_field}" is {shown}, wanted {len(steps)} labels: true, false, null or a number from 0 to 1'
        )
    if all(label is None for label in labels):
        raise DataError(f'"{config.labels_field}" has no label')
    text = config.step_separator.join(steps)
    ends, end = [], -len(config.step_separator)
    for step in steps:
        end += len(config.step_separator) + len(step)
        ends.append(min(end + len(config.step_separator), len(text)))
    reading = read_steps(chat, Conversation(messages=tuple(prompt)), text, ends)
    sequence = _Sequence(
        reading.ids_T,
        reading.is_answer_T,
        tuple((token, float(label)) for token, label in zip(reading.tokens, labels, strict=True) if label is not None),
    )
    answer: Message = {"role": "assistant", "content": text}
    return Comparison(Conversation(messages=tuple(prompt)), ((answer,),), ((0, 0),), (0.0,), (1.0,)), sequence


def _is_label(label: Any) -> bool:
    return label is None or isinstance(label, bool) or (_is_number(label) and 0 <= label <= 1)


def _encode(comparison: Comparison, chat: Chat) -> list[_Sequence]:
    prompt, answers = comparison.prompt, comparison.answers
    wholes = [chat.encode(Conversation(messages=(*prompt.messages, *answer), tools=prompt.tools)) for answer in answers]
    prompt_ids = chat.prompt(prompt) if prompt.messages else []
    sequences = []
    for whole in wholes:
        # Templates may open the assistant's turn differently in a prompt than in a whole chat ("<think>"): the answer
        # begins where the two diverge, or after it.
        # The first token of a text is predicted by nothing.
        begin = max(num_common(prompt_ids, whole.ids_T), 1)
        is_answer = [index >= begin and said for index, said in enumerate(whole.assistant_mask_T)]
        if not any(is_answer):
            raise DataError("an answer has no tokens, as this template renders it")
        sequences.append(_Sequence(whole.ids_T, tuple(is_answer)))
    if any(sequences[first] == sequences[second] for first, second in comparison.pairs):
        raise DataError("two sides have the same tokens, as this template renders them")
    return sequences


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
