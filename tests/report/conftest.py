"""A headless Chromium, and the page of a pipeline's runs."""

import functools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.report.page import write_report
from tests.report_runs import write_all, write_run

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
PATIENCE_MS = 180_000
"""The longest wait for a page: on a busy machine it is drawn for a minute."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(path for name in names if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_report(write_all(folder), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="session")
def long_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """The page of two runs of 10,000 steps, and the KL to the old policy at every step of each."""
    folder = tmp_path_factory.mktemp("long")
    runs, values = [], []
    for seed, name in enumerate(("one", "two")):
        runs.append(write_run(folder, RlRunConfig(run_dir=name), 2))
        generator = random.Random(seed)
        spiky = [0.06 if generator.random() < 0.02 else 1e-3 * generator.random() for _ in range(10_000)]
        lines = (
            json.dumps({"step": step, "time": 2.0 * step, "policy/kl_old_nats": value, "reward/mean": value})
            for step, value in enumerate(spiky, 1)
        )
        (runs[-1] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        values.append(spiky)
    write_report(runs, folder / "long.html")
    return folder / "long.html", values


@pytest.fixture(scope="session")
def many_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 12 runs of three losses, 40 steps each: run number i has the reward i * step at 10 (i + 1) tokens a
    step, and the entropy 2 + i.
    """
    folder = tmp_path_factory.mktemp("many")
    runs = []
    for number in range(12):
        config = RlRunConfig(run_dir=f"run_of_the_sweep_with_a_name_that_is_long_{number:02}")
        loss = config.rl.loss.model_copy(update={"kind": ("grpo", "gspo", "cispo")[number % 3]})
        config = config.model_copy(update={"rl": config.rl.model_copy(update={"loss": loss})})
        runs.append(write_run(folder, config, 2))
        values = [
            {
                "step": step, "time": 2.0 * step, "reward/mean": number * step, "reward/group_std": 1.0,
                "policy/entropy_nats": 2 + number, "eval/accuracy": number / 20, "eval/prompts": 64,
                "train/consumed_tokens": 10 * (number + 1) * step,
            }
            for step in range(1, 41)
        ]  # fmt: skip
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    write_report(runs, folder / "many.html")
    return folder / "many.html"


class Opened:
    """A page that is open, and all that it said or asked for since."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))


def opened(browser: Browser, url: str, size: str, scheme: str) -> Opened:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE_MS)
    watched = Opened(page)
    page.goto(url)
    return watched


@pytest.fixture
def open_page(browser: Browser, report: Path):
    """A function that opens a page for one test."""
    pages: list[Page] = []

    def open_one(size: str = "desktop", scheme: str = "light", path: Path = report, url: str | None = None) -> Opened:
        pages.append((watched := opened(browser, url or path.as_uri(), size, scheme)).page)
        return watched

    yield open_one
    for page in pages:
        page.close()


@pytest.fixture(scope="session")
def shown(browser: Browser, report: Path):
    """A function that returns a page that tests share, and leave as it was: to draw one takes seconds."""

    @functools.cache
    def page(size: str, scheme: str, path: Path) -> Opened:
        return opened(browser, path.as_uri(), size, scheme)

    return lambda size="desktop", scheme="light", path=report: page(size, scheme, path)
