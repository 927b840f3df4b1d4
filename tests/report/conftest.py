"""A headless Chromium, and the page of a pipeline's runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from mcore_rl.report.page import write_report
from tests.report_runs import write_all

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


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


class Opened:
    """A page that is open, and all that it said or asked for since."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))


@pytest.fixture
def open_page(browser: Browser, report: Path):
    """Opens the report at a size, light or dark."""
    pages: list[Page] = []

    def opened(size: str = "desktop", scheme: str = "light", path: Path = report) -> Opened:
        width, height = SIZES[size]
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        pages.append(page)
        watched = Opened(page)
        page.goto(path.as_uri())
        return watched

    yield opened
    for page in pages:
        page.close()
