"""`mcore-rl generate`: texts from a trained model, in a single process, whatever mesh it was trained on."""

import argparse
import math
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.rl.rollout import MIN_TEMPERATURE, SERVED, NativeConfig
from mcore_rl.data.answer_ends import end_tokens
from mcore_rl.data.chat import Conversation, Message, load_chat, prompt_ids
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import ConfigError, DataError, escaped
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import build_mesh, seed_ranks
from mcore_rl.programs.inputs import load_model
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.engine import Listener, MegatronEngine
from mcore_rl.rl.engines.server_api import ServedCompletion, server_apis
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion, Problem, Prompt
from mcore_rl.storage.folders import ModelFolder, find_model, read_model_folder, read_run, stored_lora
from mcore_rl.workers.imports import checkpoint_of, ensure_imported
from mcore_rl.workers.rank_guard import rank_guard

MAX_REQUESTS = 64


def main(args: argparse.Namespace) -> int:
    """Print the prompt and its continuations."""
    with rank_guard():
        _take_positional(args)
        _check(args)
        trained, weights = model_of_arguments(args)
        if trained.model.head == "score":
            raise ConfigError(
                "this is a run of a reward model, which has scores and no logits: there is no text to generate. Name a "
                "run of a language model."
            )
        if is_interactive(args):
            chat(args, trained, weights)
            platforms.stop()
            return 0
        request = request_of(args, trained)
        stream = StreamedText(request) if args.stream else None
        if args.url is None:
            engine = open_engine(trained, weights, request.tokenizer, args.seed)
            texts_GT = [completion.tokens_T for completion in continuations(args, engine, request, stream)]
        else:
            texts_GT = [completion.tokens_T for completion in served_continuations(args, trained, request)]
        if stream is not None:
            stream.end(request.text_of(texts_GT[0]))
        else:
            for index, tokens_T in enumerate(texts_GT, start=1):
                if args.n > 1:
                    sys.stdout.write(f"--- {index} of {args.n}\n")
                sys.stdout.write(escaped(f"{request.shown}{request.text_of(tokens_T)}\n"))
        platforms.stop()
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt in tokens, and how to turn its completions into text."""

    tokenizer: Tokenizer
    prompt_T: tuple[int, ...]
    shown: str
    """Text to print before a completion: the prompt that it continues; empty in a chat."""
    is_whole: bool
    """Whether the completion is a complete text, not the continuation of a text."""
    ends: frozenset[int]
    """Tokens that end a completion and are not part of its text."""

    def text_of(self, tokens_T: Sequence[int]) -> str:
        """Return the text of a completion, or of its first tokens."""
        said_T = tokens_T[:-1] if tokens_T[-1] in self.ends else tokens_T
        alone = self.tokenizer.decode(said_T)
        if self.is_whole:
            return alone
        # The first piece of a text loses its space when decoded without its context (sentencepiece).
        before, whole = self.tokenizer.decode(self.prompt_T), self.tokenizer.decode((*self.prompt_T, *said_T))
        return whole[len(before) :] if whole.startswith(before) else alone


def opening_turns(args: argparse.Namespace) -> tuple[Message, ...]:
    """Return the turns in the arguments: the system's, the user's, and the beginning of the answer."""
    given = (("system", args.system), ("user", args.prompt or None), ("assistant", args.answer))
    return tuple({"role": role, "content": content} for role, content in given if content is not None)


def request_of(args: argparse.Namespace, trained: ModelFolder, messages: Sequence[Message] = ()) -> Request:
    """Return the request to the model for the arguments, or for the turns of a chat so far."""
    tokenizer, path = load_tokenizer(trained.tokenizer), trained.tokenizer.path
    template = trained.chat_template
    if args.chat and template is None:
        if trained.tokenizer.kind == "sentencepiece":
            raise ConfigError(
                "--chat: this model was trained on plain text, and a .model file has no chat template. Leave out "
                "--chat, or fine-tune the model on conversations (mcore-rl sft)."
            )
        template = "tokenizer"
    chat = None if template is None else load_chat(template, tokenizer, path)
    if args.chat and chat is not None:
        turns = tuple(messages) or opening_turns(args)
        prompt_T = tuple(prompt_ids(chat, Conversation(messages=turns)))
    else:
        prompt_T = tuple(tokenizer.encode_marked(args.prompt))
    return Request(
        tokenizer=tokenizer,
        prompt_T=prompt_T or (tokenizer.eod_id,),
        shown=args.answer or "" if args.chat else args.prompt,
        is_whole=args.chat and args.answer is None,
        ends=frozenset(end_tokens(tokenizer, chat, path)),
    )


def is_interactive(args: argparse.Namespace) -> bool:
    """Return whether the arguments ask for an interactive chat in a terminal."""
    asks = bool(args.chat) and not args.prompt and args.url is None and args.n == 1
    return asks and sys.stdin.isatty() and sys.stdout.isatty()


def chat(args: argparse.Namespace, trained: ModelFolder, weights: Path) -> None:
    """Chat in the terminal until the end of the input. Ctrl-C ends an answer or, at the prompt, the chat."""
    import readline  # noqa: F401 - gives input() the keys of a shell

    engine = open_engine(trained, weights, load_tokenizer(trained.tokenizer), args.seed)
    messages = list(opening_turns(args))
    sys.stdout.write("Ctrl-C ends an answer; an empty line, Ctrl-D, or Ctrl-C here ends the chat.\n")
    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            said = ""
        if not said:
            sys.stdout.write("\n")
            return
        messages.append({"role": "user", "content": said})
        stream = None
        try:  # from the end of the line on: on a busy machine, rendering and tokenizing take a moment too
            request = request_of(args, trained, messages)
            stream = StreamedText(request)
            answer = request.text_of(continuations(args, engine, request, stream)[0].tokens_T)
            stream.end(answer)
        except KeyboardInterrupt:
            answer = stream.shown if stream else ""
            sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": answer})


class StreamedText:
    """Prints one completion as it grows."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.shown = ""
        """Printed part of the completion's text."""
        self._write(request.shown)

    def __call__(self, prompt: int, index: int, tokens_T: Sequence[int]) -> None:
        """Print the new text of `tokens_T`, all tokens of the completion so far; called by the engine."""
        if tokens_T[-1] in self._request.ends:
            return
        text = self._request.text_of(tokens_T)
        # A character of several tokens decodes to a replacement character until its last token arrives, which may also
        # change earlier text. So show a text only if it continues the shown text.
        if text.startswith(self.shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._write(text[len(self.shown) :])
            self.shown = text

    def end(self, text: str) -> None:
        """Print the rest of `text`, the whole completion."""
        self._write(text[len(self.shown) :] + "\n" if text.startswith(self.shown) else f"\n{text}\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(escaped(text))
        sys.stdout.flush()


def served_continuations(
    args: argparse.Namespace, trained: ModelFolder, request: Request
) -> tuple[ServedCompletion, ...]:
    """Return `args.n` continuations like `continuations`, from the server at `args.url` with its own weights."""
    engine = SERVED[args.kind](urls=(args.url,), api_key_env=args.api_key_env, ca_file=args.ca_file)
    api, sampling = server_apis(engine, trained.model)(args.url), sampling_of_arguments(args, request)
    beyond = [token for token in request.prompt_T if token >= trained.model.vocab_size]
    if beyond:  # a server would crash
        raise DataError(
            f"--prompt has the id {beyond[0]}, and the model has the ids 0 to {trained.model.vocab_size - 1}. Name the "
            "model's own run."
        )
    name = secrets.token_hex(4)  # also for the prefix cache: the weights may have changed
    with ThreadPoolExecutor(min(args.n, MAX_REQUESTS)) as pool:
        return tuple(
            pool.map(
                lambda index: api.generate(
                    request.prompt_T, sampling, args.seed + index, salt=name, request_id=f"{name}-{index}"
                ),
                range(args.n),
            )
        )


def sampling_of_arguments(args: argparse.Namespace, request: Request) -> Sampling:
    """Return the sampling settings from the arguments."""
    return Sampling(
        max_new_tokens=args.tokens,
        cut=Cut(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p),
        stop_tokens=request.ends,
        vocab_size=request.tokenizer.vocab_size,
    )


def model_of_arguments(args: argparse.Namespace) -> tuple[ModelFolder, Path]:
    """Return the model in the arguments, and the checkpoint with its weights."""
    if args.model is not None:
        path = find_model(args.model, "--model")  # of a model of the hub, its folder in the cache
        folder = read_model_folder(path)
        ensure_imported(str(path), folder.model, None)
        return folder, checkpoint_of(str(path), folder.model, None)
    if args.run is not None:
        return read_run(args.run), args.checkpoint or args.run
    return read_model_folder(args.checkpoint), args.checkpoint


def open_engine(trained: ModelFolder, weights: Path, tokenizer: Tokenizer, seed: int) -> MegatronEngine:
    """Return a rollout engine in this process with a checkpoint's weights, including its low-rank adapters."""
    # The engine's KV cache works with our own attention, not TransformerEngine's; the weights are the same.
    ours = {"recompute": "none", "layers": "auto", "fp8": "none", "bf16_products": False}
    settings = trained.platform.model_copy(update=ours)
    platform = platforms.start(settings, allows_te=False)
    mesh = build_mesh(MeshConfig())
    seed_ranks(seed)
    chunks, _ = load_model(trained.model, stored_lora(weights), mesh, platform, settings, weights)
    return MegatronEngine(chunks, mesh, trained.model, tokenizer.decode, NativeConfig())


def continuations(
    args: argparse.Namespace, engine: MegatronEngine, request: Request, listener: Listener | None
) -> tuple[Completion, ...]:
    """Return `args.n` continuations, each until an end token of the request or `args.tokens` tokens."""
    engine.listener = listener
    problem = Problem(problem_id="--prompt", prompt=args.prompt, answer="")
    prompt = Prompt(problem=problem, tokens_T=request.prompt_T)
    sampling = sampling_of_arguments(args, request)
    seeds_1G = [range(args.seed, args.seed + args.n)]
    return engine.generate([prompt], sampling, seeds_1G)[0].completions


def _take_positional(args: argparse.Namespace) -> None:
    # After an option that names the model, the first argument is the prompt.
    if (args.model or args.run or args.checkpoint) and args.text is None:
        args.folder, args.text = None, args.folder
    for place, option in (("folder", "model"), ("text", "prompt")):
        given = getattr(args, place)
        if given is None:
            continue
        if getattr(args, option):
            raise ConfigError(f"{given} and --{option} {getattr(args, option)} are both given: leave out one of them.")
        setattr(args, option, given)


def _check(args: argparse.Namespace) -> None:
    if args.model is None and args.run is None and args.checkpoint is None:
        raise ConfigError(
            "There is nothing to generate with: give FOLDER (a run, an import, a checkpoint, or Hugging Face's)."
        )
    if args.model is not None and (args.run is not None or args.checkpoint is not None or args.url is not None):
        raise ConfigError("--model names model and weights. Give it without --run, --checkpoint and --url.")
    if args.url is not None and (args.checkpoint is not None or args.stream or args.run is None):
        raise ConfigError(
            "--url asks a server with weights of its own: give it --run RUN_DIR for the model and its tokenizer, and "
            "neither --checkpoint nor --stream."
        )
    if args.url is None and (args.api_key_env or args.ca_file):
        raise ConfigError("--api-key-env and --ca-file are of a server, and --url is not given. Add it.")
    if args.chat and not args.prompt and not is_interactive(args):
        raise ConfigError(
            "--chat answers a prompt, and there is none. Give --prompt TEXT, or chat in a terminal (without --url and "
            "--n)."
        )
    for name in ("system", "answer"):
        if getattr(args, name) is not None and not args.chat:
            raise ConfigError(f"--{name} is a turn of a chat, and --chat is not given. Add it, or leave out --{name}.")
    if args.n > 1 and args.stream:
        raise ConfigError(f"--stream shows one text as it grows, --n {args.n} asks for several. Leave out one.")
    if args.n > 1 and args.temperature == 0.0:
        raise ConfigError(
            f"--n {args.n} at temperature 0 is {args.n} times the same text. Give --temperature 0.7, or leave out --n."
        )
    limits = {
        "--temperature": (
            args.temperature == 0 or MIN_TEMPERATURE <= args.temperature < math.inf,
            f"0 (always the likeliest token), or {MIN_TEMPERATURE} or more",
        ),
        "--top-k": (args.top_k >= 0, "0 (all) or more"),
        "--top-p": (0 < args.top_p <= 1, "above 0 and at most 1 (all)"),
        "--min-p": (0 <= args.min_p < 1, "from 0 (all) to below 1"),
    }
    for name, (is_right, wanted) in limits.items():
        if not is_right:
            raise ConfigError(f"{name} {vars(args)[name[2:].replace('-', '_')]}, wanted {wanted}.")
