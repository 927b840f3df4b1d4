"""The report tells the numbers of its runs, and none of a run's texts can become part of the page."""

import json
import re
import statistics
import tomllib
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.sft import evaluation_conditions
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.metrics.metrics import Metric
from mcore_rl.metrics.verdict import OverOptimization, verdict, wilson
from mcore_rl.report import charts, summary
from mcore_rl.report.figures import EXPERTS, LAYER_MAPS, LEARNING, SPEED, Band
from mcore_rl.report.page import LiveServer, notices, script_safe, write_report
from mcore_rl.report.runs import read_runs, short_names
from mcore_rl.report.samples import before_and_after, last_traced, word_diff
from mcore_rl.rl.rollouts.evaluation import write_samples
from tests.report_runs import HOSTILE, load_table, sample, write_all, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return read_runs(write_all(tmp_path_factory.mktemp("runs"))[::-1])


@pytest.fixture(scope="module")
def page(runs):
    output = runs[0].path.parent / "report.html"
    write_report([run.path for run in runs], output)
    return output.read_text(encoding="utf-8")


def series(run, name):
    """Steps and values of a metric, read from the file by other means than the report's."""
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if name in record]
    return [record["step"] for record in found], [record[name] for record in found]


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_every_line_of_the_page_has_the_numbers_of_the_metrics(page, runs):
    data = data_of(page)
    drawn = [one for chart in data["charts"] if chart["kind"] == "lines" for one in chart["series"] if one["y"]]
    assert {one["metric"] for one in drawn} >= {"train/loss_nats", "reward/mean", "memory/resident_bytes"}
    for one in drawn:
        steps, values = series(runs[one["run"]], one["metric"])
        assert one["x"] == steps
        assert one["y"] == pytest.approx(values, rel=1e-5)


def test_the_band_of_the_reward_is_its_spread(page, runs):
    reward = next(chart for chart in data_of(page)["charts"] if chart["title"] == "Reward")
    assert [one["run"] for one in reward["series"]] == [2, 3]
    for one in reward["series"]:
        _, means = series(runs[one["run"]], "reward/mean")
        _, spreads = series(runs[one["run"]], "reward/group_std")
        both = list(zip(means, spreads, strict=True))
        assert one["low"] == pytest.approx([mean - spread for mean, spread in both], rel=1e-5, abs=1e-9)
        assert one["high"] == pytest.approx([mean + spread for mean, spread in both], rel=1e-5, abs=1e-9)


def test_the_tables_of_the_experts_are_sums_over_the_steps_between_them(page):
    chart = next(chart for chart in data_of(page)["charts"] if chart["kind"] == "experts")
    assert chart["steps"] == list(range(5, 61, 5))
    for step, table in zip(chart["steps"], chart["tables"], strict=True):
        parts = [load_table(at) for at in range(step - 4, step + 1)]
        assert table == [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]


def test_the_busiest_expert_is_told_over_its_mean_and_a_dense_layer_has_none():
    assert charts.over_mean([1, 1, 4]) == pytest.approx(2)
    assert charts.over_mean([0, 0, 0]) == 0


def test_maps_beside_each_other_have_one_scale():
    maps = [{"title": "a", "most": 2}, {"title": "b", "most": 9}, {"title": "a", "most": 5}]
    assert [(one["title"], one["most"]) for one in charts.on_one_scale(maps)] == [("a", 5), ("a", 5), ("b", 9)]


def test_phases_of_a_step_sum_to_its_time(runs):
    assert charts.phase_seconds(runs[0]) == [
        ("waiting for data", 0.1),
        ("forward and backward", 0.25),
        ("other", pytest.approx(0.15)),
    ]
    assert dict(charts.phase_seconds(runs[2]))["other"] == pytest.approx(2 - 1.25 - 0.5)


def test_runs_come_by_stage_and_the_table_tells_first_and_last(runs):
    assert [run.label for run in runs] == ["Pretraining", "Fine-tuning", "GSPO", "GRPO"]
    table = dict(summary.numbers(runs))
    (accuracy,) = [cells for name, cells in table.items() if name.startswith("accuracy, ")]
    assert accuracy == ["", "", *["11.0 % → 50.0 % (95 %: 38.1 to 61.9, n = 64)"] * 2]
    _, losses = series(runs[0], "train/loss_nats")
    assert table["loss"][0] == f"{losses[0]:.4g} → {losses[-1]:.4g}"
    speeds = series(runs[0], "train/tokens_per_s_per_rank")[1]
    assert table["tokens / s / rank, median"][0] == f"{statistics.median_low(speeds) / 1000:.3g} k"


def test_only_what_differs_between_the_configs_is_told(runs):
    assert summary.differences(runs[2:]) == [("rl.loss.kind", ['"gspo"', '"grpo"'])]


def test_what_was_run_is_told_with_the_command_a_user_gives(runs):
    provenance = summary.provenance(runs[0])
    assert provenance["mesh"] == "world 2" and "2 ranks on" in provenance["machine"]
    assert "torch" in provenance["versions"]
    attempt = replace(runs[0].attempts[0], command=["python", "-m", "mcore_rl.programs.pretrain", "a b.toml"])
    assert summary.command_text(attempt) == "mcore-rl pretrain 'a b.toml'"


class Texts(HTMLParser):
    """Tags with their attributes, and what a reader sees."""

    def __init__(self):
        super().__init__()
        self.tags, self.seen = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.seen += data


def test_hostile_texts_are_seen_and_are_no_markup(page):
    parser = Texts()
    parser.feed(page)
    assert parser.seen.count(HOSTILE) >= 8  # prompts, completions, warnings, events
    assert [tag for tag, _ in parser.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in parser.tags}
    assert not [attrs for _, attrs in parser.tags if {"style", "onclick", "onerror"} & set(attrs)]
    (policy,) = [a["content"] for _, a in parser.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_nothing_is_fetched(page):
    outside = re.findall(r"""(?:src|href)=["']?(?!#|data:)([^"'\s>]+)""", page.replace("src=x", ""))
    assert outside == [] and "url(" not in page and "@import" not in page


def test_data_cannot_end_its_script():
    data = ["</script><!--", "\u2028&"]
    assert not set("<>&\u2028") & set(script_safe(data))
    assert json.loads(script_safe(data)) == data


def test_long_curves_are_means_of_neighbours_of_which_none_is_left_out():
    values = [0.0] * 10_001
    values[1234], values[10_000] = 9.0, -9.0
    bins = charts.binned(len(values))
    assert [index for one in bins for index in one] == list(range(10_001)) and len(bins) == charts.MAX_POINTS
    assert {len(one) for one in bins} == {25, 26}
    drawn = charts.means(values, bins)
    assert sorted(drawn)[-1] == pytest.approx(9 / 25, rel=0.05) and drawn[-1] == pytest.approx(-9 / 26)
    assert charts.means([3.0, 1.0], charts.binned(2)) == [3.0, 1.0]


def test_accuracies_have_wilson_s_interval():
    # Newcombe 1998, table I: 81 of 263 and 15 of 148.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0.0, 20)[0] == 0.0


def test_only_accuracies_under_the_same_conditions_stand_beside_each_other(runs):
    sft, gspo, grpo = runs[1:]
    same = {"eval/accuracy": 0.25, "eval/prompts": 64, "conditions": evaluation_conditions(gspo.config)}
    warmer = same | {"conditions": same["conditions"] | {"temperature": 0.7}}
    mixed = [replace(sft, evaluation=same), gspo, replace(grpo, evaluation=warmer)]
    drawn = list(charts.accuracy_charts(mixed))
    assert [[bar["run"] for bar in chart["bars"]] for chart in drawn] == [[0, 1, 2], [2]]
    assert "temperature 0," in drawn[0]["note"] and "temperature 0.7," in drawn[1]["note"]
    rows = [(name, cells) for name, cells in summary.numbers(mixed) if name.startswith("accuracy, ")]
    assert [cells[2] for _, cells in rows] == [
        "11.0 % → 50.0 % (95 %: 38.1 to 61.9, n = 64)",
        "25.0 % (95 %: 16.0 to 36.8, n = 64)",
    ]
    assert rows[1][1][:2] == ["", ""]


def test_the_table_has_the_verdict_of_the_log_and_the_first_alarm_for_the_reward(runs):
    grpo = runs[3]
    hacked = [
        {"step": step, "time": float(step), "reward/mean": step, "reward/accuracy": 0.8 if step <= 15 else 0.2}
        for step in range(1, 31)
    ]
    ends = [{"step": step, "time": 0.0, "eval/accuracy": x, "eval/prompts": 64} for step, x in ((0, 0.75), (30, 0.25))]
    records = [ends[0], *hacked, ends[1]]
    cells = dict(summary.numbers([replace(grpo, records=records), *runs[:1]]))["verdict"]
    found, watch = verdict(records), OverOptimization(["exact"], None)
    alarm = next(filter(None, map(watch.of_record, records)))
    assert found is not None and found.word == "got worse" and found.text in found.line
    assert cells == [f"{found.text}. {alarm.removeprefix('warning: ')}", ""]  # nothing of a pretraining


def test_evenly_spaced_places_have_both_ends():
    assert charts.evenly(3, 5) == [0, 1, 2]
    assert charts.evenly(101, 5) == [0, 25, 50, 75, 100]


def test_samples_are_of_the_first_and_the_last_step_the_best_answer_first(runs):
    before, after = before_and_after(runs[3].path)
    assert (before.step, after.step, before.mean) == (0, 39, 0.5)
    assert [one.reward for one in after.groups[0].completions] == [1.0, 0.5, 0.0]
    assert [one.is_truncated for one in after.groups[0].completions] == [False, False, True]
    assert after.groups[0].prompt.startswith("prompt a of step 39")


def test_a_diff_of_words_has_both_texts_and_their_longest_common_words():
    before, after = word_diff("  so x = 3, then 4", "  so y = 3, and then 4!")
    assert before == (("same", "  so "), ("gone", "x "), ("same", "= 3, "), ("same", "then 4"))
    assert after == (
        ("same", "  so "),
        ("new", "y "),
        ("same", "= 3, "),
        ("new", "and "),
        ("same", "then 4"),
        ("new", "!"),
    )
    assert word_diff("", "a") == ((), (("new", "a"),))
    assert word_diff("1 2", "1 2") == ((("same", "1 2"),),) * 2


def test_completions_of_the_same_prompt_are_compared_by_rank(runs):
    before, after = before_and_after(runs[3].path)
    assert before.groups[0].completions[0].parts == (
        ("same", "completion 2 of step "),
        ("gone", "0\n"),
        ("same", "of two lines"),
    )
    assert after.groups[1].completions[2].parts[1] == ("new", "39\n")
    assert [kind for kind, _ in after.groups[0].completions[1].parts] == ["same"]


def test_samples_are_of_the_same_held_out_prompts_with_the_best_the_worst_and_the_most_changed_first(tmp_path):
    run_dir = write_run(tmp_path, RlRunConfig(run_dir="evaluated"), 3, samples=(0, 2))
    rewards = {"a": (0.5, 0.5), "b": (1.0, 0.75), "c": (0.5, 1.0), "d": (0.25, 0.0), "e": (0.0, 0.9), "f": (0.5, 0.5)}
    for at, step in enumerate((0, 3)):
        samples = [{**sample(step, problem, 2), "reward": both[at]} for problem, both in rewards.items()]
        write_samples(run_dir / "samples", step, samples, "eval")
    before, after = before_and_after(run_dir)
    assert (before.step, after.step) == (0, 3)
    for side in (before, after):
        assert [(group.prompt[7], group.kind) for group in side.groups] == [
            ("c", "best"),
            ("d", "worst"),
            ("e", "most changed"),
            ("a", ""),
        ]
    assert [group.completions[0].reward for group in after.groups] == [1.0, 0.0, 0.9, 0.5]


def test_texts_and_tokens_with_markup_and_escape_sequences_are_shown_as_text(tmp_path):
    run_dir = write_run(tmp_path, RlRunConfig(run_dir="odd"), 3, samples=(0,))
    odd = ["<script>window.hacked = 2</script>", "\x1b[2J", "\x1b]0;title\x07", "<b onclick=x>"]
    (path,) = (run_dir / "samples").glob("*.jsonl")
    odd_sample = json.loads(path.read_text().splitlines()[0])
    odd_sample |= {"completion": "".join(odd), "pieces": odd, "log_ratios": [None] * 4, "prompt": "\x9b31m"}
    path.write_text(json.dumps(odd_sample) + "\n")
    later = json.dumps(odd_sample | {"completion": "<ins>" + "".join(odd), "step": 3})
    (path.parent / "step_0000003.jsonl").write_text(later + "\n")
    write_report([run_dir], tmp_path / "odd.html")
    parser = Texts()
    parser.feed((tmp_path / "odd.html").read_text())
    assert parser.seen.count("<script>window.hacked = 2</script>\\x1b[2J\\x1b]0;title\\x07<b onclick=x>") == 3
    assert "<ins><script>" in parser.seen and "\\x9b31m" in parser.seen and not {"\x1b", "\x9b"} & set(parser.seen)
    assert [tag for tag, _ in parser.tags].count("script") == 2
    assert not [attributes for _, attributes in parser.tags if "onclick" in attributes]


def test_tokens_are_of_the_newest_samples_that_have_them(runs, tmp_path):
    traced = last_traced(runs[3].path)
    assert traced.step == 39
    best = traced.groups[0].completions[0]
    assert (best.reward, best.advantage, "".join(one.text for one in best.shown)) == (1.0, 1.0, best.text)
    assert [one.has_changed_routes for one in best.shown[:4]] == [True, False, True, False]
    run_dir = write_run(tmp_path, RlRunConfig(run_dir="new"), 3, samples=(0, 3))
    path = run_dir / "samples/step_0000003.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"pieces": []}) + "\n" for line in lines))  # before the updates
    assert last_traced(run_dir).step == 0
    assert last_traced(runs[0].path) is None


def test_a_live_page_needs_a_run_and_a_port(runs, tmp_path):
    with pytest.raises(DataError, match=r"config\.toml is not there"):
        LiveServer([tmp_path], 0)
    with pytest.raises(ConfigError, match="--port 65536 is no port"):
        LiveServer([runs[0].path], 65536)
    with (
        LiveServer([runs[0].path], 0) as server,
        pytest.raises(ConfigError, match=r"cannot be had: Address already in use\. Choose another"),
    ):
        LiveServer([runs[0].path], server.server_address[1])


def test_samples_that_are_not_what_a_run_writes_are_left_out(tmp_path):
    run_dir = write_run(tmp_path, RlRunConfig(run_dir="torn"), 3, samples=(0,))
    (path,) = (run_dir / "samples").glob("*.jsonl")
    whole = path.read_text()
    good = json.loads(whole.splitlines()[0])
    odd = [[1], None, "text", good | {"reward": [1]}, good | {"reasons": None}, good | {"tokens": {}}, {"problem": "a"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in odd) + whole + '{"problem": "a", "pro')
    (read,) = before_and_after(run_dir)
    assert (read.mean, [len(group.completions) for group in read.groups]) == (0.5, [3, 3])
    path.write_text("[1]\n")
    assert before_and_after(run_dir) == []


@pytest.mark.parametrize(
    "content", ["{}", "null", "[[]]", '[{"started": "yesterday"}]', "[" * 100_000, {"machine": {"ranks": 1}}]
)
def test_a_damaged_record_of_the_starts_is_named(tmp_path, content):
    run_dir = write_run(tmp_path, PretrainConfig(run_dir="torn"), 3)
    path = run_dir / "run.json"
    if isinstance(content, dict):
        (attempt,) = json.loads(path.read_text())
        content = json.dumps([attempt | content])
    path.write_text(content)
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        read_runs([run_dir])


@pytest.mark.parametrize("content", ["", "null", "[1]", '{"headline": "half"}', "3"])
def test_a_failure_that_was_half_written_is_passed_over(tmp_path, content):
    run_dir = write_run(tmp_path, PretrainConfig(run_dir="torn"), 3)
    (run_dir / "logs" / "0").mkdir(parents=True)
    (run_dir / "logs" / "0" / "failure.json").write_text(content)
    (run,) = read_runs([run_dir])
    assert not [notice for notice in notices(run) if notice.level == "error"]


def test_a_run_that_ended_badly_says_how(tmp_path):
    run_dir = write_run(tmp_path, PretrainConfig(run_dir="bad"), 6)
    (run_dir / "DONE").unlink()
    logs = run_dir / "logs" / "0"
    logs.mkdir(parents=True)
    headline = "rank 3 on n2 was killed by SIGKILL"
    (run_dir / "logs/17.1").mkdir()
    (run_dir / "logs/17.1/failure.json").write_text(json.dumps({"headline": headline, "text": "its text"}))
    (logs / "rank_0.log").write_text("a.py:3: UserWarning: mind this\n  warn()\na.py:3: UserWarning: mind this\n")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "time": 0, "train/loss_nats": "nan", "train/skipped_steps": 2}) + "\n")
        file.write('{"step": 8, "ti')
    (run,) = read_runs([run_dir])
    words = [f"{notice.level}: {notice.text} {notice.detail}".strip() for notice in notices(run)]
    assert words == [
        f"error: attempt 17.1: {headline} its text",
        "warning: not done: the last step recorded is 7 of 6",
        "warning: train/loss_nats was not finite in 1 records",
        f"warning: a warning with {HOSTILE}",
        "warning: 2 steps were skipped because their gradient was not finite (train/skipped_steps)",
        "note: UserWarning: mind this (2 times, in all logs)",
    ]


def test_a_text_in_place_of_a_number_is_no_point_of_a_curve(tmp_path):
    run_dir = write_run(tmp_path, PretrainConfig(run_dir="texts"), 3)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "time": 0, "train/loss_nats": "damaged"}) + "\n")
        for damaged in ({}, {"time": None}, {"time": 10**400}, {"time": "noon"}, {"time": 0, "step": 10**400}):
            file.write(json.dumps({"step": 5, "train/loss_nats": 1.0} | damaged) + "\n")
    (run,) = read_runs([run_dir])
    assert 4 not in run.series("train/loss_nats").steps and len(run.series("train/loss_nats")) == 3
    write_report([run_dir], tmp_path / "texts.html")


def test_failed_scores_are_counted(runs):
    assert "1 scores failed" in "".join(notice.text for notice in notices(runs[2]))


@pytest.mark.full
def test_long_runs_make_a_page_that_opens_at_once(tmp_path):
    run_dir = write_run(tmp_path, PretrainConfig(run_dir="long"), 5)
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-4])
    table = [[12345] * 256] * 60
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(5_000):
            numbers = {name: step * 1.234567 for name in last if "/" in name}
            tables = {"moe/expert_load": table} if step % 500 == 0 else {"moe/expert_load": [[1] * 8]}
            file.write(json.dumps({"step": step, "time": step, **numbers, **tables}) + "\n")
    write_report([run_dir], tmp_path / "long.html")
    assert (tmp_path / "long.html").stat().st_size < 2_000_000


def test_a_folder_that_is_none_of_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"config\.toml is not there: give the run_dir"):
        read_runs([tmp_path])
    ends = [{"event": "start"}, {"event": "end", "cause": "every node is unfit in the same way: no scratch"}]
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(end) + "\n" for end in ends))
    with pytest.raises(DataError, match=r"before the program began: every node is unfit in the same way: no scratch$"):
        read_runs([tmp_path])
    (tmp_path / "config.toml").write_text("[model]\nfamily =")
    with pytest.raises(DataError, match=r"config\.toml is damaged: Invalid value \(at end of document\)"):
        read_runs([tmp_path])
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "DONE").mkdir()
    with pytest.raises(DataError, match=r"DONE of the run .* cannot be read: Is a directory"):
        read_runs([tmp_path])
    with pytest.raises(DataError, match="given twice"):
        short_names([tmp_path, tmp_path / "." / "x" / ".."])


def test_runs_of_one_name_are_told_apart(tmp_path):
    assert short_names([tmp_path / "a" / "rl", tmp_path / "b" / "rl"]) == ["a/rl", "b/rl"]


def test_an_evaluation_kept_beside_a_run_counts(tmp_path):
    run_dir = write_run(tmp_path, PretrainConfig(run_dir="base"), 3)
    (run_dir / "evaluation.json").write_text(
        'some words\n{"checkpoint": "x", "eval/accuracy": 0.25, "eval/pass_at_2": 0.3, "eval/pass_at_4": 0.5}\n'
    )
    (chart,) = charts.accuracy_charts(read_runs([run_dir]))
    assert [(bar["value"], bar["before"], bar["count"]) for bar in chart["bars"]] == [(0.25, None, None)]
    assert chart["note"].startswith("evaluation.json without its conditions")
    headline = summary.headline(*read_runs([run_dir]))
    assert headline.value == "25.0 %" and "n not recorded" in headline.meaning
    assert dict(summary.numbers(read_runs([run_dir])))["pass@k by mcore-rl eval"] == ["pass@4 50.0 %"]
    (run_dir / "evaluation.json").write_text("{torn")
    with pytest.raises(DataError, match="mcore-rl eval prints"):
        read_runs([run_dir])


def test_every_figure_is_of_metrics_that_exist():
    for figure in (*LEARNING, *EXPERTS, *SPEED):
        names = (
            [figure.low, figure.high]
            if isinstance(figure, Band)
            else [name for line in figure.lines for name in (line.metric, line.spread) if name]
        )
        for name in names:
            Metric(name.replace("pass_at_*", "pass_at_2").replace("*", "x"), 1.0)
    for name in LAYER_MAPS:
        Metric(name.replace("NN", "00"), 1.0)


def test_the_config_is_on_the_page_as_it_was(page, runs):
    parser = Texts()
    parser.feed(page)
    text = (runs[2].path / "config.toml").read_text()
    assert text.strip() in parser.seen and tomllib.loads(text)["rl"]["loss"]["kind"] == "gspo"


def test_rewards_from_models_are_drawn_beside_the_accuracy_where_a_run_has_both(tmp_path):
    """A run whose reward rises while its answers get worse, one with a rule alone, one with a model alone."""
    rates = {"hacked": ("model:runs/rm", "exact"), "rule": ("exact",), "blind": ("judge:a.jinja",)}
    for name, parts in rates.items():
        run_dir = write_run(tmp_path, RlRunConfig(run_dir=name), 1)
        lines = [
            {"step": step, "time": 100.0 + step, **{f"reward/part/{part}": 2.0 * step for part in parts}}
            | ({"reward/accuracy": 0.4 - 0.1 * step} if "exact" in parts else {})
            for step in range(1, 5)
        ]
        (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    runs = read_runs([tmp_path / name for name in rates])
    drawn = [
        one
        for one in charts.line_charts(LEARNING, runs, range(3))
        if one["title"] == "Rewards from models and accuracy"
    ]
    (chart,) = drawn
    assert [(one["run"], one["metric"], one.get("share", False), one["y"]) for one in chart["series"]] == [
        (0, "reward/part/model:runs/rm", False, [2, 4, 6, 8]),
        (0, "reward/accuracy", True, [0.3, 0.2, 0.1, 0]),
    ]
    assert not chart["percent"]
