// Bars: one for each run, whole or in parts.

const BAR_HEIGHT = 26;
const BAR_GAP = 22;

/** Draws the seconds of a step by phase, one bar for each run, all on one scale. */
function drawStack(figure, chart) {
  const plot = figure.querySelector(".plot");
  const bars = chart.bars.filter((bar) => !VIEW.hidden.has(bar.run));
  const names = [...new Set(chart.bars.flatMap((bar) => bar.parts.map(([name]) => name)))];
  const legend = figure.querySelector(".legend");
  legend.replaceChildren();
  for (const name of names) {
    const key = html(legend, "span", "key");
    const sign = svg(key, "svg", { viewBox: "0 0 18 8", "aria-hidden": "true" });
    const block = svg(sign, "rect", { x: 4, y: 0, width: 10, height: 8, rx: 2 });
    block.style.fill = phaseColour(chart, name);
    html(key, "span", "", name);
  }
  plot.replaceChildren();
  if (!bars.length) return;
  const width = Math.max(220, plot.clientWidth);
  const whole = (bar) => bar.parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const longest = Math.max(...bars.map(whole));
  const height = bars.length * (BAR_HEIGHT + BAR_GAP);
  const root = svg(plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
  const box = tip(plot);
  bars.forEach((bar, at) => {
    const top = at * (BAR_HEIGHT + BAR_GAP) + 16;
    const all = whole(bar);
    svg(root, "text", { x: 0, y: top - 5, class: "value" }, `${DATA.runs[bar.run].name}: ${trim(all, 3)} s`);
    let left = 0;
    for (const [name, seconds] of bar.parts) {
      const long = (seconds / longest) * width;
      const part = svg(root, "rect", { x: left, y: top, width: Math.max(0, long - 1), height: BAR_HEIGHT, rx: 2, class: "part" });
      part.style.fill = phaseColour(chart, name);
      part.addEventListener("pointermove", (event) => {
        const bounds = root.getBoundingClientRect();
        const rows = [["", name, `${trim(seconds, 3)} s, ${trim((100 * seconds) / all, 3)} %`]];
        box.show(event.clientX - bounds.left, event.clientY - bounds.top, DATA.runs[bar.run].name, rows);
      });
      part.addEventListener("pointerleave", () => box.hide());
      left += long;
    }
  });
}

function phaseColour(chart, name) {
  return `var(--phase${chart.phases.indexOf(name)})`;
}

function intervalWords(bar) {
  if (!bar.interval) return ", n not recorded";
  const [low, high] = bar.interval.map((share) => words(share, "", true));
  return `, ${low} to ${high}, n = ${bar.count}`;
}

/** Draws a fraction for every run as a bar with its interval, and a mark at the run's first value. */
function drawBars(figure, chart) {
  const plot = figure.querySelector(".plot");
  const bars = chart.bars.filter((bar) => !VIEW.hidden.has(bar.run));
  plot.replaceChildren();
  const width = Math.max(220, plot.clientWidth);
  const height = bars.length * (BAR_HEIGHT + BAR_GAP) + 18;
  const root = svg(plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
  const x = (share) => share * (width - 2) + 1;
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    svg(root, "path", { d: `M${x(share)} 0V${height - 16}`, class: "gridline" });
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    svg(root, "text", { x: x(share), y: height - 3, "text-anchor": anchor }, `${100 * share} %`);
  }
  bars.forEach((bar, at) => {
    const top = at * (BAR_HEIGHT + BAR_GAP) + 16;
    const { name, label } = DATA.runs[bar.run];
    svg(root, "text", { x: 1, y: top - 4, class: "value" }, `${name} (${label}): ${words(bar.value, "", true)}${intervalWords(bar)}`);
    const group = svg(root, "g", { class: runClass(bar.run) });
    svg(group, "rect", { x: 1, y: top, width: Math.max(1, x(bar.value) - 1), height: BAR_HEIGHT, rx: 3, class: "filled" });
    if (bar.interval) {
      const [low, high] = bar.interval.map(x);
      const middle = top + BAR_HEIGHT / 2;
      svg(root, "path", { d: `M${low} ${middle}H${high}M${low} ${middle - 4}v8M${high} ${middle - 4}v8`, class: "interval" });
    }
    if (bar.before !== null) {
      const mark = svg(root, "path", { d: `M${x(bar.before)} ${top - 2}v${BAR_HEIGHT + 4}`, class: "mark" });
      svg(mark, "title", {}, `start of the run: ${words(bar.before, "", true)}`);
    }
  });
}
