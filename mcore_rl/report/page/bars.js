// Bars: one for each run, whole or in parts.

const BAR_HEIGHT = 26;
const BAR_GAP = 8;
const LINE = 17;
const LETTER = 6.8;

/** Adds a text that takes as many lines as the width needs. Returns where it ends. */
function lettered(root, text, top, width) {
  const most = Math.floor(width / LETTER);
  const lines = [""];
  for (const word of text.split(" ").flatMap((word) => word.match(new RegExp(`.{1,${most}}`, "g")) ?? [])) {
    const longer = `${lines[lines.length - 1]} ${word}`.trim();
    if (longer.length <= most) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  lines.forEach((line, at) => svg(root, "text", { x: 1, y: top + (at + 1) * LINE - 5, class: "value" }, line));
  return top + lines.length * LINE;
}

/** Gives a picture of bars the height that they have turned out to need. */
function heighten(root, width, height) {
  root.setAttribute("height", height);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
}

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
  const root = svg(plot, "svg", { width, role: "img", "aria-label": chart.title });
  const box = tip(plot);
  let end = 0;
  for (const bar of bars) {
    const all = whole(bar);
    const top = lettered(root, `${DATA.runs[bar.run].name}: ${trim(all, 3)} s`, end, width);
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
    end = top + BAR_HEIGHT + BAR_GAP;
  }
  heighten(root, width, end);
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
  const root = svg(plot, "svg", { width, role: "img", "aria-label": chart.title });
  const x = (share) => share * (width - 2) + 1;
  const lines = svg(root, "g");
  let end = 0;
  for (const bar of bars) {
    const { name, label } = DATA.runs[bar.run];
    const top = lettered(root, `${name} (${label}): ${words(bar.value, "", true)}${intervalWords(bar)}`, end, width);
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
    end = top + BAR_HEIGHT + BAR_GAP;
  }
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    svg(lines, "path", { d: `M${x(share)} 0V${end}`, class: "gridline" });
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    svg(root, "text", { x: x(share), y: end + 13, "text-anchor": anchor }, `${100 * share} %`);
  }
  heighten(root, width, end + 18);
}
