// What a reader does with one chart: find it, enlarge it, save it; and the order of many runs.

/** Gives every chart its buttons. */
function addTools() {
  for (const figure of document.querySelectorAll("[data-chart]")) {
    const tools = html(figure, "div", "tools");
    const actions = { enlarge: () => enlarge(figure), PNG: () => savePicture(figure), CSV: () => saveTable(figure) };
    for (const [name, act] of Object.entries(actions)) {
      const button = html(tools, "button", "", name);
      button.type = "button";
      button.addEventListener("click", act);
    }
  }
}

/** Makes one chart as large as the window, or none; a second call with the same chart makes it small again. */
function enlarge(figure) {
  const large = document.querySelector(".large");
  const next = figure === large ? null : figure;
  for (const [one, word] of [[large, "enlarge"], [next, "close"]]) {
    if (!one) continue;
    one.classList.toggle("large", one === next);
    one.querySelector(".tools button").textContent = word;
    draw(one);
  }
}

/** Shows the charts alone whose title or metrics have what the reader has typed. */
function findCharts() {
  for (const figure of document.querySelectorAll("[data-chart]")) {
    const chart = DATA.charts[Number(figure.dataset.chart)];
    const text = [chart.title, ...(chart.series ?? []).map((series) => series.metric)].join(" ").toLowerCase();
    figure.classList.toggle("unmatched", !text.includes(VIEW.find));
  }
  for (const part of document.querySelectorAll("main > section, section h3, section > .scroll")) {
    const charts = part.localName === "h3" ? part.nextElementSibling : part;
    part.classList.toggle("unmatched", VIEW.find !== "" && !charts.querySelector("figure:not(.unmatched)"));
  }
}

/** Orders the table of the runs by a column when its head is clicked, and the other way at a second click. */
function sortRuns() {
  const rank = (cell) => {
    const found = (cell.dataset.value ?? cell.textContent).match(/[-−]?\d[\d.]*(e[-+]?\d+)?/g);
    return found ? Number(found[found.length - 1].replace("−", "-")) : null;
  };
  document.querySelectorAll("#many thead th").forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of document.querySelectorAll("#many thead th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = document.querySelector("#many tbody");
    const rows = [...body.rows].map((row) => ({ row, cell: row.cells[column] }));
    const areNumbers = column > 1 && rows.every(({ cell }) => !cell.textContent.trim() || rank(cell) !== null);
    const compare = (one, other) => (areNumbers
      ? (rank(one.cell) ?? -Infinity) - (rank(other.cell) ?? -Infinity)
      : one.cell.textContent.localeCompare(other.cell.textContent, undefined, { numeric: true }));
    body.append(...rows.sort((one, other) => (down ? -1 : 1) * compare(one, other)).map(({ row }) => row));
  }));
}

function save(blob, figure, kind) {
  const { title } = DATA.charts[Number(figure.dataset.chart)];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${title.replaceAll(/[^\w]+/g, "_")}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

/** Returns the numbers of a chart, of the runs that are shown, as lines of texts; the first line has the names. */
function tableOf(chart) {
  const name = (run) => DATA.runs[run].name;
  const isShown = (one) => !VIEW.hidden.has(one.run);
  const bars = (chart.bars ?? []).filter(isShown);
  if (chart.kind === "stack") return [["run", "phase", "seconds"], ...bars.flatMap((bar) => bar.parts.map((part) => [name(bar.run), ...part]))];
  if (chart.kind === "bars") {
    const rows = bars.map((bar) => [name(bar.run), bar.value, bar.before, ...(bar.interval ?? ["", ""]), bar.count]);
    return [["run", "value", "before", "low", "high", "prompts"], ...rows];
  }
  if (chart.kind === "experts") {
    const rows = chart.tables.flatMap((table, at) => table.flatMap((row, layer) => row.map((tokens, expert) => [name(chart.run), chart.steps[at], layer, expert, tokens])));
    return [["run", "step", "layer", "expert", "tokens"], ...rows];
  }
  if (chart.kind === "layers") {
    const rows = chart.values.flatMap((row, at) => row.map((value, column) => [name(chart.run), chart.steps[column], chart.layers[at], value]));
    return [["run", "step", "layer", "value"], ...rows];
  }
  const rows = chart.series.filter(isShown).flatMap((series) => series.x.map((step, at) => [
    name(series.run), series.metric, step, series.s[at], tokensOf(series)[at] ?? "", series.y[at] ?? "", series.low?.[at] ?? "", series.high?.[at] ?? "",
  ]));
  return [["run", "metric", "step", "seconds", "tokens", "value", "low", "high"], ...rows];
}

function saveTable(figure) {
  // A name that begins like a formula stays a text in a spreadsheet.
  const cell = (value) => (typeof value === "string" ? `"${value.replace(/^[=+\-@]/, "'$&").replaceAll('"', '""')}"` : value ?? "");
  const rows = tableOf(DATA.charts[Number(figure.dataset.chart)]);
  save(new Blob([rows.map((row) => `${row.map(cell).join()}\n`).join("")], { type: "text/csv" }), figure, "csv");
}

/** Saves a chart with its title and its legend as a picture, in the pixels of the screen. */
async function savePicture(figure) {
  const plot = figure.querySelector(".plot");
  const drawing = plot.querySelector("canvas") ?? await imageOf(plot.querySelector("svg"));
  const density = window.devicePixelRatio || 1;
  const { title } = DATA.charts[Number(figure.dataset.chart)];
  const keys = [...figure.querySelectorAll(".key")].map((key) => [key.textContent, getComputedStyle(key).getPropertyValue("--own") || "gray"]);
  const width = drawing.width / density;
  const head = 30 + 16 * keys.length;
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: drawing.width, height: drawing.height + head * density });
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  pen.fillStyle = `rgb(${colour("--card").join()})`;
  pen.fillRect(0, 0, width, canvas.height);
  const write = (text, x, y, font) => {
    Object.assign(pen, { font, fillStyle: `rgb(${colour("--ink").join()})` });
    pen.fillText(text, x, y, width - x);
  };
  write(title, 6, 19, "600 14px system-ui, sans-serif");
  keys.forEach(([text, own], at) => {
    write(text, 24, 38 + 16 * at, "12px system-ui, sans-serif");
    pen.fillStyle = own;
    pen.fillRect(8, 33 + 16 * at, 12, 3);
  });
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.drawImage(drawing, 0, head * density);
  canvas.toBlob((blob) => save(blob, figure, "png"));
}

/** Returns an SVG element as an image; the colours of the page's style sheet are written into it. */
async function imageOf(element) {
  const copy = element.cloneNode(true);
  copy.setAttribute("xmlns", SVG);
  const parts = copy.querySelectorAll("*");
  element.querySelectorAll("*").forEach((part, at) => {
    const style = getComputedStyle(part);
    for (const name of ["fill", "stroke", "font-size", "font-family"]) parts[at].setAttribute(name, style.getPropertyValue(name));
  });
  const density = window.devicePixelRatio || 1;
  const image = new Image(element.clientWidth * density, element.clientHeight * density);
  image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  return image;
}
