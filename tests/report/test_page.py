"""The report in a real browser: silent, alone, drawn, and readable on a phone and at night."""

import re

import numpy as np
import pytest

DRAWN = """figure => {
  const marks = [...figure.querySelectorAll('.series path, .series circle, rect.part, rect.filled')];
  const sized = marks.filter(mark => { const box = mark.getBBox(); return box.width + box.height > 1; });
  const canvas = figure.querySelector('.plot > canvas');
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
  const light = text => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(part => part / 255)
      .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const element = document.querySelector(selector);
  const back = from => getComputedStyle(from).backgroundColor;
  let behind = element;
  while (back(behind) === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
  return [light(getComputedStyle(element).color), light(back(behind))];
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
    ):
        lights = sorted(page.evaluate(LUMINANCE, selector))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) > 4, selector
    brightness = page.evaluate(LUMINANCE, "h1")[1]
    assert brightness > 0.8 if scheme == "light" else brightness < 0.1


def test_a_curve_lies_where_its_numbers_say(open_page):
    figure, chart = figure_of(open_page().page, "Loss")
    words = figure.query_selector(".curve.raw").get_attribute("d")
    points = np.array([[float(part) for part in pair.split()] for pair in re.split("[ML]", words)[1:]])
    numbers = np.array([chart["series"][0]["x"], chart["series"][0]["y"]]).T
    assert len(points) == len(numbers) == 60
    for axis, sign in ((0, 1), (1, -1)):
        slope, offset = np.polyfit(numbers[:, axis], points[:, axis], 1)
        assert slope * sign > 0
        assert np.abs(numbers[:, axis] * slope + offset - points[:, axis]).max() < 0.2  # pixels


def test_grpo_and_gspo_are_laid_over_each_other(open_page):
    page = open_page().page
    for title in ("Reward", "Entropy of the policy", "Clipped tokens", "Log ratio, smallest to largest"):
        figure, chart = figure_of(page, title)
        runs = {one["run"] for one in chart["series"]}
        assert {page.evaluate(f"DATA.runs[{run}].label") for run in runs} == {"GRPO", "GSPO"}
        strokes = {
            element.evaluate("element => getComputedStyle(element).stroke + getComputedStyle(element).fill")
            for element in figure.query_selector_all(".series path:first-child")
        }
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
    assert levelled[1:-1] == pytest.approx([0.5] * 98)
    straight = page.evaluate("smoothed(Array.from({length: 100}, (_, at) => 3 * at))")
    assert straight == pytest.approx([3 * at for at in range(100)])


def test_the_pointer_is_told_the_values(open_page):
    opened = open_page()
    figure, _ = figure_of(opened.page, "Reward")
    figure.scroll_into_view_if_needed()
    box = figure.query_selector("svg[role=img]").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 60)
    told = figure.query_selector(".tip").text_content()
    assert told.startswith("step 40") and "grpo" in told and "gspo" in told
    assert "0.4" in told  # the reward at step 40
    assert opened.said == []


def test_the_reader_chooses_runs_and_the_axis(open_page):
    opened = open_page()
    page = opened.page
    figure, _ = figure_of(page, "Reward")
    assert len(figure.query_selector_all(".series")) == 2
    page.uncheck('.show[value="2"]')
    assert len(figure.query_selector_all(".series")) == 1
    page.select_option("#axis", "s")
    assert figure.query_selector_all("svg[role=img] text")[-1].text_content() in (
        "seconds",
        "minutes",
        "hours",
    )
    page.uncheck("#smooth")
    assert not page.query_selector_all(".curve.raw")
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


def test_texts_of_a_run_do_nothing(open_page):
    page = open_page().page
    assert "window.hacked = 1" in page.query_selector("#samples").text_content()
    assert page.evaluate("window.hacked") is None
