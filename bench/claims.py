"""The claims of docs/claims.md as experiments: arms over seeds, differences paired by seed, words decided beforehand.

    python -m bench.claims gap recovery            these claims, one after the other: half an hour each on one core
    python -m bench.claims --layers torch          all of them, with PyTorch's own kernels
    python -m bench.claims --table                 the tables of docs/claims.md

A claim is shown where the 95 % interval of its paired difference (Student's t, over the seeds) lies above 0, refuted
where it lies below, and not shown elsewhere. Runs that are done are not run again; the same command goes on where it
was ended.
Results go to bench/results/claims.json, with machine, versions and commit, and figures to docs/images/claim-NAME.svg.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression, pvariance
from typing import Any

from bench.learning import ROOT, run_study, study_toml
from bench.rl_folder import VOCAB, program, write_tokenizer
from bench.study import SFT
from bench.study_figures import Points, StudyFigure, as_svg, draw
from mcore_rl.cli.study import StudyRun, interval, read_run, rows_of
from mcore_rl.rl.types import Problem

RESULTS = Path(__file__).parent / "results" / "claims.json"
MODEL = f"""
[model]
family = "qwen3_moe"
num_layers = 4
hidden_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
ffn_hidden_size = 128
vocab_size = {VOCAB}
max_position = 2048
[model.moe]
num_experts = 8
top_k = 2
ffn_hidden_size = 64
aux_loss_coeff = 1e-2
[data]
chat_template = "raw"
tokenizer = {{ kind = "huggingface", path = "tokenizer" }}
[optim]
schedule = "constant"
weight_decay = 0.0
"""
RL = """
extends = "model.toml"
[train]
global_batch = 32
eval_interval = "none"
[optim]
warmup_steps = 0
[checkpoint]
interval = "none"
load_optimizer = false
[rl.prompts]
task = "reversing"
smallest = 5
largest = 7
max_tokens = 32
[rl.rollout]
prompts_per_step = 16
group_size = 8
max_new_tokens = 32
[rl.engine]
slots = 128
[rl.update]
max_tokens_per_microbatch = 2048
[rl.reward]
parts = ["positions"]
[rl.samples]
interval = "none"
"""
UPDATES = 4
"""Optimizer steps of a rollout batch."""
EXAMPLES = 10_000
ROUNDED = "rl.engine.kind=bench.rounded_engine:rounded_engine"
NOISY = "rl.engine.kind=bench.rounded_engine:noisy_engine"
GRPO, GSPO, R3 = "rl.loss.kind=grpo", "rl.loss.kind=gspo", "replay.kind=r3"
FAR = "replay.max_disagreement=0.5"
"""With one expert a token every route that rounding changes has none in common with the trainer's: here 11 %."""
FROM_ENGINE = "rl.update.old_logprobs=rollout"
KERNELS = {"auto": "compiled", "torch": "PyTorch's"}
"""Heading of a table's column, by platform.layers on a CPU."""
Value = Callable[[StudyRun, Path], float]
"""A number of a finished run, from its rows or its folder."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The fine-tuned model that all arms of a claim start from."""

    words: tuple[str, ...] = ()
    """Changes of the model."""
    smallest: int = 2
    largest: int = 10
    """Lengths of the strings that it has learned to reverse."""
    steps: int = 250


STARTS = {
    "small": Start(),
    "long": Start(largest=24, steps=1200),
    "top1": Start(
        words=(
            *("model.num_layers=6", "model.moe.num_experts=32", "model.moe.top_k=1"),
            *("model.moe.normalize_top_k=false", "model.moe.balance=aux_loss"),
        ),
        largest=4,
        steps=80,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence, the arms that are run, and the number that decides: positive where the sentence holds."""

    sentence: str
    start: str
    rollouts: int
    arms: Mapping[str, Sequence[str]]
    differences: Mapping[str, tuple[Value, Mapping[str, float]]]
    """Comparison -> a number of each run, and the coefficient of each arm."""
    words: Sequence[str] = ()
    before: Callable[[Path, Sequence[str], Sequence[int]], Mapping[str, Sequence[str]]] | None = None
    """Runs what comes before the arms, of the study's folder, words and seeds; returns more words of each arm."""
    rates: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Method -> its arms at several learning rates; the arm with the highest reward stands for it."""


def reward(run: StudyRun, _: Path) -> float:
    """Return the mean reward of all rollout batches."""
    return fmean(run.values("reward/mean"))


def reward_at_end(run: StudyRun, _: Path) -> float:
    """Return the mean reward of the last quarter."""
    rewards = run.values("reward/mean")
    return fmean(rewards[-max(1, len(rewards) // 4) :])


def kl_old(run: StudyRun, _: Path) -> float:
    """Return the KL of an update, in nats a token."""
    return fmean(run.values("policy/kl_old_nats"))


def log_clipped(run: StudyRun, _: Path) -> float:
    """Return the logarithm to the base 10 of the fraction of tokens that were clipped."""
    names = ("policy/clip_ratio_low", "policy/clip_ratio_high")
    return math.log10(max(sum(fmean(run.values(name)) for name in names), 1e-6))


def log_variances(folder: Path, kind: str, *, fixed: bool) -> dict[int, float]:
    """Return length -> log10 of the variance of log ratios ("token"), or of their "sum" or "mean" in a sample.

    With `fixed`, lengths are beginnings of the same long answers, so that all lengths have the same difficulty;
    otherwise they are those of whole completions.
    """
    by_length: dict[int, list[list[float]]] = {}
    for path in sorted((folder / "samples").glob("step_*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:  # texts may hold other ends of lines
            ratios = [one for one in json.loads(line).get("log_ratios", ()) if one is not None]
            # The first update of a rollout batch has ratios of 1.
            if not any(ratios):
                continue
            lengths = [length for length in (2, 4, 8, 16) if len(ratios) >= 16] if fixed else [len(ratios)]
            for length in lengths:
                by_length.setdefault(length, []).append(ratios[:length])
    found = {}
    for length, samples in sorted(by_length.items()):
        if len(samples) < 30:
            continue
        numbers = {
            "token": [one for sample in samples for one in sample],
            "sum": [math.fsum(sample) for sample in samples],
            "mean": [fmean(sample) for sample in samples],
        }[kind]
        if variance := pvariance(numbers):  # none where all answers are one prompt's, and certain
            found[length] = math.log10(variance)
    return found


def ratio_slope(kind: str, *, fixed: bool) -> Value:
    """Return the slope of log variance on log length, of the numbers of `log_variances`."""

    def slope(_: StudyRun, folder: Path) -> float:
        variances = log_variances(folder, kind, fixed=fixed)
        return linear_regression([math.log10(length) for length in variances], [*variances.values()]).slope

    return slope


def draw_variances(runs: Sequence[StudyRun], folder: Path, picture: Path) -> None:
    """Write the picture of the variances by length, a figure for each kind of number and of length."""

    def points(kind: str, fixed: bool) -> Callable[[StudyRun], Points]:
        return lambda run: log_variances(run_folder(folder, run.arm, run.seed), kind, fixed=fixed)

    figures = [
        StudyFigure(f"log10 of the variance: {what}, {of}", points(kind, fixed), axis="tokens")
        for kind, what in (("token", "log ratios of tokens"), ("sum", "their sums"), ("mean", "their means"))
        for fixed, of in ((False, "by length of answer"), (True, "beginnings"))
    ]
    picture.write_text(as_svg(rows_of(runs, collapse_below=0.0), figures), encoding="utf-8")


def minus(value: Value) -> Value:
    """Return the negative of a value."""
    return lambda run, folder: -value(run, folder)


def at_rates(loss: str, *words: str) -> dict[str, list[str]]:
    """Return the arms of a method at both learning rates."""
    return {f"{loss} {rate}": [f"rl.loss.kind={loss.lower()}", f"optim.lr={rate}", *words] for rate in ("1e-4", "3e-4")}


class Chain:
    """An environment of three turns, in each of which a string is reversed; each turn has a reward of its own."""

    def start(self, prompt: Problem) -> Sequence[Mapping[str, str]]:
        """Return the first third of the string, as a problem of its own."""
        digits = prompt.prompt.removesuffix("=")
        third = -(-len(digits) // 3)
        self.waiting = [digits[at : at + third] for at in range(0, len(digits), third)]
        return [{"role": "user", "content": f"{self.waiting[0]}="}]

    def step(self, completion: str) -> tuple[Sequence[Mapping[str, str]], float, bool]:
        """Return the next third, the fraction of right positions, and whether this was the last."""
        wanted = self.waiting.pop(0)[::-1]
        right = sum(given == digit for given, digit in zip(completion.strip(), wanted, strict=False)) / len(wanted)
        replies = [{"role": "user", "content": f"{self.waiting[0]}="}] if self.waiting else []
        return replies, right, not self.waiting


def begin_as_grpo(run_dir: Path, words: Sequence[str], seeds: Sequence[int]) -> Mapping[str, Sequence[str]]:
    """Train the arm SWITCHED as GRPO for half of its rollout batches, so that it goes on from there."""
    half = CLAIMS["switch"].rollouts // 2
    folders = [run_folder(run_dir, SWITCHED, seed) for seed in seeds]
    if any(read_run(SWITCHED, 0, folder).rollouts < half for folder in folders):
        steps = f"train.steps={half * UPDATES}"
        run_study(run_dir.parent, study_toml(run_dir, seeds, [*words, steps], {SWITCHED: [GRPO]}), run_dir, None)
        for folder in folders:
            (folder / "DONE").unlink()
    return {}


def collapse(run_dir: Path, words: Sequence[str], seeds: Sequence[int]) -> Mapping[str, Sequence[str]]:
    """Train a run at the other claims' rate, then at the rate FALL: arms begin before its fall and at its bottom."""

    def train(part: str, rollouts: int, *more: str) -> StudyRun:
        many = [*words, f"train.steps={rollouts * UPDATES}", f"checkpoint.interval={2 * UPDATES}", *more]
        folder = run_dir.with_name(f"{run_dir.name}-{part}")
        run_study(run_dir.parent, study_toml(folder, seeds[:1], many, {"GRPO": [GRPO]}), folder, None)
        checkpoints[part] = run_folder(folder, "GRPO", seeds[0]) / "checkpoints"
        return read_run("GRPO", seeds[0], checkpoints[part].parent)

    checkpoints: dict[str, Path] = {}
    best = max(train("risen", 8, "optim.lr=1e-4").values("reward/mean"))
    before = f"checkpoint.load={checkpoints['risen']}/iter_{8 * UPDATES:07d}"
    rewards = train("fallen", 8, f"optim.lr={FALL}", "checkpoint.keep=20", before).values("reward/mean")
    pairs = [fmean(rewards[at : at + 2]) for at in range(0, len(rewards), 2)]
    worst = min(range(len(pairs)), key=pairs.__getitem__)
    if pairs[worst] > best / 2:
        raise SystemExit(f"No collapse to recover from: the reward fell to {pairs[worst] / best:.2f} of its best only.")
    bottom = f"checkpoint.load={checkpoints['fallen']}/iter_{(worst + 1) * 2 * UPDATES:07d}"
    return {arm: [before if "before" in arm else bottom] for arm in RECOVERIES}


FALL = "2e-3"
"""Learning rate at which a run collapses."""
SWITCHED = "GRPO then GSPO"
PAIRS = {"GRPO": [GRPO], "GSPO": [GSPO]}
RECOVERED = (
    ("GRPO", "1e-4", [GRPO]),
    ("GSPO", "1e-4", [GSPO]),
    ("GRPO + R3", "1e-4", [GRPO, R3]),
    ("GRPO", FALL, [GRPO]),
)
RECOVERIES = {
    f"{name}, {place}, {rate}": [*loss, f"optim.lr={rate}"]
    for name, rate, loss in RECOVERED
    for place in ("before", "bottom")
}
"""Methods from the last checkpoint before a fall and from its bottom, and one at the rate of the fall."""
CLAIMS = {
    "length": Claim(
        sentence="The variance of token ratios grows with the length, that of a sequence's mean does not",
        start="long",
        rollouts=16,
        # The samples of four prompts have the ratios of their tokens, so that a rollout batch is four prompts.
        words=(
            *("rl.samples.interval=1", "rl.rollout.prompts_per_step=4", "rl.rollout.group_size=32"),
            *("rl.prompts.smallest=2", "rl.prompts.largest=24", "optim.lr=3e-4"),
        ),
        arms=PAIRS,
        differences={
            f"{sign} slope of log variance on log length, {arm}, {what}, {lengths}": (
                (minus if sign == "minus the" else lambda value: value)(ratio_slope(kind, fixed=lengths != "answers")),
                {arm: 1.0},
            )
            for arm in PAIRS
            for lengths in ("answers", "beginnings of 16 tokens")
            for sign, kind, what in (
                ("the", "token", "tokens"),
                ("the", "sum", "sums"),
                ("minus the", "mean", "means of sequences"),
            )
        },
    ),
    "clipping": Claim(
        sentence="GSPO clips far more tokens than GRPO and learns no slower, each at its best learning rate",
        start="small",
        rollouts=16,
        arms={**at_rates("GRPO"), **at_rates("GSPO")},
        rates={method: [f"{method} {rate}" for rate in ("1e-4", "3e-4")] for method in PAIRS},
        differences={
            "log10 of clipped tokens, GSPO less GRPO, less 1 (ten times as many)": (
                lambda run, folder: log_clipped(run, folder) - ("GSPO" in run.arm),
                {"GSPO": 1.0, "GRPO": -1.0},
            ),
            "mean reward, GSPO less GRPO, plus 0.02": (
                lambda run, folder: reward(run, folder) + 0.02 * ("GSPO" in run.arm),
                {"GSPO": 1.0, "GRPO": -1.0},
            ),
        },
    ),
    "engine": Claim(
        sentence="The engine's own logprobs cost GSPO less reward than GRPO, where the engine differs from the trainer",
        start="small",
        rollouts=16,
        words=("optim.lr=1e-4",),
        arms={
            f"{name}, {engine}, {old}": [*loss, kind, *([FROM_ENGINE] if old == "engine's" else [])]
            for engine, kind in (("rounded", ROUNDED), ("noisy", NOISY))
            for name, loss in PAIRS.items()
            for old in ("trainer's", "engine's")
        },
        differences={
            f"reward that GRPO loses less what GSPO loses, {engine} engine": (
                reward,
                {
                    f"GRPO, {engine}, trainer's": 1.0,
                    f"GRPO, {engine}, engine's": -1.0,
                    f"GSPO, {engine}, trainer's": -1.0,
                    f"GSPO, {engine}, engine's": 1.0,
                },
            )
            for engine in ("rounded", "noisy")
        },
    ),
    "gap": Claim(
        sentence="Replay makes an update's KL smaller and the reward at the end higher, with an engine that differs",
        start="top1",
        rollouts=40,
        words=(ROUNDED, FROM_ENGINE, "optim.lr=6e-4", "rl.prompts.smallest=2", "rl.prompts.largest=4"),
        arms={**PAIRS, **{f"{name} + R3": [*loss, R3, FAR] for name, loss in PAIRS.items()}},
        differences={
            f"{what}, {better} less {worse}": (value, {better: 1.0, worse: -1.0})
            for loss in PAIRS
            for better, worse in ((f"{loss} + R3", loss),)
            for what, value in (("minus the KL of an update", minus(kl_old)), ("reward at the end", reward_at_end))
        },
    ),
    "steps": Claim(
        sentence="Rewards at each turn (GSPO-token) teach a task of three turns faster than their sum (GSPO)",
        start="small",
        rollouts=16,
        words=(
            *("rl.environment.name=bench.claims:Chain", 'rl.reward.parts=["environment"]', "optim.lr=1e-4"),
            *("rl.environment.max_turns=3", "rl.environment.max_tokens=96", "rl.prompts.smallest=12"),
            *("rl.prompts.largest=15", "rl.rollout.max_new_tokens=12"),
        ),
        arms={"GSPO": [GSPO], "GSPO-token": ["rl.loss.kind=gspo_token", "rl.advantage.kind=steps"]},
        differences={"mean reward, GSPO-token less GSPO": (reward, {"GSPO-token": 1.0, "GSPO": -1.0})},
    ),
    "switch": Claim(
        sentence="A change from GRPO to GSPO in mid-run costs no reward",
        start="small",
        rollouts=16,
        words=("optim.lr=1e-4",),
        before=begin_as_grpo,
        arms={**PAIRS, SWITCHED: [GSPO]},
        differences={
            f"reward at the end, changed less {arm} alone, plus 0.02": (
                lambda run, folder: reward_at_end(run, folder) + 0.02 * (run.arm == SWITCHED),
                {SWITCHED: 1.0, arm: -1.0},
            )
            for arm in PAIRS
        },
    ),
    "recovery": Claim(
        sentence="A collapsed run cannot be recovered from its bottom, but from its last checkpoint before the fall",
        start="small",
        rollouts=16,
        before=collapse,
        arms=RECOVERIES,
        differences={
            f"reward at the end, from before the fall less from its bottom, {name}, {rate}": (
                reward_at_end,
                {f"{name}, before, {rate}": 1.0, f"{name}, bottom, {rate}": -1.0},
            )
            for name, rate, _ in RECOVERED
        },
    ),
}


def outcome(values: Sequence[float]) -> str:
    """Return the word for differences, a number for each seed."""
    mean, half = interval(values)
    if half is None or abs(mean) <= half:
        return "not shown"
    return "shown" if mean > 0 else "refuted"


def by_seed(claim: Claim, runs: Sequence[StudyRun], folder: Path) -> dict[str, list[float]]:
    """Return the differences of a claim, for the seeds of which all arms are done."""
    arms = dict.fromkeys(run.arm for run in runs)
    done = {(run.arm, run.seed): run for run in runs if run.is_done}
    seeds = [seed for seed in dict.fromkeys(run.seed for run in runs) if all((arm, seed) in done for arm in arms)]
    best = {
        method: max(among, key=lambda arm: fmean(reward(done[arm, seed], folder) for seed in seeds))
        for method, among in claim.rates.items()
        if seeds
    }
    return {
        name: [
            math.fsum(
                factor * value(done[best.get(arm, arm), seed], run_folder(folder, best.get(arm, arm), seed))
                for arm, factor in factors.items()
            )
            for seed in seeds
        ]
        for name, (value, factors) in claim.differences.items()
    }


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Return the folder of a run, as `mcore-rl study` names it."""
    return folder / f"{arm.lower().replace(' ', '_').replace('+', 'with')}-{seed}"


def make_start(folder: Path, name: str, layers: str) -> str:
    """Write a start's inputs and train it, unless it is there; return its run folder."""
    start, run_dir = STARTS[name], f"start-{name}-{layers}"
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in (("model", MODEL), ("sft", SFT), ("rl", RL)):
        (folder / f"{file}.toml").write_text(text)
    write_tokenizer(folder / "tokenizer")
    if not (folder / run_dir / "DONE").exists():
        data, lengths = f"sft-{name}.jsonl", f"rl.prompts.smallest={start.smallest}"
        words = [lengths, f"rl.prompts.largest={start.largest}", "--count", str(EXAMPLES), "--output", data]
        (folder / data).unlink(missing_ok=True)
        program(folder, ["problems", "rl.toml", *words])
        settings = ["optim.lr=2e-3", f"run_dir={run_dir}", f"train.steps={start.steps}", f"data.train=['{data}']"]
        program(folder, ["sft", "sft.toml", *start.words, *settings, f"platform.layers={layers}"])
    return run_dir


def run_claim(name: str, folder: Path, layers: str, seeds: Sequence[int], minutes: float | None) -> dict[str, Any]:
    """Run what is not done of a claim, and return its results."""
    claim, start = CLAIMS[name], make_start(folder, CLAIMS[name].start, layers)
    run_dir = folder / f"{name}-{layers}"
    words = [*STARTS[claim.start].words, *claim.words, f"checkpoint.load={start}", f"platform.layers={layers}"]
    more = claim.before(run_dir, words, seeds) if claim.before else {}
    arms = {arm: [*more.get(arm, ()), *fields] for arm, fields in claim.arms.items()}
    words.append(f"train.steps={claim.rollouts * UPDATES}")
    run_study(folder, study_toml(run_dir, seeds, words, arms), run_dir, minutes)
    runs = [read_run(arm, seed, run_folder(run_dir, arm, seed)) for arm in claim.arms for seed in seeds]
    if layers == "auto":
        picture = ROOT / f"docs/images/claim-{name}.svg"
        draw_variances(runs, run_dir, picture) if name == "length" else draw(run_dir / "study.json", picture)
    first = next((run for run in runs if run.starts), None)
    return {
        "claim": name,
        "layers": layers,
        "seeds": list(seeds),
        "rollouts": claim.rollouts,
        "differences": {
            what: {"by_seed": values, "outcome": outcome(values)}
            | dict(zip(("mean", "half"), interval(values), strict=True))
            for what, values in by_seed(claim, runs, run_dir).items()
            if values
        },
        "rewards": {
            arm: [reward(run, run_dir) for run in runs if run.arm == arm and run.is_done] for arm in claim.arms
        },
        **({"commit": first.commit, "versions": first.versions, "machine": first.machine} if first else {}),
    }


def table(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of a claim: a row for each comparison, a column for each kind of kernels."""
    found = {result["layers"]: result["differences"] for result in results if result["claim"] == name}
    lines = [
        f"| {CLAIMS[name].sentence} | " + " | ".join(KERNELS[layers] for layers in found) + " |",
        "|---" + "|---" * len(found) + "|",
    ]
    for what in CLAIMS[name].differences:
        cells = [
            f"{differences[what]['mean']:.3g} ± {differences[what]['half']:.2g}: {differences[what]['outcome']}"
            for differences in found.values()
        ]
        lines.append("| " + " | ".join([what, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the claims that are asked for, and write and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("claims", nargs="*", choices=[*CLAIMS, []], help="all of them without a name")
    parser.add_argument("--folder", type=Path, default=Path("runs/claims"), help="folder of all runs")
    parser.add_argument("--layers", choices=["auto", "torch"], default="auto", help="kernels: platform.layers")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--budget-minutes", type=float, help="minutes after which a claim's runs stop and save")
    parser.add_argument("--table", action="store_true", help="print the tables of what was found, and run nothing")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for name in [] if args.table else args.claims or CLAIMS:
        found = run_claim(name, args.folder.absolute(), args.layers, args.seeds, args.budget_minutes)
        key = (name, args.layers)
        results = [one for one in results if (one["claim"], one["layers"]) != key] + [found]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    names = {result["claim"] for result in results}
    print("\n\n".join(table(name, results) for name in CLAIMS if name in names))


if __name__ == "__main__":
    main()
