"""A page that follows its runs, in a browser: new records are shown without a reload."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.rl.rollouts.evaluation import write_samples
from tests.forked import CLI
from tests.report_runs import sample, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two steps that goes on."""
    run_dir = write_run(tmp_path, RlRunConfig(run_dir="grpo"), 2, samples=(0,))
    (run_dir / "DONE").unlink()
    return run_dir


@pytest.fixture
def server(run_dir: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of its page, and the command that serves it."""
    command = [sys.executable, "-m", CLI, "report", str(run_dir), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            yield re.search(r"http://127\.0\.0\.1:\d+/", line)[0], process
        finally:
            process.kill()


def test_new_records_are_shown_without_a_reload(open_page, server, run_dir):
    url, process = server
    opened = open_page(url=url)
    page = opened.page
    page.evaluate("window.stays = true")
    page.check("#log")
    page.click("#runs summary")
    page.click("[data-chart='1'] .tools button")
    reward = "DATA.charts.find(chart => chart.title === 'Reward')"
    assert page.evaluate(f"{reward}.series[0].y") == [0.01, 0.02]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "time": 2e9, "reward/mean": 0.625}) + "\n")
    write_samples(run_dir / "samples", 3, [sample(3, "a", number) for number in range(3)])
    page.wait_for_function(f"() => {reward}.series[0].y.length === 3")
    assert page.evaluate(f"{reward}.series[0].y") == [0.01, 0.02, 0.625]
    plot = f"[...PLOTS].find(([figure]) => DATA.charts[figure.dataset.chart] === {reward})[1]"
    assert page.evaluate(f"[...{plot}.data[1]]") == [0.01, 0.02, 0.625]
    assert "step 3" in page.text_content("#tokens h3") and "step 3" in page.text_content("#samples")
    assert "0.01 → 0.625" in page.text_content("#overview table")
    assert page.get_attribute(".large", "data-chart") == "1", "a chart that was large stays so"
    assert page.evaluate("window.stays") and page.is_checked("#log")
    assert page.evaluate("document.querySelector('#runs details').open")
    assert set(opened.asked) == {url} and opened.said == []
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0 and process.stderr.read() == ""
    page.wait_for_function("() => document.getElementById('live').textContent.startsWith('no longer')")


def test_a_run_that_cannot_be_read_is_named_and_the_page_stays(open_page, server, run_dir):
    page = open_page(url=server[0]).page
    config = (run_dir / "config.toml").read_text()
    (run_dir / "config.toml").write_text("[model")
    page.wait_for_function("() => document.getElementById('live').textContent.includes('config.toml')")
    assert page.evaluate("PLOTS.size") > 5
    (run_dir / "config.toml").write_text(config)
    page.wait_for_function("() => document.getElementById('live').textContent.startsWith('running')")


def test_it_says_how_far_a_run_is_how_long_it_takes_and_since_when_it_is_silent(open_page, server, run_dir):
    config = (run_dir / "config.toml").read_text()
    assert "\nsteps = 2\n" in config
    (run_dir / "config.toml").write_text(config.replace("\nsteps = 2\n", "\nsteps = 100\n"))

    def write(seconds_ago):
        # Of two minutes a step, of which 60 remain: two hours.
        lines = [{"step": step, "time": time.time() - seconds_ago - 120 * (40 - step)} for step in range(1, 41)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(30)
    page = open_page(url=server[0]).page
    said = "document.getElementById('live').textContent"
    page.wait_for_function(f"() => {said} === 'running, step 40 of 100, 2 hours left'")
    write(7200)
    page.wait_for_function(f"() => {said}.startsWith('silent since ')")
    assert page.evaluate(said).endswith(", step 40 of 100")
    (run_dir / "DONE").write_text("all steps are done")
    page.wait_for_function(f"() => {said} === 'done'")


def test_a_page_of_another_host_gets_nothing(server):
    url, _ = server
    for host in ("evil.example", "evil.example:80", "127.0.0.1"):
        request = urllib.request.Request(url, headers={"Host": host})
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(request)
        assert b"mcore" not in refused.value.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url + "config.toml")
    with urllib.request.urlopen(url) as answer:
        stamp = answer.headers["ETag"]
        assert b"connect-src &#39;self&#39;" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(urllib.request.Request(url, headers={"If-None-Match": stamp}))
