// Lines over steps or time, drawn by uPlot: bands, dots, a legend with the last values, one cursor and one zoom for all charts.

const HEIGHT = 230;
const RAW_IS_ENOUGH = 30;
const MOST_BANDS = 3;
const MOST_POINTS = 400;
/** Dashes of the first eight runs, the next eight (whose colours are the same again), and so on. */
const DASHES = [[], [10, 3], [3, 3], [10, 3, 3, 3]];
const PLOTS = new Map();

function drawLines(figure, chart) {
  const plot = figure.querySelector(".plot");
  for (const series of chart.series) series.t ??= tokensOf(series);
  const seen = chart.series.filter((series) => !VIEW.hidden.has(series.run) && series[VIEW.axis].length);
  const shown = grouped(seen);
  const labels = lineLabels(shown);
  drawLegend(figure.querySelector(".legend"), chart, shown, labels);
  PLOTS.get(figure)?.destroy();
  PLOTS.delete(figure);
  plot.replaceChildren();
  if (!shown.length) return;
  const drawn = linesOf(chart, shown);
  const options = lineOptions(plot, figure, chart, shown, labels, drawn);
  const made = new uPlot(options, uPlot.join(drawn.tables), plot);
  made.root.setAttribute("role", "img");
  made.root.setAttribute("aria-label", ariaLabel(chart, shown));
  PLOTS.set(figure, made);
}

/** Returns the tokens trained on at the steps of a series, by the counts that the run has recorded; without any, nothing. */
function tokensOf(series) {
  const [steps, counts] = runOf(series.run).tokens;
  return steps.length ? series.x.map((step) => between([0, ...steps], [0, ...counts], Math.min(step, steps[steps.length - 1]))) : [];
}

/** Returns the value at `x` of the line through some points, null outside of them. */
function between(xs, ys, x) {
  const last = xs.length - 1;
  if (x < xs[0] || x > xs[last]) return null;
  const near = nearest(xs, x);
  const low = xs[near] > x ? near - 1 : near;
  const high = Math.min(low + 1, last);
  return xs[high] === xs[low] ? ys[low] : ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

/** Returns the series with those of runs merged whose configs have the same value of the field that the reader groups by. */
function grouped(seen) {
  if (!VIEW.group) return seen;
  const values = [...new Set(DATA.runs.map((run) => run.fields[VIEW.group]))];
  const groups = values.map((value, at) => {
    const runs = DATA.runs.filter((run, index) => run.fields[VIEW.group] === value && !VIEW.hidden.has(index)).length;
    return { name: `${VIEW.group} = ${value ?? "unset"} (${runs} ${runs === 1 ? "run" : "runs"})`, colour: at % 8, cycle: at >> 3 };
  });
  const alike = new Map();
  for (const series of seen) {
    const group = values.indexOf(runOf(series.run).fields[VIEW.group]);
    const key = [group, series.metric].join();
    alike.set(key, { run: groups[group], members: [...(alike.get(key)?.members ?? []), series] });
  }
  return [...alike.values()].map(({ run, members }) => ({ ...(members.length > 1 ? merged(members) : members[0]), run }));
}

/** Returns the mean of some series, at the points of all, with a band from the smallest to the largest. */
function merged(members) {
  const every = [...new Set(members.flatMap((one) => one[VIEW.axis]))].sort((one, other) => one - other);
  const by = Math.max(1, every.length / MOST_POINTS);
  const places = Array.from({ length: Math.ceil(every.length / by) }, (_, at) => every[Math.floor(at * by)]);
  places[places.length - 1] = every[every.length - 1];
  const values = (name) => places.map((place) => members.map((one) => between(one[VIEW.axis], one[name], place)).filter((value) => value !== null));
  const mean = (list) => list.reduce((sum, value) => sum + value, 0) / list.length;
  const hasLine = members[0].y.length > 0;
  const [lows, highs] = hasLine ? [values("y"), values("y")] : [values("low"), values("high")];
  const columns = Object.fromEntries(["x", "s", "t"].map((name) => [name, members.every((one) => one[name].length) ? values(name).map(mean) : []]));
  return {
    ...members[0], ...columns, [VIEW.axis]: places,
    y: hasLine ? lows.map(mean) : [],
    last: mean(members.map((one) => one.last)),
    low: lows.map((list) => Math.min(...list)),
    high: highs.map((list) => Math.max(...list)),
  };
}

/** Returns what distinguishes the series of a chart: run, label, or both. */
function lineLabels(shown) {
  const runs = new Set(shown.map((series) => series.run));
  const kinds = new Set(shown.map((series) => series.label));
  return new Map(shown.map((series) => {
    const parts = [];
    if (runs.size > 1 || kinds.size === 1) parts.push(runOf(series.run).name);
    if (kinds.size > 1 && series.label) parts.push(series.label);
    return [series, parts.join(" · ")];
  }));
}

/** Returns the text of a value of a series: of its chart's unit, or of a share on the right axis. */
function wordsOf(value, series, chart) {
  return series.share ? words(value, "1", true) : words(value, chart.unit, chart.percent);
}

function lastWords(series, chart) {
  const format = (value) => wordsOf(value, series, chart);
  if (series.y.length) return format(series.last);
  return `${format(series.low[series.low.length - 1])} … ${format(series.high[series.high.length - 1])}`;
}

function drawLegend(legend, chart, shown, labels) {
  legend.replaceChildren();
  for (const run of new Set(shown.map((series) => series.run))) {
    const key = html(legend, "span", `key ${runClass(run)}`);
    shown.filter((series) => series.run === run).forEach((series, at) => {
      const part = html(key, "span");
      const sign = svg(part, "svg", { viewBox: "0 0 26 8", "aria-hidden": "true" });
      if (series.style === "dots") svg(sign, "circle", { cx: 13, cy: 4, r: 2.8, class: "dot" });
      else svg(sign, "path", { d: "M1 4H25", class: "curve", "stroke-dasharray": dashOf(series).join(" ") });
      html(part, "span", "", at && series.label ? series.label : labels.get(series));
      html(part, "b", "", lastWords(series, chart));
    });
  }
  if (VIEW.group) html(legend, "span", "", "Lines: means of the runs with the same value; bands: from the smallest to the largest.");
  if (!hasBands(shown)) html(legend, "span", "", `Bands are drawn for at most ${MOST_BANDS} runs; hide some to see them.`);
}

function dashOf(series) {
  return [...DASHES[runOf(series.run).cycle % DASHES.length], ...(series.style === "dash" ? [5, 4] : [])];
}

/** Returns whether bands are drawn: more than three hide each other and their lines. */
function hasBands(shown) {
  return new Set(shown.filter((series) => series.low).map((series) => series.run)).size <= MOST_BANDS;
}

function ariaLabel(chart, shown) {
  const last = shown.map((series) => `${runOf(series.run).name} ${series.label} ${lastWords(series, chart)}`);
  return `${chart.title}. Last values: ${last.join("; ")}`;
}

/** Returns the unit of the x axis: [how much of a step or second is in it, its name]. */
function xUnit(shown) {
  if (VIEW.axis === "s") return clock(Math.max(...shown.map((series) => series.s[series.s.length - 1])));
  return [1, VIEW.axis === "t" ? "tokens" : "step"];
}

/** Returns whether the y axis is logarithmic: the reader wants it, and something is above 0. */
function isLogarithmic(shown) {
  return VIEW.log && shown.some((series) => [...series.y, ...(series.high || [])].some((value) => value > 0));
}

/**
 * Returns what uPlot draws: `tables` of x and y values, for each line one, `lines` with the options of each, `bands` as
 * indices of an upper and a lower line. On a logarithmic axis a value of 0 or less is left out, and a band that reaches there
 * ends at the smallest positive value of the chart.
 */
function linesOf(chart, shown) {
  const [perUnit] = xUnit(shown);
  const logarithmic = isLogarithmic(shown);
  const positive = shown.filter((series) => !series.share).flatMap((series) => [...series.y, ...(series.low || [])]).filter((value) => value > 0);
  const floor = positive.reduce((least, value) => Math.min(least, value), Infinity);
  const [tables, lines, bands] = [[], [{}], []];
  const add = (series, ys, options) => {
    const xs = series[VIEW.axis].map((value) => value / perUnit);
    tables.push([xs, logarithmic && !series.share ? ys.map((value) => (value > 0 ? value : null)) : ys]);
    lines.push({ scale: series.share ? "share" : "y", spanGaps: true, width: 1.8, points: { show: false }, ...options });
    return lines.length - 1;
  };
  for (const series of shown) {
    const own = colour(`--run${runOf(series.run).colour}`).join();
    const stroke = `rgb(${own})`;
    const filled = hasBands(shown);
    if (series.low && (filled || !series.y.length)) {
      const edge = series.y.length ? { stroke: "transparent", width: 0 } : { stroke, width: 1.2 };
      const low = logarithmic && !series.share ? series.low.map((value) => Math.max(value, floor)) : series.low;
      const at = [add(series, series.high, edge), add(series, low, edge)];
      if (filled) bands.push({ series: at, fill: `rgba(${own},.16)` });
    }
    if (!series.y.length) continue;
    const dots = series.style === "dots" || series.y.length < RAW_IS_ENOUGH;
    const smooth = VIEW.smooth && chart.smooth && series.style !== "dots" && series.y.length >= RAW_IS_ENOUGH;
    if (smooth) add(series, series.y, { stroke: `rgba(${own},.28)`, width: 1 });
    add(series, smooth ? smoothed(series.y, VIEW.smooth / 100) : series.y, {
      stroke,
      dash: dashOf(series),
      paths: series.style === "dots" ? () => null : undefined,
      points: { show: dots, size: 7, width: 1.8, stroke, fill: `rgb(${colour("--card").join()})` },
      main: series,
    });
  }
  return { tables, lines, bands, logarithmic, floor };
}

/** Returns uPlot's options. The cursor and the zoom of the charts of one stage are one. */
function lineOptions(plot, figure, chart, shown, labels, drawn) {
  const [, unit] = xUnit(shown);
  const soft = `rgb(${colour("--soft").join()})`;
  const grid = { stroke: `rgb(${colour("--grid").join()})`, width: 1 };
  const font = "11px system-ui, sans-serif";
  const common = { stroke: soft, font, labelFont: font, grid, ticks: { show: false } };
  const show = (value) => (value === null ? "" : words(value, chart.unit, chart.percent));
  const range = drawn.logarithmic
    ? (_, low, high) => uPlot.rangeLog(low ?? drawn.floor, high ?? drawn.floor, 10, false)
    : ({ data: [places], series: [x] }, low, high) => {
      // Zoomed in, the axis is around the numbers in view: down to 0 they would be a flat line.
      const isWhole = x.min <= places[0] && x.max >= places[places.length - 1];
      return yRange(chart.zero && isWhole, low, high);
    };
  return {
    width: Math.max(220, plot.clientWidth),
    height: figure.classList.contains("large") ? Math.max(HEIGHT, plot.clientHeight - 8) : HEIGHT,
    legend: { show: false },
    scales: {
      x: { time: false, range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
      y: { distr: drawn.logarithmic ? 3 : 1, range },
      share: { range: [0, 1] },
    },
    axes: [
      { ...common, grid: { show: false }, label: unit, labelSize: 16, size: 24, space: 60, values: (_, found) => found.map((value) => words(value, "", false)) },
      {
        ...common,
        size: (_, found) => 12 + 6.6 * Math.max(1, ...(found || []).map((text) => (text || "").length)),
        splits: drawn.logarithmic ? undefined : (_, axis, low, high) => unitTicks(low, high, 4, chart.unit),
        values: (_, found) => found.map(show),
      },
      ...(shown.some((series) => series.share) ? [{
        ...common,
        scale: "share",
        side: 1,
        size: 46,
        grid: { show: false },
        values: (_, found) => found.map((value) => words(value, "1", true)),
      }] : []),
    ],
    series: drawn.lines,
    bands: drawn.bands,
    cursor: {
      y: false,
      points: { size: 6 },
      drag: { x: true, y: false },
      sync: { key: `${DATA.runs[chart.series[0].run].stage} ${VIEW.axis}`, setSeries: false, scales: ["x", null] },
    },
    hooks: { ready: [(made) => followPointer(plot, made, chart, shown, labels)] },
  };
}

/** Returns the y axis around the numbers in view, with `zero` down to 0. */
function yRange(zero, low, high) {
  if (low === null || high === null) return [0, 1];
  const [from, to] = zero ? [Math.min(0, low), Math.max(0, high)] : [low, high];
  if (from === to) return from ? [from - Math.abs(from) * 0.1, to + Math.abs(to) * 0.1] : [0, 1];
  const room = (to - from) * 0.06;
  return [zero && from === 0 ? 0 : from - room, to + room];
}

/** Means over about three times `share` of the points, nearer ones counting more; at the ends over the neighbours that are
 *  there. An odd reach leaves nothing but the mean of values that alternate, as those of first and second updates do. */
function smoothed(values, share = 0.02) {
  const reach = 2 * Math.round(values.length * share) + 1;
  return values.map((_, at) => {
    let [sum, weights] = [0, 0];
    for (let away = Math.max(-reach, -at); away <= Math.min(reach, values.length - 1 - at); away += 1) {
      const weight = reach + 1 - Math.abs(away);
      sum += weight * values[at + away];
      weights += weight;
    }
    return sum / weights;
  });
}

function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

/** Shows the values under the pointer, in the chart that it is on; the other charts show the cursor's line. */
function followPointer(plot, made, chart, shown, labels) {
  const box = tip(plot);
  const [perUnit] = xUnit(shown);
  made.over.addEventListener("pointermove", (event) => {
    const bounds = plot.getBoundingClientRect();
    const wanted = made.posToVal(event.clientX - made.over.getBoundingClientRect().left, "x") * perUnit;
    const found = shown.map((series) => {
      const at = nearest(series[VIEW.axis], wanted);
      return { series, at, away: Math.abs(series[VIEW.axis][at] - wanted) };
    });
    const closest = found.reduce((one, other) => (one.away <= other.away ? one : other));
    const room = 0.03 * (made.scales.x.max - made.scales.x.min) * perUnit;
    const here = found.filter((one) => one.away <= closest.away + room);
    const rows = here.map(({ series, at }) => {
      const format = (value) => wordsOf(value, series, chart);
      const range = series.low ? `${format(series.low[at])} … ${format(series.high[at])}` : "";
      const value = series.y.length ? format(series.y[at]) + (range ? ` (${range})` : "") : range;
      return [runClass(series.run), labels.get(series), value];
    });
    const seconds = closest.series.s[closest.at];
    const [inUnit, unit] = clock(seconds);
    const step = `step ${trim(closest.series.x[closest.at], 6)}, ${trim(seconds / inUnit, 3)} ${unit}`;
    box.show(event.clientX - bounds.left, event.clientY - bounds.top, step, rows);
  });
  made.over.addEventListener("pointerleave", () => box.hide());
}
