// Shared by all kinds of charts: elements, ticks, formatted numbers, colours, and the reader's choices.

let DATA = dataOf(document);
const VIEW = { axis: "x", smooth: 2, log: false, group: "", find: "", hidden: new Set() };
const SVG = "http://www.w3.org/2000/svg";

/** Returns the numbers of all charts of a page. */
function dataOf(page) {
  return JSON.parse(page.getElementById("data").textContent);
}

/** Adds an SVG element to `parent`. */
function svg(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  parent.appendChild(element);
  return element;
}

/** Adds an HTML element to `parent`; its text is never markup. */
function html(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  parent.appendChild(element);
  return element;
}

/** Returns a run by its index; a group of runs stands for itself. */
function runOf(run) {
  return DATA.runs[run] ?? run;
}

function runClass(run) {
  return `c${runOf(run).colour} d${runOf(run).cycle}`;
}

/** Returns about `wanted` round numbers from `low` to `high`. */
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

/** Returns the ticks of a metric; bytes are round in powers of 2. */
function unitTicks(low, high, wanted, unit) {
  if (unit !== "bytes") return ticks(low, high, wanted);
  const base = 1024 ** Math.floor(Math.log2(Math.max(1, high)) / 10);
  return ticks(low / base, high / base, wanted).map((value) => value * base);
}

/** Formats a number with its unit. */
function words(value, unit, percent) {
  if (value === null || value === undefined) return "–";
  if (percent) return `${trim(100 * value, 3)} %`;
  if (unit === "bytes") return bytes(value);
  const size = Math.abs(value);
  if (size >= 1e4) {
    const [by, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return `${trim(value / by, 3)}${letter}`;
  }
  return trim(value, 4);
}

function trim(value, digits) {
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-3) return value.toExponential(digits > 3 ? 2 : 1).replaceAll("-", "−");
  return String(Number(value.toPrecision(digits))).replaceAll("-", "−");
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${trim(value / 1024 ** power, 3)} ${units[power]}`;
}

/** Returns the unit that suits the longest of some times: [seconds in it, its name]. */
function clock(longest) {
  if (longest >= 7200) return [3600, "hours"];
  return longest >= 120 ? [60, "minutes"] : [1, "seconds"];
}

/** Returns a colour of the style sheet as [red, green, blue]. */
function colour(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

function mixed(from, to, share) {
  return from.map((part, at) => Math.round(part + (to[at] - part) * share));
}

/** Makes a box that follows the pointer; `rows` are [class of the colour, label, value]. */
function tip(plot) {
  const box = html(plot, "div", "tip");
  box.hidden = true;
  return {
    hide() { box.hidden = true; },
    show(x, y, head, rows) {
      box.replaceChildren();
      html(box, "div", "", head);
      for (const [own, label, value] of rows) {
        const row = html(box, "div");
        if (own) html(row, "span", `swatch ${own}`);
        html(row, "span", "", label);
        html(row, "b", "", value);
      }
      box.hidden = false;
      const left = x + 14 + box.offsetWidth > plot.clientWidth ? x - 14 - box.offsetWidth : x + 14;
      box.style.left = `${Math.max(0, left)}px`;
      box.style.top = `${Math.max(0, y - box.offsetHeight / 2)}px`;
    },
  };
}
