"""Conversations to token ids, with a mask of the assistant's tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mcore_rl.data import chat_template
from mcore_rl.data.shapes import REASONING, is_absent, is_trained
from mcore_rl.data.tokenizer import TOKENIZER_JSON, HuggingFaceTokenizer, TiktokenTokenizer, Tokenizer
from mcore_rl.errors import DataError

PROBE = "mcorerlprobe"
"""Text of a turn that is rendered to find the template's text after it; no template changes or repeats it."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Opening tag of the assistant's text, in templates that mark it."""
WORD = re.compile("[A-Za-z0-9]+")
SHOWN = 60
Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A list of turns, each with a role and content, and the tools that a template may describe."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A conversation as tokens; `assistant_mask_T` is True on trained tokens, each turn's end included."""

    ids_T: tuple[int, ...]
    assistant_mask_T: tuple[bool, ...]


class Chat(Protocol):
    """The translation of conversations to tokens."""

    def encode(self, conversation: Conversation) -> EncodedConversation:
        """Return the whole conversation as tokens; DataError when it does not fit the template."""
        ...

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the tokens after which the assistant's next turn begins."""
        ...

    def open_turn(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation whose last turn is to be continued. Raises DataError if that turn has no
        text or calls tools, TemplateError if the template changes its text or its tokens depend on later text.
        """
        ...

    def reply(self, before: Conversation, answer: str, replies: Sequence[Message], *, is_closed: bool) -> list[int]:
        """Return the tokens from the end of the turn `answer`, whose sampled tokens stay as they are, to where the next
        turn begins. `is_closed`: the sampled tokens end the turn. Raises TemplateError if the template renders earlier
        turns otherwise.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with the names of special tokens."""
        ...

    def as_decoded(self, text: str) -> str:
        """Return the text after encoding and decoding it, which differs if the tokenizer normalizes texts."""
        ...

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The tokens that end the assistant's turn; empty when no token does."""


class TemplateError(DataError):
    """A chat template whose rendering of a longer conversation does not begin with that of the shorter one."""


def prompt_ids(chat: Chat, conversation: Conversation) -> list[int]:
    """Return the tokens after which the assistant writes: its next turn, or more of its last turn."""
    is_open = conversation.messages[-1:] and conversation.messages[-1]["role"] == "assistant"
    return chat.open_turn(conversation) if is_open else chat.prompt(conversation)


def answered(conversation: Conversation, text: str) -> Conversation:
    """Return the conversation with the assistant's text after `prompt_ids`."""
    *before, last = conversation.messages
    if last["role"] == "assistant":
        return replace(conversation, messages=(*before, {**last, "content": last["content"] + text}))
    return replace(conversation, messages=(*before, last, {"role": "assistant", "content": text}))


RAW_JOINS = (
    'data.chat_template="raw" puts a system prompt and the turns of the user end to end, with nothing between: the '
    'model cannot tell them apart. Set data.chat_template="plain", or a template with separators'
)


def raw_joins(messages: Sequence[Message]) -> bool:
    """Return whether the template "raw" joins turns: several user turns, or a role other than user and assistant."""
    return any(message["role"] not in ("user", "assistant") for message in messages) or (
        sum(message["role"] == "user" for message in messages) > 1
    )


def load_chat(template: str, tokenizer: Tokenizer, path: str | None) -> Chat:
    """Return the chat that data.chat_template=`template` names, with the tokenizer that was read from `path`."""
    if template in ("plain", "raw"):
        return PlainChat(tokenizer, has_roles=template == "plain")
    if not isinstance(tokenizer, HuggingFaceTokenizer | TiktokenTokenizer):
        raise DataError(
            f'data.chat_template="{template}" needs a Hugging Face tokenizer, whose special tokens mark the turns. '
            'Set data.chat_template="plain" or "raw".'
        )
    assert path is not None, "a tokenizer was read from it"
    folder = Path(path)
    encoder: chat_template.TextEncoder
    if isinstance(tokenizer, TiktokenTokenizer):
        encoder = tokenizer.file
    else:
        encoder = chat_template.JsonEncoder((folder / TOKENIZER_JSON).read_text(encoding="utf-8"))
    templates = chat_template.load_template(template, folder), chat_template.load_tool_template(template, folder)
    return TemplateChat(encoder, templates[0], tokenizer.special_tokens, templates[1])


class PlainChat:
    """A chat for any tokenizer: roles as text, an end of document after each answer, each turn encoded alone."""

    def __init__(self, tokenizer: Tokenizer, *, has_roles: bool) -> None:
        self._tokenizer = tokenizer
        self._has_roles = has_roles

    def encode(self, conversation: Conversation) -> EncodedConversation:
        if conversation.tools:
            raise DataError('it has "tools", which a plain template cannot describe')
        # A text without roles is its author's whole markup; between "role:" lines a special token's name is mere text.
        encode = self._tokenizer.encode if self._has_roles else self._tokenizer.encode_marked
        ids: list[int] = []
        assistant_mask: list[bool] = []
        for message in conversation.messages:
            content, role = message.get("content"), message["role"]
            unshown = [key for key in ("tool_calls", *REASONING) if not is_absent(message.get(key))]
            if unshown:
                raise DataError(
                    f'a turn of {role!r} has "{unshown[0]}", which a plain template cannot show. Set '
                    "data.chat_template to one that does, write it into the content, or leave out such entries"
                )
            if not isinstance(content, str):
                raise DataError(f"the content of a turn is {content!r}; without a jinja template it must be text")
            header, is_answer = self._header(role), role == "assistant"
            text = content if is_answer or not self._has_roles else content + "\n\n"
            turn = [*encode(text), *([self._tokenizer.eod_id] if is_answer else [])]
            ids += header + turn
            assistant_mask += [False] * len(header) + [is_answer and is_trained(message)] * len(turn)
        return EncodedConversation(tuple(ids), tuple(assistant_mask))

    def prompt(self, conversation: Conversation) -> list[int]:
        return [*self.encode(conversation).ids_T, *self._header("assistant")]

    def open_turn(self, conversation: Conversation) -> list[int]:
        """Return the tokens of a conversation but for the token that ends its last turn."""
        _text_to_continue(conversation)
        return list(self.encode(conversation).ids_T[:-1])

    def reply(self, before: Conversation, answer: str, replies: Sequence[Message], *, is_closed: bool) -> list[int]:
        """Return the tokens from the turn's end to where its next begins; no text depends on earlier turns."""
        ids = [] if is_closed else [self._tokenizer.eod_id]
        return ids + self.prompt(Conversation(messages=tuple(replies)))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def as_decoded(self, text: str) -> str:
        return self.decode(self._tokenizer.encode(text))

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The token that ends a document, which ends each turn of the assistant."""
        return (self._tokenizer.eod_id,)

    def _header(self, role: str) -> list[int]:
        return self._tokenizer.encode(f"{role}:\n") if self._has_roles else []


class TemplateChat:
    """A jinja template, rendered by transformers, and the tokenizer that belongs to it. Text that spells a special
    token stays text, so that nobody can forge a turn. The assistant's text is between generation marks, or else what a
    turn adds to the rendering before it; a template in which a later turn changes an earlier turn is refused.
    """

    def __init__(
        self,
        encoder: chat_template.TextEncoder,
        template: str,
        special_tokens: Mapping[str, str],
        tool_template: str | None,
    ) -> None:
        """`tool_template` renders conversations with tools; None: `template` renders these too."""
        self._tokenizer = chat_template.MarkedTokenizer(encoder)
        self._template, self._tool_template = template, tool_template or template
        self._special_tokens = dict(special_tokens)
        added = self._tokenizer.added
        turn_end = self._turn_end({token.content: index for index, token in added.items()})
        self.turn_end_ids: tuple[int, ...] = (turn_end,) if turn_end is not None else ()
        """The token that the template puts after the assistant's text; empty when it puts none there."""
        self._text_of_end = None if turn_end is None else added[turn_end].content
        self._ends = tuple(token.content for index, token in added.items() if token.special or index == turn_end)

    def encode(self, conversation: Conversation) -> EncodedConversation:
        is_marked = GENERATION.search(self._template_of(conversation)) is not None
        text, spans = self._marked(conversation) if is_marked else self._by_prefixes(conversation)
        _refuse_unshown(conversation, text)
        # The reasoning of turns that are only read is left to the template: Qwen3's drops that of earlier turns.
        trained = [turn for turn in conversation.messages if is_trained(turn)]
        for key, said in ((key, turn[key]) for turn in trained for key in REASONING if key in turn):
            if not is_absent(said) and self._tokenizer.hide(str(said).strip()) not in text:
                raise DataError(
                    f'the chat template does not show the "{key}" {str(said)[:SHOWN]!r}. Set data.chat_template to one '
                    "that does, write it into the content, or, where it shows the last turn's alone, give turns before "
                    'it "weight": 0'
                )
        encoded = self._tokenizer.encode(text)
        assistant_mask: list[bool] = []
        spans_left = spans[::-1]
        for start, end in encoded.offsets:
            while spans_left and spans_left[-1][1] <= start:
                spans_left.pop()
            assistant_mask.append(bool(spans_left) and end > spans_left[-1][0])
        return EncodedConversation(tuple(encoded.ids), tuple(assistant_mask))

    def prompt(self, conversation: Conversation) -> list[int]:
        text, _ = self._render(conversation, len(conversation.messages), add_generation_prompt=True)
        _refuse_unshown(conversation, text)
        return self._tokenizer.encode(text).ids

    def open_turn(self, conversation: Conversation) -> list[int]:
        content = self._tokenizer.hide(_text_to_continue(conversation))
        *before, last = conversation.messages
        probed = replace(conversation, messages=(*before, {**last, "content": PROBE}))
        whole, _ = self._render(conversation, len(conversation.messages))
        head, _, tail = self._render(probed, len(conversation.messages))[0].rpartition(PROBE)
        if whole != head + content + tail:
            raise TemplateError(
                "the assistant's last turn cannot go on: the chat template does not render its text "
                f"{content[:SHOWN]!r} as it is. Leave out white space at its ends, or set data.chat_template to a file "
                "that keeps it"
            )
        ids = self._tokenizer.encode(head + content).ids
        if self._tokenizer.encode(whole).ids[: len(ids)] != ids:
            raise TemplateError(
                f"the assistant's last turn cannot go on: the tokens of its text {content[-SHOWN:]!r} are others when "
                f"{tail[:SHOWN]!r} follows, which the chat template puts there. Set data.chat_template to a file that "
                "ends turns with a special token"
            )
        return ids

    def reply(self, before: Conversation, answer: str, replies: Sequence[Message], *, is_closed: bool) -> list[int]:
        messages = (*before.messages, {"role": "assistant", "content": answer}, *replies)
        whole = Conversation(messages=messages, tools=before.tools)
        known, _ = self._render(before, len(before.messages), add_generation_prompt=True)
        known += self._tokenizer.hide(answer)
        text, _ = self._render(whole, len(messages), add_generation_prompt=True)
        if not text.startswith(known):
            same = next((i for i, (a, b) in enumerate(zip(known, text, strict=False)) if a != b), len(text))
            raise TemplateError(
                "the chat template renders turns differently when others follow them: "
                f"{text[same : same + SHOWN]!r} in the place of {known[same : same + SHOWN]!r}. Set "
                "data.chat_template to a file whose turns do not depend on later ones (one that keeps the text of "
                "reasoning and white space of earlier turns)"
            )
        rest = text[len(known) :]
        if is_closed:
            end = self._text_of_end
            if end is None or not rest.startswith(end):
                raise TemplateError(
                    f"the chat template puts {rest[:SHOWN]!r} after the assistant's turn, which was ended with {end!r}"
                )
            rest = rest[len(end) :]
        return self._tokenizer.encode(rest).ids

    def reply_parsed(
        self, before: Conversation, answer: Message, replies: Sequence[Message], *, is_closed: bool
    ) -> list[int]:
        """Return what `reply` does, for a turn that the template is given in parts (reasoning, tool calls): what it
        puts after the token that ends the turn. The template may write the turn itself otherwise than it was sampled.

        Raises:
            TemplateError: where the template renders earlier turns differently from before, or does not end the turn.
        """
        messages = (*before.messages, answer)
        start, _ = self._render(before, len(before.messages))
        turn, _ = self._render(replace(before, messages=messages), len(messages))
        whole = replace(before, messages=(*messages, *replies))
        text, _ = self._render(whole, len(whole.messages), add_generation_prompt=True)
        end = self._text_of_end
        at = -1 if end is None else turn.rfind(end, len(start))
        if end is None or at < 0 or not (text.startswith(turn) and turn.startswith(start)):
            raise TemplateError("the chat template renders turns differently when others follow them")
        return self._tokenizer.encode(text[at + (len(end) if is_closed else 0) :]).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def as_decoded(self, text: str) -> str:
        return self.decode(self._tokenizer.encode(self._tokenizer.hide(text)).ids)

    def _turn_end(self, added: Mapping[str, int]) -> int | None:
        """Return the first of the `added` tokens (text -> id) after the assistant's last turn, or else, in templates
        that put none there, the token that opens the next turn.
        """
        user, assistant = {"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}
        # White space is an added token in some vocabularies, and ends nothing.
        candidates = {text: index for text, index in added.items() if text.strip()}
        for messages in ((user, assistant), (user, assistant, user)):
            try:
                text, _ = self._render(Conversation(messages=messages), len(messages))
            except DataError:
                continue  # a template that takes no such conversation shows no end
            after = text[text.rfind(PROBE) + len(PROBE) :] if PROBE in text else ""
            found = [(after.find(name), -len(name), index) for name, index in candidates.items() if name in after]
            if found:
                return min(found)[2]
        return None

    def _template_of(self, conversation: Conversation) -> str:
        return self._tool_template if conversation.tools else self._template

    def _marked(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        num_turns = len(conversation.messages)
        text, spans = self._render(conversation, num_turns, return_assistant_tokens_mask=True)
        trained = [is_trained(turn) for turn in conversation.messages if turn["role"] == "assistant"]
        if all(trained):
            return text, spans
        if len(spans) != len(trained):
            raise DataError(
                f"the chat template marks {len(spans)} texts in {len(trained)} turns of the assistant, so that those "
                "of weight 0 cannot be found. Set data.chat_template to a file that marks each turn once"
            )
        return text, [span for span, is_one in zip(spans, trained, strict=True) if is_one]

    def _by_prefixes(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        whole, _ = self._render(conversation, len(conversation.messages))
        spans = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant" or not is_trained(message):
                continue
            before, _ = self._render(conversation, index, add_generation_prompt=True)
            after, _ = self._render(conversation, index + 1)
            if not (after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    f"the chat template renders turn {index + 1} differently with and without what follows it, so "
                    "that the assistant's text cannot be found. Put {% generation %} and {% endgeneration %} "
                    'around it in the template (data.chat_template names a file), give such turns "weight": 0, or '
                    "leave them out"
                )
            # White space that follows an end-of-turn token is not the assistant's.
            stripped = after.rstrip()
            end = len(stripped) if stripped[len(before) :].endswith(self._ends) else len(after)
            spans.append((len(before), end))
        return whole, spans

    def _hidden(self, value: Any) -> Any:
        """Return a message, or a part, in whose texts special tokens are hidden from the template's own."""
        if isinstance(value, str):
            return self._tokenizer.hide(value)
        if isinstance(value, Mapping):
            return {key: self._hidden(part) for key, part in value.items()}
        return [self._hidden(part) for part in value] if isinstance(value, list | tuple) else value

    def _render(self, conversation: Conversation, num_turns: int, **options: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the first `num_turns` turns and the offsets of the text between generation marks."""
        # Templates ask whether a key is there, and `"tool_calls": null` means no.
        turns = [
            self._hidden({key: value for key, value in turn.items() if value is not None})
            for turn in conversation.messages[:num_turns]
        ]
        rendered: Any
        try:
            rendered, spans = chat_template.render(
                [turns],
                tools=[self._hidden(tool) for tool in conversation.tools] or None,
                chat_template=self._template_of(conversation),
                **options,
                **self._special_tokens,
            )
        except chat_template.TEMPLATE_ERRORS as error:
            raise DataError(f"the chat template does not take it: {str(error) or type(error).__name__}") from error
        _refuse_unshown_parts(turns, rendered[0])
        return rendered[0], [tuple(span) for span in spans[0]] if spans else []


def _text_to_continue(conversation: Conversation) -> str:
    last = conversation.messages[-1]
    content = last.get("content")
    if not isinstance(content, str) or not content:
        raise DataError(
            f"the last turn is the assistant's, and its content is {content!r}: there is no text from which it could "
            "go on. Leave the turn out"
        )
    if last.get("tool_calls"):
        raise DataError(
            "the last turn is the assistant's and calls tools: it cannot go on. Add the tools' answers, or leave the "
            "calls out"
        )
    return content


def _refuse_unshown_parts(messages: Sequence[Message], text: str) -> None:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            values = [part[key] for key in part if key != "type"] if isinstance(part, Mapping) else [part]
            if not values or any(str(value).strip() not in text for value in values):
                raise DataError(
                    f"a turn of {message['role']!r} has a part {part!r:.{SHOWN}}, which the chat template does not "
                    "show as text; only texts are trained on. Leave out such entries"
                )


def _refuse_unshown(conversation: Conversation, text: str) -> None:
    """Raise DataError if the rendered text lacks the name of a tool or of a tool call, or a word of a tool's result."""
    for tool in conversation.tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name not in text:
            raise DataError(
                f"the chat template does not show the tool {name!r}. Set data.chat_template to one that does, or leave "
                '"tools" out'
            )
    for message in conversation.messages:
        calls = message.get("tool_calls") or ()
        names = [call.get("function", call).get("name") for call in calls if isinstance(call, Mapping)]
        content = message.get("content") if message["role"] == "tool" else None
        word = WORD.search(content) if isinstance(content, str) else None
        shown = [("the call of the tool", name) for name in names if isinstance(name, str)]
        shown += [("the tool's result", word[0])] if word else []
        for what, part in shown:
            if part not in text:
                raise DataError(
                    f"the chat template does not show {what} {part!r}. Set data.chat_template to one that does, or "
                    "leave out such entries"
                )
