"""The report in a real browser: silent, alone, drawn, and readable on a phone and at night."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mcore_rl.report.page import write_report

DRAWN = """figure => {
  const marks = [...figure.querySelectorAll('.series path, .series circle, rect.part, rect.filled')];
  const sized = marks.filter(mark => { const box = mark.getBBox(); return box.width + box.height > 1; });
  const canvas = figure.querySelector('.plot canvas');
  if (!canvas) return {marks: sized.length, colours: 0};
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let at = 0; at < pixels.length; at += 4) colours.add(pixels.slice(at, at + 4).join());
  return {marks: sized.length, colours: colours.size};
}"""
TOO_WIDE = """() => [...document.querySelectorAll('body *')].filter(element => {
  if (element.closest('.scroll, pre, .bar, .tip')) return false;
  return element.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
}).map(element => element.outerHTML.slice(0, 100))"""
LUMINANCE = """selector => {
  const parsed = text => text.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const parts = colour.slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const element = document.querySelector(selector);
  const back = from => {
    const [red, green, blue, alpha = 1] = parsed(getComputedStyle(from).backgroundColor);
    if (alpha === 1) return [red, green, blue];
    return back(from.parentElement).map((part, at) => part + ([red, green, blue][at] - part) * alpha);
  };
  return [light(parsed(getComputedStyle(element).color)), light(back(element))];
}"""


def figures(page):
    return page.query_selector_all("figure[data-chart]")


def figure_of(page, title):
    """The figure of a chart, and its data; all of the page's take a second to come over."""
    find = "title => [...DATA.charts.entries()].find(([, chart]) => chart.title === title)"
    number, chart = page.evaluate(find, title)
    return page.query_selector(f'figure[data-chart="{number}"]'), chart


@pytest.mark.parametrize("size", ["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_and_nothing_is_said_or_asked_for(shown, report, size, scheme):
    opened = shown(size, scheme)
    page = opened.page
    shown = figures(page)
    assert len({figure.get_attribute("data-chart") for figure in shown}) == page.evaluate("DATA.charts.length") > 40
    for figure in shown:
        drawn = figure.evaluate(DRAWN)
        assert drawn["marks"] or drawn["colours"] > 3, figure.text_content()
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert page.evaluate(TOO_WIDE) == []
    assert opened.said == []
    assert opened.asked == [report.as_uri()]


READ = (
    "h1, .note, .legend b, .small, tbody th, .level.warning, .of, .reward, dt, ins, del, "
    ".up1, .up2, .up3, .down1, .down2, .down3"
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_background(shown, scheme):
    page = shown("desktop", scheme).page
    for selector in READ.split(", "):
        lights = sorted(page.evaluate(LUMINANCE, selector))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) > 4, selector
    brightness = page.evaluate(LUMINANCE, "h1")[1]
    assert brightness > 0.8 if scheme == "light" else brightness < 0.1


def plot_of(figure, expression):
    """The value of an expression on `plot`, the uPlot of a figure."""
    return figure.evaluate(f"figure => {{ const plot = PLOTS.get(figure); return {expression}; }}")


def test_a_curve_lies_where_its_numbers_say(shown):
    figure, chart = figure_of(shown().page, "Learning rate")
    one = chart["series"][0]
    assert plot_of(figure, "[...plot.data[0]]") == one["x"] and plot_of(figure, "[...plot.data[1]]") == one["y"]
    # Of the pixels at each number, one at least has the colour of the run.
    found = figure.evaluate("""figure => {
      const plot = PLOTS.get(figure), scale = devicePixelRatio, own = colour('--run0');
      const context = plot.ctx;
      return plot.data[0].map((x, at) => {
        const left = Math.round(plot.valToPos(x, 'x', true));
        const top = Math.round(plot.valToPos(plot.data[1][at], 'y', true));
        const pixels = context.getImageData(left - 2, top - 2, 5, 5).data;
        for (let p = 0; p < pixels.length; p += 4) {
          if (own.every((part, c) => Math.abs(pixels[p + c] - part) < 40) && pixels[p + 3] > 100) return true;
        }
        return false;
      });
    }""")
    assert len(found) == 60 and all(found)


def test_the_drawn_means_of_long_runs_are_the_true_ones_and_their_bands_hold_every_value(open_page, long_report):
    """Two runs of 10,000 steps, a metric of rare spikes: a mean of extremes would be drawn at ten times the mean."""
    path, true = long_report
    opened = open_page(path=path)
    opened.page.fill("#smooth", "0")
    figure, chart = figure_of(opened.page, "KL to the old policy")
    data = plot_of(figure, "plot.data.map(values => [...values])")
    names = plot_of(figure, "plot.series.map(series => series.main ? series.main.run : null)")
    for run, values in enumerate(true):
        drawn = [value for value in data[names.index(run)] if value is not None]
        assert len(drawn) == 400
        assert np.mean(drawn) == pytest.approx(np.mean(values), rel=0.01)
        bins = np.asarray(values).reshape(400, 25)
        np.testing.assert_allclose(drawn, bins.mean(1), rtol=0.01)
        one = chart["series"][run]
        np.testing.assert_allclose(one["low"], bins.min(1), rtol=1e-5)
        np.testing.assert_allclose(one["high"], bins.max(1), rtol=1e-5)
    assert opened.said == []


def test_grpo_and_gspo_are_laid_over_each_other(shown):
    page = shown().page
    for title in ("Reward", "Entropy of the policy", "Clipped tokens", "Log ratio, smallest to largest"):
        figure, chart = figure_of(page, title)
        runs = {one["run"] for one in chart["series"]}
        assert {page.evaluate(f"DATA.runs[{run}].label") for run in runs} == {"GRPO", "GSPO"}
        strokes = plot_of(
            figure,
            "[...new Set(plot.series.map(one => String(one.stroke ? one.stroke(plot) : '')))].filter("
            "one => one.startsWith('rgb('))",
        )
        assert len(strokes) == 2


def test_the_bars_of_phases_are_as_long_as_their_time(shown):
    figure, chart = figure_of(shown().page, "Time of a rollout batch, by phase")
    seconds = [part for bar in chart["bars"] for _, part in bar["parts"]]
    lengths = [1 + float(rect.get_attribute("width")) for rect in figure.query_selector_all("rect.part")]
    assert np.corrcoef(seconds, lengths)[0, 1] == pytest.approx(1)
    names = ["rollout", "forward and backward", "other"]
    assert [key.text_content() for key in figure.query_selector_all(".key")] == names


def test_the_slider_shows_the_experts_at_another_step(open_page):
    page = open_page().page
    figure, chart = figure_of(page, "Load of the experts")
    picture = "figure => figure.querySelector('canvas').toDataURL()"
    last = figure.evaluate(picture)
    slider = figure.query_selector("input[type=range]")
    slider.evaluate("input => { input.value = 0; input.dispatchEvent(new Event('input')); }")
    assert figure.query_selector("output").text_content() == f"step {chart['steps'][0]}"
    assert figure.evaluate(picture) != last
    figure.query_selector("button").click()
    page.wait_for_function("figure => figure.dataset.at > 1", arg=figure)


def test_a_dense_layer_is_marked_apart_from_an_idle_one(shown):
    page = shown().page
    assert page.evaluate("loadColour(null, 2)") != page.evaluate("loadColour(0, 2)")
    assert page.evaluate("overMean([0, 0])") == [None, None]
    assert page.evaluate("overMean([1, 3])") == [0.5, 1.5]


def test_smoothing_levels_values_that_alternate_and_keeps_a_straight_line(shown):
    page = shown().page
    levelled = page.evaluate("smoothed(Array.from({length: 100}, (_, at) => at % 2))")
    assert levelled[5:-5] == pytest.approx([0.5] * 90)
    # At the ends, where neighbours are missing on one side, a single value is no more than its part of the mean.
    assert levelled == pytest.approx([0.5] * 100, abs=0.1)
    straight = page.evaluate("smoothed(Array.from({length: 100}, (_, at) => 3 * at))")
    assert straight[5:-5] == pytest.approx([3 * at for at in range(5, 95)])


def test_the_slider_sets_over_how_many_points_is_smoothed(open_page):
    page = open_page().page
    # A step from 0 to 1 becomes a ramp: as many values between as the reach of the mean to both sides.
    step = "Array.from({length: 100}, (_, at) => Number(at >= 50))"
    for share, reach in ((0.02, 5), (0.1, 21), (0.2, 41)):
        values = page.evaluate(f"smoothed({step}, {share})")
        assert sum(0 < value < 1 for value in values) == 2 * reach
    figure, _ = figure_of(page, "Reward")
    drawn = "[...plot.data[plot.series.findIndex(one => one.main)]]"
    straight, spread = [], []
    for strength in ("0", "20"):
        page.fill("#smooth", strength)
        straight = plot_of(figure, drawn)
        values = [value for value in straight if value is not None]
        spread.append(max(values) - min(values))
    assert spread[0] == pytest.approx(0.39) and spread[1] < 0.3  # of 40 points, over 35 of them


def test_a_chart_is_found_by_its_title_or_its_metrics(shown):
    page = shown().page
    titles = """[...document.querySelectorAll('[data-chart] h4')].filter(one => one.checkVisibility())
      .map(one => one.textContent)"""
    every = page.evaluate(titles)
    page.fill("#find", "Policy/Entropy")
    assert [title.split()[0] for title in page.evaluate(titles)] == ["Entropy"]
    assert not page.is_visible("#samples") and not page.is_visible("#pretrain h2") and page.is_visible("#rl h2")
    page.fill("#find", "")
    assert page.evaluate(titles) == every and page.is_visible("#samples")


def test_a_chart_is_enlarged_to_the_window_and_back(shown):
    page = shown().page
    figure, _ = figure_of(page, "Gradient norm")
    before = figure.query_selector("canvas").bounding_box()
    figure.query_selector(".tools button").click()
    box, canvas = figure.bounding_box(), figure.query_selector("canvas").bounding_box()
    assert box["width"] > 1240 and canvas["width"] > 1200 and canvas["height"] > 600
    page.keyboard.press("Escape")
    after = figure.query_selector("canvas").bounding_box()
    assert (after["width"], after["height"]) == (before["width"], before["height"])


def saved(page, figure, name):
    with page.expect_download() as download:
        figure.query_selector(f".tools button:text-is('{name}')").click()
    return download.value


def test_a_chart_is_saved_as_a_table_of_its_numbers(shown):
    page = shown().page
    figure, chart = figure_of(page, "Reward")
    download = saved(page, figure, "CSV")
    assert download.suggested_filename == "Reward.csv"
    rows = list(csv.DictReader(Path(download.path()).read_text().splitlines()))
    assert [row["run"] for row in rows] == ["grpo"] * 40 + ["gspo"] * 40
    names = page.evaluate("DATA.runs.map(run => run.name)")
    for one in chart["series"]:
        own = [row for row in rows if row["run"] == names[one["run"]]]
        assert [float(row["value"]) for row in own] == one["y"] and [float(row["low"]) for row in own] == one["low"]
        assert [float(row["tokens"]) for row in own] == [100 * step for step in one["x"]]
    for title, count in (("Time of a rollout batch, by phase", 6), ("Load of the experts", 12 * 3 * 6)):
        figure, _ = figure_of(page, title)
        assert len(Path(saved(page, figure, "CSV").path()).read_text().splitlines()) == 1 + count


def test_a_chart_is_saved_as_a_picture_with_its_title_and_colours(shown):
    page = shown().page
    for title, name in (("Reward", "--run2"), ("Accuracy on held-out prompts, by run", "--run3")):
        figure, _ = figure_of(page, title)
        picture = Image.open(saved(page, figure, "PNG").path()).convert("RGB")
        drawn = figure.query_selector(".plot canvas, .plot svg").bounding_box()
        assert picture.width == pytest.approx(drawn["width"], abs=1) and picture.height > drawn["height"] + 25
        pixels = np.asarray(picture).reshape(-1, 3)
        # A sloping line is mostly blended with its background.
        assert (abs(pixels - page.evaluate(f"colour('{name}')")).max(1) < 8).sum() > 20
        assert (np.asarray(picture)[4:24, :60].min(2) < 100).sum() > 30, "the title"


def test_the_x_axis_can_be_tokens(shown, many_report):
    page = shown(path=many_report).page
    page.select_option("#axis", "t")
    figure, _ = figure_of(page, "Reward")
    assert plot_of(figure, "plot.axes[0].label") == "tokens"
    places, *_ = plot_of(figure, "plot.data.map(values => [...values])")
    assert set(places) == {10 * (number + 1) * step for number in range(12) for step in range(1, 41)}
    page.select_option("#axis", "x")


def test_runs_are_grouped_by_a_field_with_their_mean_and_a_band_from_smallest_to_largest(open_page, many_report):
    page = open_page(path=many_report).page
    page.fill("#smooth", "0")
    page.select_option("#group", "rl.loss.kind")
    figure, _ = figure_of(page, "Reward")
    assert 'rl.loss.kind = "gspo" (4 runs)' in figure.query_selector(".legend").text_content()
    series = plot_of(figure, "plot.series.map((one, at) => one.main && [one.main.run.name, [...plot.data[at]]])")
    (gspo,) = [values for name, values in filter(None, series) if "gspo" in name]
    # Runs 1, 4, 7 and 10, each with its number times the step.
    assert gspo == [5.5 * step for step in range(1, 41)]
    bands = page.evaluate(
        "PLOTS.get(document.querySelectorAll('[data-chart]')[1]).series.find("
        "one => one.main && one.main.run.name.includes('gspo')).main"
    )
    assert bands["low"] == [1 * step for step in range(1, 41)] and bands["high"] == [10 * step for step in range(1, 41)]
    page.uncheck('.show[value="10"]')
    page.uncheck('.show[value="7"]')
    series = plot_of(figure, "plot.series.map((one, at) => one.main && [one.main.run.name, [...plot.data[at]]])")
    (gspo,) = [values for name, values in filter(None, series) if "gspo" in name]
    assert gspo == [2.5 * step for step in range(1, 41)]


def test_twelve_runs_differ_in_colour_or_dash_and_have_bands_only_when_three_are_left(open_page, many_report):
    opened = open_page(path=many_report)
    page = opened.page
    figure, _ = figure_of(page, "Reward")
    looks = plot_of(figure, "plot.series.filter(one => one.main).map(one => one.stroke(plot) + '|' + one.dash)")
    assert len(looks) == len(set(looks)) == 12 and len({look.split("|")[0] for look in looks}) == 8
    assert len(set(page.eval_on_selector_all(".toggle .swatch", "all => all.map(one => one.className)"))) == 12
    assert plot_of(figure, "plot.bands.length") == 0
    assert "Bands are drawn for at most 3 runs" in figure.query_selector(".legend").text_content()
    for number in range(3, 12):
        page.uncheck(f'.show[value="{number}"]')
    assert plot_of(figure, "plot.bands.length") == 3
    assert "at most" not in figure.query_selector(".legend").text_content()
    assert opened.said == []


def test_more_than_four_runs_are_a_table_that_can_be_sorted(shown, many_report):
    page = shown(path=many_report).page
    assert not page.query_selector(".cards")
    column = "[...document.querySelectorAll('#many tbody tr')].map(row => row.cells[{}].textContent)"
    heads = page.eval_on_selector_all("#many thead th", "all => all.map(one => one.textContent)")
    assert heads == ["run", "kind", "value", "of what", "steps", "time", "state", "rl.loss.kind"]
    page.click("#many th:text-is('value')")
    page.click("#many th:text-is('value')")
    # As numbers 5 % is less than 10 %.
    assert page.evaluate(column.format(2)) == [f"{5 * number:.1f} %" for number in range(11, -1, -1)]
    page.click("#many th:text-is('rl.loss.kind')")
    assert page.evaluate(column.format(7)) == ['"cispo"'] * 4 + ['"grpo"'] * 4 + ['"gspo"'] * 4
    assert shown().page.query_selector(".cards")


def test_the_y_axis_follows_a_zoom(open_page):
    page = open_page().page
    figure, chart = figure_of(page, "Entropy of the policy")
    whole = plot_of(figure, "[plot.scales.y.min, plot.scales.y.max]")
    assert whole[0] == 0 and whole[1] > 1
    page.fill("#smooth", "0")
    plot_of(figure, "plot.setScale('x', {min: 20, max: 40})")
    values = chart["series"][0]["y"][19:]
    room = 0.06 * (values[0] - values[-1])
    page.wait_for_function("f => PLOTS.get(f).scales.y.max < 0.2", arg=figure)
    low, high = plot_of(figure, "[plot.scales.y.min, plot.scales.y.max]")
    assert (low, high) == (pytest.approx(values[-1] - room), pytest.approx(values[0] + room))


def test_every_title_has_its_unit(shown):
    page = shown().page
    titles = {
        figure_of(page, name)[0].query_selector("h4").text_content()
        for name in ("Entropy of the policy", "Trained tokens per second and rank", "Reward")
    }
    assert titles == {"Entropy of the policy nats/token", "Trained tokens per second and rank tokens/s", "Reward"}


@pytest.mark.parametrize("size", ["phone", "desktop"])
def test_the_first_screen_of_a_run_has_its_curve(open_page, report, tmp_path, size):
    write_report([report.parent / "pretrain"], tmp_path / "one.html")
    page = open_page(size, path=tmp_path / "one.html").page
    box = page.query_selector("[data-chart] canvas").bounding_box()
    assert box["y"] + box["height"] <= page.viewport_size["height"]
    assert page.query_selector("[data-chart] h4").text_content() == "Loss nats/token"


def test_no_label_is_clipped_on_a_phone(open_page, many_report):
    page = open_page("phone", path=many_report).page
    clipped = """() => [...document.querySelectorAll('.plot svg text')].filter(text => {
      const [own, plot] = [text.getBoundingClientRect(), text.closest('.plot').getBoundingClientRect()];
      return own.right > plot.right + 1 || own.left < plot.left - 1;
    }).map(text => text.textContent)"""
    assert page.evaluate(clipped) == []
    figure, _ = figure_of(page, "Accuracy on held-out prompts, by run")
    texts = [text.text_content() for text in figure.query_selector_all("text.value")]
    assert len(texts) > 12 and "n = 64" in " ".join(texts)


def test_the_pointer_shows_the_values_and_one_cursor_runs_over_all_charts(open_page):
    opened = open_page()
    figure, _ = figure_of(opened.page, "Reward")
    figure.scroll_into_view_if_needed()
    box = figure.query_selector(".u-over").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 60)
    opened.page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 60)
    opened.page.wait_for_function("figure => !figure.querySelector('.tip').hidden", arg=figure)
    tip = figure.query_selector(".tip").text_content()
    assert tip.startswith("step 40") and "grpo" in tip and "gspo" in tip
    assert "0.4" in tip  # the reward at step 40
    other, _ = figure_of(opened.page, "Entropy of the policy")
    same = "plot.posToVal(plot.cursor.left, 'x')"
    opened.page.wait_for_function(f"f => {{ const plot = PLOTS.get(f); return {same} > 39; }}", arg=other)
    pretraining, _ = figure_of(opened.page, "Loss")
    assert not plot_of(pretraining, "plot.cursor.left >= 0")
    assert opened.said == []


def test_dragging_zooms_every_chart_of_the_stage_and_a_double_click_resets(shown):
    page = shown().page
    figure, _ = figure_of(page, "Reward")
    other, _ = figure_of(page, "Entropy of the policy")
    figure.scroll_into_view_if_needed()
    box = figure.query_selector(".u-over").bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50, steps=4)
    page.mouse.up()
    for one in (figure, other):
        page.wait_for_function("f => PLOTS.get(f).scales.x.max < 25", arg=one)
        low, high = plot_of(one, "[plot.scales.x.min, plot.scales.x.max]")
        assert (low, high) == (pytest.approx(1 + 39 / 4, abs=1), pytest.approx(1 + 39 / 2, abs=1))
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 50)
    page.wait_for_function("f => PLOTS.get(f).scales.x.max === 40", arg=figure)


def test_the_reader_chooses_runs_and_the_axes(open_page):
    opened = open_page()
    page = opened.page
    figure, _ = figure_of(page, "Reward")
    drawn = "plot.series.filter(series => series.main).length"
    assert plot_of(figure, drawn) == 2
    page.uncheck('.show[value="2"]')
    assert plot_of(figure, drawn) == 1
    page.select_option("#axis", "s")
    assert plot_of(figure, "plot.axes[0].label") in ("seconds", "minutes", "hours")
    lines = plot_of(figure, "plot.series.length")
    page.fill("#smooth", "0")
    assert plot_of(figure, "plot.series.length") == lines - 1  # without the thin line below the smoothed one
    page.check("#log")
    entropy, _ = figure_of(page, "Entropy of the policy")
    top, middle, bottom = (plot_of(entropy, f"plot.valToPos({value}, 'y')") for value in ("1", "0.1", "0.01"))
    assert middle - top == pytest.approx(bottom - middle) and middle > top
    assert opened.said == []


def test_the_charts_follow_the_window_and_the_time_of_day(open_page):
    page = open_page().page
    figure, _ = figure_of(page, "Load of the experts")
    width = "figure => figure.querySelector('canvas').clientWidth"
    wide, by_day = figure.evaluate(width), figure.evaluate("f => f.querySelector('canvas').toDataURL()")
    page.emulate_media(color_scheme="dark")
    repainted = "([figure, before]) => figure.querySelector('canvas').toDataURL() !== before"
    page.wait_for_function(repainted, arg=[figure, by_day])
    page.set_viewport_size({"width": 360, "height": 800})
    page.wait_for_function(f"figure => ({width})(figure) < {wide}", arg=figure)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_every_accuracy_has_its_number_of_prompts_conditions_and_interval(shown):
    figure, chart = figure_of(shown().page, "Accuracy on held-out prompts, by run")
    assert "temperature 0" in chart["note"] and "1 answer each" in chart["note"]
    shown = [text.text_content() for text in figure.query_selector_all("text.value")]
    assert len(shown) == 2 and all("38.1 % to 61.9 %, n = 64" in text for text in shown)
    assert len(figure.query_selector_all(".interval")) == 2


def test_texts_of_a_run_do_nothing(shown):
    page = shown().page
    assert "window.hacked = 1" in page.query_selector("#samples").text_content()
    assert page.evaluate("window.hacked") is None


def test_the_table_is_whole_on_a_desktop_and_its_first_column_low(shown):
    page = shown("desktop").page
    assert page.evaluate("DATA.runs.length") == 4
    wide = page.evaluate(
        "[...document.querySelectorAll('#overview .scroll')].map(one => one.scrollWidth - one.clientWidth)"
    )
    assert wide == [0]
    lines = page.evaluate("""[...document.querySelectorAll('#overview tbody th')].map(
      cell => cell.clientHeight / parseFloat(getComputedStyle(cell).lineHeight))""")
    assert max(lines) < 5


def test_tokens_are_coloured_by_their_ratio(shown):
    page = shown("desktop").page
    shown = page.query_selector("#tokens .side")
    tokens = shown.query_selector_all(".text span")
    assert "".join(one.text_content() for one in tokens) == "completion 2 of step 39\nof two lines"
    assert tokens[0].get_attribute("title") == "not trained; changed: rollout_routes"
    # Samples of step 39 have the log ratios 0.3 sin(3 at + 39)^3.
    log_ratio = 0.3 * np.sin(3 * 1 + 39) ** 3
    assert tokens[1].get_attribute("title") == f"ratio {np.exp(log_ratio):.3g}"
    assert tokens[1].get_attribute("class") == "down2" and -0.5 < log_ratio < -0.1
