"""The report in a real browser: silent, alone, drawn, and readable on a phone and at night."""

import numpy as np
import pytest

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


def data(page):
    return page.evaluate("DATA")


def figure_of(page, title):
    number = next(at for at, chart in enumerate(data(page)["charts"]) if chart["title"] == title)
    return page.query_selector(f'figure[data-chart="{number}"]'), data(page)["charts"][number]


@pytest.mark.parametrize("size", ["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_and_nothing_is_said_or_asked_for(open_page, report, size, scheme):
    opened = open_page(size, scheme)
    page = opened.page
    shown = figures(page)
    assert len(shown) == len(data(page)["charts"]) > 40
    for figure in shown:
        drawn = figure.evaluate(DRAWN)
        assert drawn["marks"] or drawn["colours"] > 3, figure.text_content()
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert page.evaluate(TOO_WIDE) == []
    assert opened.said == []
    assert opened.asked == [report.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_background(open_page, scheme):
    page = open_page("desktop", scheme).page
    for selector in (
        "h1",
        ".note",
        ".legend b",
        ".small",
        "tbody th",
        ".level.warning",
        ".of",
        ".reward",
        "dt",
        "ins",
        "del",
        ".up1",
        ".up2",
        ".up3",
        ".down1",
        ".down2",
        ".down3",
    ):
        lights = sorted(page.evaluate(LUMINANCE, selector))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) > 4, selector
    brightness = page.evaluate(LUMINANCE, "h1")[1]
    assert brightness > 0.8 if scheme == "light" else brightness < 0.1


def plot_of(figure, expression):
    """The value of an expression on `plot`, the uPlot of a figure."""
    return figure.evaluate(f"figure => {{ const plot = PLOTS.get(figure); return {expression}; }}")


def test_a_curve_lies_where_its_numbers_say(open_page):
    figure, chart = figure_of(open_page().page, "Learning rate")
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


def test_grpo_and_gspo_are_laid_over_each_other(open_page):
    page = open_page().page
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


def test_the_bars_of_phases_are_as_long_as_their_time(open_page):
    figure, chart = figure_of(open_page().page, "Time of a rollout batch, by phase")
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


def test_a_dense_layer_is_marked_apart_from_an_idle_one(open_page):
    page = open_page().page
    assert page.evaluate("loadColour(null, 2)") != page.evaluate("loadColour(0, 2)")
    assert page.evaluate("overMean([0, 0])") == [None, None]
    assert page.evaluate("overMean([1, 3])") == [0.5, 1.5]


def test_smoothing_levels_values_that_alternate_and_keeps_a_straight_line(open_page):
    page = open_page().page
    levelled = page.evaluate("smoothed(Array.from({length: 100}, (_, at) => at % 2))")
    assert levelled[5:-5] == pytest.approx([0.5] * 90)
    # At the ends, where neighbours are missing on one side, a single value is no more than its part of the mean.
    assert levelled == pytest.approx([0.5] * 100, abs=0.1)
    straight = page.evaluate("smoothed(Array.from({length: 100}, (_, at) => 3 * at))")
    assert straight[5:-5] == pytest.approx([3 * at for at in range(5, 95)])


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


def test_dragging_zooms_every_chart_of_the_stage_and_a_double_click_resets(open_page):
    page = open_page().page
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
    page.uncheck("#smooth")
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


def test_every_accuracy_has_its_number_of_prompts_conditions_and_interval(open_page):
    figure, chart = figure_of(open_page().page, "Accuracy on held-out prompts, by run")
    assert "temperature 0" in chart["note"] and "1 answer each" in chart["note"]
    shown = [text.text_content() for text in figure.query_selector_all("text.value")]
    assert len(shown) == 2 and all("38.1 % to 61.9 %, n = 64" in text for text in shown)
    assert len(figure.query_selector_all(".interval")) == 2


def test_texts_of_a_run_do_nothing(open_page):
    page = open_page().page
    assert "window.hacked = 1" in page.query_selector("#samples").text_content()
    assert page.evaluate("window.hacked") is None


def test_the_table_is_whole_on_a_desktop_and_its_first_column_low(open_page):
    page = open_page("desktop").page
    assert len(data(page)["runs"]) == 4
    wide = page.evaluate(
        "[...document.querySelectorAll('#overview .scroll')].map(one => one.scrollWidth - one.clientWidth)"
    )
    assert wide == [0]
    lines = page.evaluate("""[...document.querySelectorAll('#overview tbody th')].map(
      cell => cell.clientHeight / parseFloat(getComputedStyle(cell).lineHeight))""")
    assert max(lines) < 5


def test_tokens_are_coloured_by_their_ratio(open_page):
    page = open_page("desktop").page
    shown = page.query_selector("#tokens .side")
    tokens = shown.query_selector_all(".text span")
    assert "".join(one.text_content() for one in tokens) == "completion 2 of step 39\nof two lines"
    assert tokens[0].get_attribute("title") == "not trained; changed: rollout_routes"
    # Samples of step 39 have the log ratios 0.3 sin(3 at + 39)^3.
    log_ratio = 0.3 * np.sin(3 * 1 + 39) ** 3
    assert tokens[1].get_attribute("title") == f"ratio {np.exp(log_ratio):.3g}"
    assert tokens[1].get_attribute("class") == "down2" and -0.5 < log_ratio < -0.1
