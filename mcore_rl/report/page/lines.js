// Lines over steps or time, with bands, dots, a legend with the last values, and all values under the pointer.

const HEIGHT = 210;
const RAW_IS_ENOUGH = 30;

function drawLines(figure, chart) {
  const plot = figure.querySelector(".plot");
  const shown = chart.series.filter((series) => !VIEW.hidden.has(series.run));
  const labels = lineLabels(chart);
  drawLegend(figure.querySelector(".legend"), chart, shown, labels);
  plot.replaceChildren();
  if (!shown.length) return;
  const frame = lineFrame(plot, chart, shown);
  for (const series of shown) drawSeries(frame, series, VIEW.smooth && chart.smooth);
  followPointer(plot, frame, chart, shown, labels);
}

/** Returns what distinguishes the series of a chart: run, label, or both. */
function lineLabels(chart) {
  const runs = new Set(chart.series.map((series) => series.run));
  const kinds = new Set(chart.series.map((series) => series.label));
  return new Map(chart.series.map((series) => {
    const parts = [];
    if (runs.size > 1 || kinds.size === 1) parts.push(DATA.runs[series.run].name);
    if (kinds.size > 1 && series.label) parts.push(series.label);
    return [series, parts.join(" · ")];
  }));
}

function lastWords(series, chart) {
  const format = (value) => words(value, chart.unit, chart.percent);
  if (series.y.length) return format(series.y[series.y.length - 1]);
  return `${format(series.low[series.low.length - 1])} … ${format(series.high[series.high.length - 1])}`;
}

function drawLegend(legend, chart, shown, labels) {
  legend.replaceChildren();
  for (const run of new Set(shown.map((series) => series.run))) {
    const key = html(legend, "span", `key ${runClass(run)}`);
    shown.filter((series) => series.run === run).forEach((series, at) => {
      const part = html(key, "span");
      const sign = svg(part, "svg", { viewBox: "0 0 18 8", "aria-hidden": "true" });
      if (series.style === "dots") svg(sign, "circle", { cx: 9, cy: 4, r: 2.8, class: "dot" });
      else svg(sign, "path", { d: "M1 4H17", class: `curve ${series.style}` });
      html(part, "span", "", at && series.label ? series.label : labels.get(series));
      html(part, "b", "", lastWords(series, chart));
    });
  }
}

/** Draws scales, grid and ticks of a chart as wide as its box. */
function lineFrame(plot, chart, shown) {
  const width = Math.max(220, plot.clientWidth);
  const xs = shown.flatMap((series) => series[VIEW.axis]);
  const ys = shown.flatMap((series) => [...series.y, ...(series.low || []), ...(series.high || [])]);
  let [left, right] = [Math.min(...xs), Math.max(...xs)];
  let [low, high] = [Math.min(...ys), Math.max(...ys)];
  if (chart.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (high === low) [low, high] = low ? [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1] : [0, 1];
  else {
    const room = (high - low) * 0.06;
    [low, high] = [chart.zero && low === 0 ? 0 : low - room, high + room];
  }
  if (right === left) [left, right] = [left - 0.5, right + 0.5];
  const [perUnit, unit] = VIEW.axis === "s" ? clock(right) : [1, "step"];
  const yTicks = unitTicks(low, high, 4, chart.unit);
  const yWords = yTicks.map((value) => words(value, chart.unit, chart.percent));
  const margin = { left: 12 + 6.6 * Math.max(...yWords.map((text) => text.length)), right: 10, top: 8, bottom: 34 };
  const inner = { width: width - margin.left - margin.right, height: HEIGHT - margin.top - margin.bottom };
  const x = (value) => margin.left + ((value - left) / (right - left)) * inner.width;
  const y = (value) => margin.top + (1 - (value - low) / (high - low)) * inner.height;
  const root = svg(plot, "svg", {
    width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": ariaLabel(chart, shown),
  });
  yTicks.forEach((value, at) => {
    svg(root, "path", { d: `M${margin.left} ${y(value)}H${width - margin.right}`, class: "gridline" });
    svg(root, "text", { x: margin.left - 6, y: y(value) + 4, "text-anchor": "end" }, yWords[at]);
  });
  for (const value of ticks(left / perUnit, right / perUnit, Math.min(6, inner.width / 70))) {
    const at = x(value * perUnit);
    svg(root, "text", { x: at, y: HEIGHT - margin.bottom + 15, "text-anchor": "middle" }, words(value, "", false));
  }
  svg(root, "text", { x: margin.left + inner.width / 2, y: HEIGHT - 4, "text-anchor": "middle" }, unit);
  svg(root, "path", { d: `M${margin.left} ${HEIGHT - margin.bottom}H${width - margin.right}`, class: "axis" });
  return { root, x, y, margin, inner, width, perUnit, unit };
}

function ariaLabel(chart, shown) {
  const last = shown.map((series) => `${DATA.runs[series.run].name} ${series.label} ${lastWords(series, chart)}`);
  return `${chart.title}. Last values: ${last.join("; ")}`;
}

function path(frame, xs, ys) {
  return xs.map((value, at) => `${at ? "L" : "M"}${frame.x(value).toFixed(1)} ${frame.y(ys[at]).toFixed(1)}`).join("");
}

function drawSeries(frame, series, mayBeSmooth) {
  const group = svg(frame.root, "g", { class: `series ${runClass(series.run)}` });
  const xs = series[VIEW.axis];
  if (series.low) {
    const there = path(frame, xs, series.low);
    const back = path(frame, [...xs].reverse(), [...series.high].reverse()).replace("M", "L");
    svg(group, "path", { d: `${there}${back}Z`, class: "spread" });
  }
  if (!series.y.length) {
    svg(group, "path", { d: path(frame, xs, series.low), class: "edge" });
    svg(group, "path", { d: path(frame, xs, series.high), class: "edge" });
    return;
  }
  if (series.style !== "dots" && xs.length > 1) {
    const smooth = mayBeSmooth && xs.length >= RAW_IS_ENOUGH;
    if (smooth) svg(group, "path", { d: path(frame, xs, series.y), class: "curve raw" });
    const ys = smooth ? smoothed(series.y) : series.y;
    svg(group, "path", { d: path(frame, xs, ys), class: `curve ${series.style}` });
  }
  if (series.style === "dots" || xs.length < RAW_IS_ENOUGH) {
    xs.forEach((value, at) => svg(group, "circle", { cx: frame.x(value), cy: frame.y(series.y[at]), r: 3, class: "dot" }));
  }
}

/** Mean over about 6 % of the points, nearer ones counting more, fewer at the ends. An odd reach leaves nothing but the mean
 *  of values that alternate, as those of first and second updates do. */
function smoothed(values) {
  const half = 2 * Math.round(values.length * 0.02) + 1;
  return values.map((_, at) => {
    const room = Math.min(half, at, values.length - 1 - at);
    const reach = room && room % 2 === 0 ? room - 1 : room;
    let [sum, weights] = [0, 0];
    for (let away = -reach; away <= reach; away += 1) {
      const weight = reach + 1 - Math.abs(away);
      sum += weight * values[at + away];
      weights += weight;
    }
    return sum / weights;
  });
}

function nearest(sorted, value) {
  let best = 0;
  for (let at = 1; at < sorted.length; at += 1) {
    if (Math.abs(sorted[at] - value) < Math.abs(sorted[best] - value)) best = at;
  }
  return best;
}

function followPointer(plot, frame, chart, shown, labels) {
  const box = tip(plot);
  const cursor = svg(frame.root, "path", { class: "cursor", d: "" });
  const format = (value) => words(value, chart.unit, chart.percent);
  frame.root.addEventListener("pointermove", (event) => {
    const bounds = frame.root.getBoundingClientRect();
    const pointed = event.clientX - bounds.left;
    const share = (pointed - frame.margin.left) / frame.inner.width;
    if (share < -0.02 || share > 1.02) return leave();
    const found = shown.map((series) => {
      const xs = series[VIEW.axis];
      const at = nearest(xs.map(frame.x), pointed);
      return { series, at, x: xs[at] };
    });
    const closest = found.reduce((a, b) => (Math.abs(frame.x(a.x) - pointed) <= Math.abs(frame.x(b.x) - pointed) ? a : b));
    const here = found.filter((one) => Math.abs(frame.x(one.x) - frame.x(closest.x)) < frame.inner.width * 0.03);
    cursor.setAttribute("d", `M${frame.x(closest.x)} ${frame.margin.top}v${frame.inner.height}`);
    const rows = here.map(({ series, at }) => {
      const range = series.low ? `${format(series.low[at])} … ${format(series.high[at])}` : "";
      const value = series.y.length ? format(series.y[at]) + (range ? ` (${range})` : "") : range;
      return [runClass(series.run), labels.get(series), value];
    });
    const step = closest.series.x[closest.at];
    const [perUnit, unit] = clock(closest.series.s[closest.at]);
    box.show(pointed, event.clientY - bounds.top, `step ${step}, ${trim(closest.series.s[closest.at] / perUnit, 3)} ${unit}`, rows);
    return undefined;
  });
  function leave() {
    box.hide();
    cursor.setAttribute("d", "");
  }
  frame.root.addEventListener("pointerleave", leave);
}
