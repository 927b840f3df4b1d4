"""The site that `make docs` has built, searched in a browser: what people type finds the page that answers it first."""

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.report.conftest import PATIENCE_MS

SITE = Path(__file__).parents[2] / "build" / "site"
QUESTIONS = {
    "wandb": "logging/", "R3": "replay/", "own data": "first_run/", "quickstart": "", "install": "install/",
    "lora": "lora/", "vllm": "engines/", "sglang": "engines/", "out of memory": "troubleshooting/", "slurm": "slurm/",
    "requeue": "slurm/", "gspo": "algorithms/", "dpo": "rlhf/", "reward model": "rlhf/", "convert": "conversion/",
    "expert parallel": "meshes/", "report": "report/", "environment": "environments/", "verl": "coming_from/",
    "reward function": "rewards/", "resume": "failures/", "yarn": "families/",
}  # fmt: skip
# The results are in a shadow tree of the page, by links with an address of their own.
FIRST_RESULT = """() => {
    const links = [];
    const walk = (root) => {
        for (const element of root.querySelectorAll("*")) {
            if (element.shadowRoot) {
                walk(element.shadowRoot);
                links.push(...element.shadowRoot.querySelectorAll("a[href^='http']"));
            }
        }
    };
    walk(document);
    return links.length ? links[0].href : null;
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def search(browser):
    """A function that types a question into the site's search, and returns the page of the first result."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(home)
    page.click(".md-search__button")
    box = page.get_by_placeholder("Search").last

    def first(question):
        box.fill("")
        page.wait_for_function(f"({FIRST_RESULT})() === null")
        box.fill(question)
        page.wait_for_function(f"({FIRST_RESULT})() !== null")
        return page.evaluate(FIRST_RESULT).removeprefix(home).partition("#")[0]

    yield first
    page.close()
    server.shutdown()


@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_a_question_finds_its_page_first(search, question, page):
    assert search(question) == page
