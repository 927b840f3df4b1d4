"""The page: everything inside one file, nothing fetched, and no text of a run that could become markup or a script."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mcore_rl import __version__
from mcore_rl.files import write_atomically
from mcore_rl.report import charts, facts
from mcore_rl.report.charts import Chart
from mcore_rl.report.figures import EXPERTS, LEARNING, SPEED
from mcore_rl.report.notices import Notice, notices
from mcore_rl.report.runs import STAGES, RunRecord, Stage, read_runs
from mcore_rl.report.samples import Sampled, before_and_after

SCRIPTS = ("base.js", "lines.js", "maps.js", "bars.js", "page.js")
NUM_COLOURS = 8


@dataclass(frozen=True, slots=True)
class Group:
    """Charts under one heading; numbers index the page's list of charts."""

    title: str
    charts: list[int]


@dataclass(frozen=True, slots=True)
class StageView:
    """One section of the page."""

    stage: Stage
    title: str
    groups: list[Group]
    differences: list[tuple[str, list[str]]]
    places: list[int]


@dataclass(frozen=True, slots=True)
class RunView:
    """One run on the page."""

    place: int
    run: RunRecord
    headline: facts.Headline
    tagline: str
    provenance: list[facts.Fact]
    notices: list[Notice]
    samples: list[Sampled]
    config: str

    @property
    def colour(self) -> int:
        """Of the runs' colours; they come round again."""
        return self.place % NUM_COLOURS


def write_report(run_dirs: Sequence[Path], output: Path) -> list[Notice]:
    """The page of these runs at `output`, all of it at once; what the runs warned of."""
    runs = read_runs(run_dirs)
    views = [_view(place, run) for place, run in enumerate(runs)]
    write_atomically(output, rendered(views).encode(errors="replace"))
    return [notice for view in views for notice in view.notices]


def rendered(views: Sequence[RunView]) -> str:
    """The HTML."""
    runs = [view.run for view in views]
    drawn: list[Chart] = []
    overview = _numbered(drawn, filter(None, [charts.accuracy_chart(runs)]))
    stages = [view for stage in STAGES if (view := _stage(stage, runs, drawn))]
    script = "\n".join(_asset(name) for name in SCRIPTS)
    style = _asset("report.css")
    data = {
        "runs": [{"name": view.run.name, "colour": view.colour, "label": view.run.label} for view in views],
        "charts": drawn,
    }
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
        views=views,
        overview=overview,
        stages=stages,
        charts=drawn,
        numbers=facts.numbers(runs),
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        style=Markup(style),
        script=Markup(script),
        data=Markup(script_safe(data)),
    )


def _view(place: int, run: RunRecord) -> RunView:
    return RunView(
        place=place,
        run=run,
        headline=facts.headline(run),
        tagline=facts.tagline(run),
        provenance=facts.provenance(run),
        notices=notices(run),
        samples=before_and_after(run.path),
        config=(run.path / "config.toml").read_text(encoding="utf-8"),
    )


def _stage(stage: Stage, runs: Sequence[RunRecord], drawn: list[Chart]) -> StageView | None:
    places = [place for place, run in enumerate(runs) if run.stage == stage]
    if not places:
        return None
    own = [runs[place] for place in places]
    groups = [
        Group("Learning", _numbered(drawn, charts.line_charts(LEARNING, own, places))),
        Group("Experts", _numbered(drawn, _expert_charts(own, places))),
        Group("Speed and memory", _numbered(drawn, _speed_charts(own, places))),
    ]
    return StageView(
        stage=stage,
        title=STAGES[stage],
        groups=[group for group in groups if group.charts],
        differences=facts.differences(own) if len(own) > 1 else [],
        places=places,
    )


def _expert_charts(runs: Sequence[RunRecord], places: Sequence[int]) -> Iterator[Chart]:
    numbered = list(zip(places, runs, strict=True))
    yield from charts.on_one_scale([one for at, run in numbered for one in charts.expert_maps(run, at)])
    yield from charts.on_one_scale([one for at, run in numbered for one in charts.layer_maps(run, at)])
    yield from charts.line_charts(EXPERTS, runs, places)


def _speed_charts(runs: Sequence[RunRecord], places: Sequence[int]) -> Iterator[Chart]:
    if chart := charts.phase_chart(runs, places):
        yield chart
    yield from charts.line_charts(SPEED, runs, places)


def _numbered(drawn: list[Chart], new: Iterator[Chart]) -> list[int]:
    """Adds `new` to `drawn`; their numbers."""
    before = len(drawn)
    drawn += new
    return list(range(before, len(drawn)))


def script_safe(data: object) -> str:
    """JSON in which no character can end a script or start markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (files("mcore_rl.report") / "page" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    """What a browser compares an inline script or style with before it uses it."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
