// Draws every chart of the page, and again when its width, the colours or the reader's choice change.

const DRAW = { lines: drawLines, experts: drawExperts, layers: drawLayers, stack: drawStack, bars: drawBars };

function draw(figure) {
  const chart = DATA.charts[Number(figure.dataset.chart)];
  figure.hidden = chart.run !== undefined && VIEW.hidden.has(chart.run);
  if (!figure.hidden) DRAW[chart.kind](figure, chart);
  figure.dataset.width = figure.clientWidth;
}

const WATCH = new ResizeObserver((changes) => {
  for (const { target } of changes) if (Math.abs(target.clientWidth - Number(target.dataset.width)) > 1) draw(target);
});

function drawAll() {
  document.querySelectorAll("[data-chart]").forEach(draw);
}

/** Draws the charts of a page that is new, and each again when its width changes. */
function drawNew() {
  addTools();
  findCharts();
  sortRuns();
  drawAll();
  document.querySelectorAll("[data-chart]").forEach((figure) => WATCH.observe(figure));
}

function start() {
  document.getElementById("axis").addEventListener("change", (event) => {
    VIEW.axis = event.target.value;
    drawAll();
  });
  document.getElementById("smooth").addEventListener("input", (event) => {
    VIEW.smooth = Number(event.target.value);
    drawAll();
  });
  document.getElementById("find").addEventListener("input", (event) => {
    VIEW.find = event.target.value.trim().toLowerCase();
    findCharts();
  });
  document.getElementById("group")?.addEventListener("change", (event) => {
    VIEW.group = event.target.value;
    drawAll();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") enlarge(null);
  });
  document.getElementById("log").addEventListener("change", (event) => {
    VIEW.log = event.target.checked;
    drawAll();
  });
  for (const box of document.querySelectorAll(".show")) {
    box.addEventListener("change", () => {
      VIEW.hidden[box.checked ? "delete" : "add"](Number(box.value));
      drawAll();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawNew();
}

start();
