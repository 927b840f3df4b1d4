// Maps of colours: experts of a layer at a time, and layers over time.

const MAP_LEFT = 44;

/** Draws the load of every expert over its layer's mean, with a slider over the tables. */
function drawExperts(figure, chart) {
  const plot = figure.querySelector(".plot");
  const at = Math.min(Number(figure.dataset.at ?? chart.tables.length - 1), chart.tables.length - 1);
  plot.replaceChildren();
  const loads = chart.tables.map((table) => table.map(overMean));
  const { most } = chart;
  const canvas = html(plot, "canvas");
  const box = tip(plot);
  let shown = at;
  const paint = () => {
    const rows = loads[shown];
    const label = (row, column) => [
      `layer ${row}, expert ${column}, step ${chart.steps[shown]}`,
      [["", "tokens", words(chart.tables[shown][row][column], "", false)],
        ["", "over the layer's mean", rows[row][column] === null ? "dense layer" : `× ${trim(rows[row][column], 3)}`]],
    ];
    paintMap(plot, canvas, rows, (value) => loadColour(value, most), { labels: rows.map((_, row) => row), xName: "expert", box, label });
  };
  if (chart.tables.length > 1) plot.prepend(slider(figure, chart, at, (next) => { shown = next; paint(); }));
  paint();
  scaleBar(plot, ["idle", "even", `× ${trim(most, 3)}`], (share) => loadColour(share < 0.5 ? share * 2 : 1 + (share - 0.5) * 2 * (most - 1), most));
}

function overMean(row) {
  const mean = row.reduce((sum, value) => sum + value, 0) / row.length;
  return row.map((value) => (mean > 0 ? value / mean : null));
}

function loadColour(value, most) {
  if (value === null) return colour("--empty");
  const even = colour("--even");
  if (value <= 1) return mixed(colour("--idle"), even, value);
  return mixed(even, colour("--busy"), Math.min(1, Math.log(value) / Math.log(most)));
}

function slider(figure, chart, at, show) {
  const line = document.createElement("div");
  line.className = "slide";
  const play = html(line, "button", "", "play");
  play.type = "button";
  const input = html(line, "input");
  Object.assign(input, { type: "range", min: 0, max: chart.tables.length - 1, value: at });
  input.setAttribute("aria-label", "step");
  const output = html(line, "output", "", `step ${chart.steps[at]}`);
  const move = (next) => {
    input.value = next;
    figure.dataset.at = next;
    output.textContent = `step ${chart.steps[next]}`;
    show(next);
  };
  input.addEventListener("input", () => move(Number(input.value)));
  let timer = 0;
  play.addEventListener("click", () => {
    if (timer) {
      clearInterval(timer);
      timer = 0;
    } else {
      let next = Number(input.value) === chart.tables.length - 1 ? -1 : Number(input.value);
      timer = setInterval(() => {
        next += 1;
        if (next < chart.tables.length && line.isConnected) move(next);
        if (next >= chart.tables.length - 1 || !line.isConnected) {
          clearInterval(timer);
          timer = 0;
          play.textContent = "play";
        }
      }, 350);
    }
    play.textContent = timer ? "pause" : "play";
  });
  return line;
}

/** Draws a metric of every layer over the steps. */
function drawLayers(figure, chart) {
  const plot = figure.querySelector(".plot");
  plot.replaceChildren();
  const most = Math.max(chart.most, chart.least + 1e-9);
  const share = (value) => (value - chart.least) / (most - chart.least);
  const shade = (part) => mixed(colour("--even"), colour("--busy"), Math.max(0, Math.min(1, part)));
  const canvas = html(plot, "canvas");
  const box = tip(plot);
  const label = (row, column) => [
    `layer ${chart.layers[row]}, step ${chart.steps[column]}`,
    [["", "", words(chart.values[row][column], "", chart.percent)]],
  ];
  paintMap(plot, canvas, chart.values, (value) => shade(share(value)), {
    labels: chart.layers, xName: "step", xLabels: chart.steps, box, label,
  });
  const ends = [chart.least, chart.most].map((value) => words(value, "", chart.percent));
  if (chart.most <= chart.least) {
    html(plot, "div", "scale", `everywhere ${ends[0]}`);
    return;
  }
  scaleBar(plot, ends, shade);
}

/** Draws the cells of `rows` on a canvas with the names of rows and columns, and the value under the pointer. */
function paintMap(plot, canvas, rows, shade, { labels, xName, xLabels, box, label }) {
  const columns = Math.max(...rows.map((row) => row.length));
  const width = Math.max(200, plot.clientWidth);
  const rowHeight = Math.max(3, Math.min(34, 150 / rows.length));
  const cell = (width - MAP_LEFT) / columns;
  const height = rowHeight * rows.length + 32;
  const density = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: Math.round(width * density), height: Math.round(height * density) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  const [gapX, gapY] = [cell >= 8 ? 1 : 0, rowHeight >= 8 ? 1 : 0];
  const edge = (column) => Math.round((MAP_LEFT + column * cell) * density) / density;  // no seams between cells
  rows.forEach((row, at) => row.forEach((value, column) => {
    pen.fillStyle = `rgb(${shade(value).join(" ")})`;
    pen.fillRect(edge(column), at * rowHeight, edge(column + 1) - edge(column) - gapX, rowHeight - gapY);
  }));
  nameCells(pen, { labels, xName, xLabels, columns, cell, rowHeight, width, height });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `map of ${rows.length} layers by ${columns}`);
  canvas.onpointermove = (event) => {
    const bounds = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const [row, column] = [Math.floor(y / rowHeight), Math.floor((x - MAP_LEFT) / cell)];
    if (column < 0 || !rows[row] || column >= rows[row].length) return box.hide();
    return box.show(x, canvas.offsetTop + y, ...label(row, column));
  };
  canvas.onpointerleave = () => box.hide();
}

function nameCells(pen, { labels, xName, xLabels, columns, cell, rowHeight, width, height }) {
  const style = getComputedStyle(document.documentElement);
  pen.fillStyle = style.getPropertyValue("--soft").trim();
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const everyRow = Math.max(1, Math.ceil(13 / rowHeight));
  labels.forEach((name, at) => {
    if (at % everyRow === 0) pen.fillText(at ? String(name) : `layer ${name}`, MAP_LEFT - 5, (at + 0.5) * rowHeight);
  });
  pen.textAlign = "center";
  const names = xLabels || Array.from({ length: columns }, (_, at) => at);
  const room = Math.max(2, Math.min(8, (columns * cell) / (20 + 7 * String(names[columns - 1]).length)));
  const round = names.length > 1 ? ticks(names[0], names[columns - 1], room) : names;
  const exact = round.filter((value) => names.includes(value));
  const whole = new Set((exact.length > 1 ? exact : round).map((value) => nearest(names, value)));
  for (const at of whole) pen.fillText(String(names[at]), Math.min(width - 12, MAP_LEFT + (at + 0.5) * cell), height - 23);
  pen.fillText(xName, MAP_LEFT + (width - MAP_LEFT) / 2, height - 7);
}

/** Draws the scale of colours as a strip, with labels below its ends (and its middle). */
function scaleBar(plot, names, shade) {
  const bar = html(plot, "div", "scale");
  const canvas = html(bar, "canvas");
  Object.assign(canvas, { width: 120, height: 1 });
  const pen = canvas.getContext("2d");
  for (let at = 0; at < 120; at += 1) {
    pen.fillStyle = `rgb(${shade(at / 119).join(" ")})`;
    pen.fillRect(at, 0, 1, 1);
  }
  const line = html(bar, "div");
  for (const name of names) html(line, "span", "", name);
}
