"""Rendering of the page: one file that fetches nothing, and in which no text of a run can become markup or a script."""

import base64
import hashlib
import json
import re
import socketserver
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mcore_rl import __version__
from mcore_rl.errors import ConfigError, DataError, error_text
from mcore_rl.report import charts, summary
from mcore_rl.report.charts import Chart
from mcore_rl.report.figures import EXPERTS, LEARNING, SPEED
from mcore_rl.report.runs import STAGES, RunRecord, Stage, read_runs
from mcore_rl.report.samples import SHADES, SampledStep, before_and_after, last_traced
from mcore_rl.storage.files import NOT_WRITER, has_mark, refuse_replacing, run_errors_explained, write_atomically

PYTHON_WARNING = re.compile(r"^(?P<place>\S+:\d+): (?P<kind>\w*Warning): (?P<text>.*)$")
MAX_LOG_BYTES = 20 << 20
"""Size of the part of each log that is searched, from its beginning."""
COUNTERS = {
    "train/skipped_steps": "steps were skipped because their gradient was not finite",
    "reward/errors": "scores failed; reward_failures.jsonl has the first of each kind",
    "reward/unscored_completions": "completions had no reward and were left out of their group and the loss",
    "routes/unknown_tokens": "tokens were routed live because the engine returned no routes for them",
    "rollout_routes/unknown_tokens": "tokens have no routes of the engine to compare with",
}
"""Metrics that should stay 0. The first counts since the run's start, every later record since the record before."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One warning of a run."""

    level: str
    """Severity: error, warning or note."""
    text: str
    detail: str = ""


def notices(run: RunRecord) -> list[Notice]:
    """Return the warnings of a run, the most severe first."""
    order = ("error", "warning", "note")
    found: list[Notice] = []
    for path in _of_attempts(run, "failure.json"):
        with suppress(ValueError, LookupError, TypeError):  # the launcher was killed while it wrote
            failure = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            found.append(Notice("error", f"attempt {path.parent.name}: {failure['headline']}", str(failure["text"])))
    if not run.done:
        steps = run.config.get("train", {}).get("steps")
        found.append(Notice("warning", f"not done: the last step recorded is {run.last_step} of {steps}"))
    for name in run.names():
        if name == "train/loss_nats" or name.startswith("policy/"):
            num_odd = sum(isinstance(record.get(name), str) for record in run.records)
            if num_odd:
                found.append(Notice("warning", f"{name} was not finite in {num_odd} records"))
    events = Counter(event.text for event in run.events if event.text.startswith("warning: "))
    for text, times in events.items():
        found.append(Notice("warning", text.removeprefix("warning: ") + (f" ({times} times)" if times > 1 else "")))
    for name, meaning in COUNTERS.items():
        values = run.series(name).values
        total = max(values, default=0.0) if name == "train/skipped_steps" else sum(values)
        if total:
            found.append(Notice("warning", f"{total:g} {meaning} ({name})"))
    python: Counter[tuple[str, str]] = Counter()
    for path in _of_attempts(run, "*.log"):
        with path.open("rb") as file:
            lines = file.read(MAX_LOG_BYTES).decode("utf-8", errors="replace").splitlines()
        python.update((match["kind"], match["text"]) for match in map(PYTHON_WARNING.match, lines) if match)
    for (kind, text), times in python.items():
        found.append(Notice("note", f"{kind}: {text}" + (f" ({times} times, in all logs)" if times > 1 else "")))
    return sorted(found, key=lambda notice: order.index(notice.level))


def _of_attempts(run: RunRecord, pattern: str) -> Iterator[Path]:
    """Yield files of the attempts that wrote the run: no evaluation, and no start that was refused before."""
    for path in sorted((run.path / "logs").glob(f"*/{pattern}")):
        # `latest` is a link to one of the others.
        if not path.parent.is_symlink() and not (path.parent / NOT_WRITER).exists():
            yield path


HOST = "127.0.0.1"
FILES = ("*", "samples/*.jsonl", "logs/*/failure.json")
"""Files of a run that the page is made from; the logs themselves grow all the time."""


class LiveServer(socketserver.ThreadingTCPServer):
    """Serves the page of some runs to browsers on this machine; the page is made anew when a file of them changes."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], port: int) -> None:
        """Listen on `port` of 127.0.0.1 (0: a free one); DataError for no run, ConfigError for the port."""
        self._run_dirs, self._lock, self._made = run_dirs, Lock(), ("", b"")
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"--port {port} is no port. Choose one below 65536, or 0 for any that is free.")
        self.page()
        try:
            super().__init__((HOST, port), _Answer)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be had: {error.strerror}. Choose another, or 0 for any that is free."
            ) from None

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names by which a browser on this machine asks; a page elsewhere that has us fetched has its own name."""
        port = self.server_address[1]
        return (f"{HOST}:{port}", f"localhost:{port}")

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{self.hosts[0]}/"

    def page(self) -> tuple[str, bytes]:
        """Return stamp and HTML of the page; DataError while a run cannot be read."""
        with self._lock:
            states = repr([state for run_dir in self._run_dirs for state in _states(run_dir)])
            # Quoted, as an ETag is.
            stamp = f'"{hashlib.sha256(states.encode(errors="replace")).hexdigest()[:16]}"'
            if stamp != self._made[0]:
                self._made = (stamp, rendered(views_of(self._run_dirs), stamp).encode(errors="replace"))
            return self._made


class _Answer(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._send(403, "This page is for browsers on its own machine.")
        elif self.path != "/":
            self._send(404, f"The page is at {self.server.url}")
        else:
            try:
                stamp, page = self.server.page()
            except DataError as error:
                self._send(503, error_text(error))
                return
            if self.headers.get("If-None-Match") == stamp:
                self._send(304, "")
            else:
                self._send(200, page, stamp)

    def _send(self, status: int, content: str | bytes, stamp: str = "") -> None:
        kind = "html" if isinstance(content, bytes) else "plain"
        body = content if isinstance(content, bytes) else content.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if stamp:
            self.send_header("ETag", stamp)
        self.end_headers()
        with suppress(ConnectionError):  # the reader has closed the page
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page asks every few seconds."""


def _states(run_dir: Path) -> Iterator[tuple[str, int, int]]:
    for pattern in FILES:
        for path in sorted(run_dir.glob(pattern)):
            with suppress(FileNotFoundError):  # a file that the run has just replaced
                status = path.stat()
                yield str(path), status.st_mtime_ns, status.st_size


LIVE = "live.js"
SCRIPTS = ("vendor/uPlot.iife.min.js", "base.js", "lines.js", "maps.js", "bars.js", "tools.js", "page.js")
STYLES = ("vendor/uPlot.min.css", "report.css")
NUM_COLOURS = 8
MOST_CARDS = 4
"""Runs that have a card each; more have a row of a table, which can be sorted."""
MOST_CURVES = 3
"""Curves at the top of the page."""
GENERATOR = "mcore-rl report"
"""Marker of a page of ours: a newer report may replace it."""


@dataclass(frozen=True, slots=True)
class ChartGroup:
    """Charts under one heading, by their index in the page's list of charts."""

    title: str
    charts: list[int]


@dataclass(frozen=True, slots=True)
class StageView:
    """Section of the page for one stage."""

    stage: Stage
    title: str
    groups: list[ChartGroup]
    differences: list[tuple[str, list[str]]]
    run_indices: list[int]


@dataclass(frozen=True, slots=True)
class RunView:
    """One run on the page."""

    run_index: int
    run: RunRecord
    headline: summary.Headline
    tagline: str
    provenance: dict[str, str]
    notices: list[Notice]
    samples: list[SampledStep]
    traced: SampledStep | None
    config: str

    @property
    def colour(self) -> str:
        """Classes of the run's colour; colours repeat, with other dashes."""
        cycle, colour = divmod(self.run_index, NUM_COLOURS)
        return f"c{colour} d{cycle % 4}"

    @property
    def script_data(self) -> dict[str, Any]:
        """The run's part of the numbers that the page's scripts read; times are in seconds since 1970."""
        run, tokens = self.run, self.run.series("train/consumed_tokens")
        bins = charts.binned(len(tokens))
        return {
            "name": run.name,
            "label": run.label,
            "stage": run.stage,
            "cycle": self.run_index // NUM_COLOURS,
            "colour": self.run_index % NUM_COLOURS,
            "tokens": [[values[one[-1]] for one in bins] for values in (tokens.steps, tokens.values)],
            "recent": [[int(record["step"]), float(record["time"])] for record in run.records[-20:]],
            "step": run.last_step,
            "steps": run.config.get("train", {}).get("steps"),
            "done": run.done,
        }


def write_report(run_dirs: Sequence[Path], output: Path) -> list[Notice]:
    """Write the page of some runs; return their warnings. ConfigError unless `output` is free or a page."""
    refuse_replacing(
        output,
        [("a run", run_dir) for run_dir in run_dirs],
        overwrite=True,
        foreign=lambda path: None if has_mark(path, GENERATOR) else f"is not a page of `{GENERATOR}`",
    )
    views = views_of(run_dirs)
    write_atomically(output, rendered(views).encode(errors="replace"))
    return [notice for view in views for notice in view.notices]


def views_of(run_dirs: Sequence[Path]) -> list[RunView]:
    """Return the runs in the order of the page; DataError for a folder that is not a run."""
    views = []
    for run_index, run in enumerate(read_runs(run_dirs)):
        with run_errors_explained(run.path):
            view = RunView(
                run_index=run_index,
                run=run,
                headline=summary.headline(run),
                tagline=summary.tagline(run),
                provenance=summary.provenance(run),
                notices=notices(run),
                samples=before_and_after(run.path),
                traced=last_traced(run.path),
                config=(run.path / "config.toml").read_text(encoding="utf-8"),
            )
        views.append(view)
    return views


def rendered(views: Sequence[RunView], stamp: str = "") -> str:
    """Return the HTML of the page; with a stamp, of a page that fetches itself again when its stamp has changed."""
    runs = [view.run for view in views]
    drawn: list[Chart] = []
    overview = _appended(drawn, charts.accuracy_charts(runs))
    stages = [view for stage in STAGES if (view := _stage(stage, runs, drawn))]
    script = "\n".join(['"use strict";', *(_asset(name) for name in (*SCRIPTS, *([LIVE] if stamp else [])))])
    style = "\n".join(map(_asset, STYLES))
    fields: list[dict[str, str]] = [{} for _ in runs]
    for stage in stages:
        for name, values in stage.differences:
            for run_index, value in zip(stage.run_indices, values, strict=True):
                fields[run_index][name] = value
    data = {
        "runs": [view.script_data | {"fields": own} for view, own in zip(views, fields, strict=True)],
        "charts": drawn,
    }
    # Every stage has its first curves at the top too.
    learning = [stage.groups[0].charts for stage in stages if stage.groups]
    environment = Environment(
        loader=PackageLoader("mcore_rl.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=" · ".join(view.run.name for view in views),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        generator=GENERATOR,
        views=views,
        overview=overview,
        curves=[number for own in learning for number in own[: max(1, MOST_CURVES // len(learning))]],
        fields=sorted({name for own in fields for name in own}),
        most_cards=MOST_CARDS,
        data=data,
        stages=stages,
        charts=drawn,
        numbers=summary.numbers(runs),
        stamp=stamp,
        shades=SHADES,
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
        + ("; connect-src 'self'" if stamp else ""),
        style=Markup(style),
        script=Markup(script),
        safe_data=Markup(script_safe(data)),
    )


def _stage(stage: Stage, runs: Sequence[RunRecord], drawn: list[Chart]) -> StageView | None:
    run_indices = [run_index for run_index, run in enumerate(runs) if run.stage == stage]
    if not run_indices:
        return None
    own = [runs[run_index] for run_index in run_indices]
    indexed = list(zip(run_indices, own, strict=True))
    experts = [
        *charts.on_one_scale([chart for index, run in indexed for chart in charts.expert_maps(run, index)]),
        *charts.on_one_scale([chart for index, run in indexed for chart in charts.layer_maps(run, index)]),
        *charts.line_charts(EXPERTS, own, run_indices),
    ]
    phases = charts.phase_chart(own, run_indices)
    speed = [*([phases] if phases else ()), *charts.line_charts(SPEED, own, run_indices)]
    groups = [
        ChartGroup("Learning", _appended(drawn, charts.line_charts(LEARNING, own, run_indices))),
        ChartGroup("Experts", _appended(drawn, experts)),
        ChartGroup("Speed and memory", _appended(drawn, speed)),
    ]
    return StageView(
        stage=stage,
        title=STAGES[stage],
        groups=[group for group in groups if group.charts],
        differences=summary.differences(own) if len(own) > 1 else [],
        run_indices=run_indices,
    )


def _appended(drawn: list[Chart], new: Iterable[Chart]) -> list[int]:
    before = len(drawn)
    drawn += new
    return list(range(before, len(drawn)))


def script_safe(data: object) -> str:
    """Return JSON in which no character can end a script or start markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (files("mcore_rl.report") / "page" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
