// Follows runs: fetches the page again when their files have changed, and puts its parts in the place of the old ones.

const LEAST_WAIT_MS = 2000;
/** A run is silent after this many seconds, and as many times the usual time between two of its records. */
const SILENT_S = 60;
const SILENT_RECORDS = 5;
const PARTS = [".top", ".links", "main"];

/** Returns how far each run is that is not done: its step, and the time left at its pace, or since when it is silent. */
function stateWords() {
  const states = DATA.runs.filter((run) => !run.done).map(({ name, step, steps, recent }) => {
    const [[firstStep, firstTime], [lastStep, lastTime]] = [recent[0] ?? [0, 0], recent[recent.length - 1] ?? [0, 0]];
    const [since, pace] = [Date.now() / 1000 - lastTime, (lastTime - firstTime) / Math.max(1, lastStep - firstStep)];
    const between = (lastTime - firstTime) / Math.max(1, recent.length - 1);
    const isSilent = since > Math.max(SILENT_S, SILENT_RECORDS * between);
    const inWords = (seconds) => { const [by, unit] = clock(seconds); return `${Math.round(seconds / by)} ${unit}`; };
    const state = isSilent ? `silent since ${new Date(1000 * lastTime).toLocaleString()}` : "running";
    const left = isSilent || !pace ? "" : `, ${inWords(pace * (steps - step))} left`;
    return `${DATA.runs.length > 1 ? `${name} ` : ""}${recent.length ? state : "has no numbers yet"}, step ${step} of ${steps}${left}`;
  });
  return states.length ? states.join("; ") : "done";
}

/** Replaces the parts of the page; what is open stays open, and the reader's place and choices stay. */
function replaceParts(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const open = [...document.querySelectorAll("details")].map((one) => one.open);
  const lefts = [...document.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const top = window.scrollY;
  const large = document.querySelector(".large h4")?.textContent;
  for (const plot of PLOTS.values()) plot.destroy();
  PLOTS.clear();
  WATCH.disconnect();
  DATA = dataOf(page);
  for (const part of PARTS) document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part)));
  drawNew();
  enlarge([...document.querySelectorAll("[data-chart]")].find((one) => large && one.querySelector("h4").textContent === large) ?? null);
  document.querySelectorAll("details").forEach((one, at) => { one.open = open[at] || false; });
  document.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = lefts[at] || 0; });
  window.scrollTo({ top, behavior: "instant" });
}

async function follow(stamp) {
  const begun = performance.now();
  const status = document.getElementById("live");
  try {
    const answer = await fetch("/", { headers: { "If-None-Match": stamp }, cache: "no-store" });
    const text = await answer.text();
    if (answer.status === 200) {
      replaceParts(text);
      stamp = answer.headers.get("ETag");
    }
    status.textContent = answer.status < 400 ? stateWords() : text;
  } catch (error) {
    status.textContent = "no longer follows the run: mcore-rl report --serve has ended";
  }
  setTimeout(follow, Math.max(LEAST_WAIT_MS, 5 * (performance.now() - begun)), stamp);
}

setTimeout(follow, LEAST_WAIT_MS, document.documentElement.dataset.stamp);
