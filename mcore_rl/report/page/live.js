// Follows runs: fetches the page again when their files have changed, and puts its parts in the place of the old ones.

const LEAST_WAIT_MS = 2000;
const PARTS = [".top", ".links", "main"];

/** Replaces the parts of the page; what is open stays open, and the reader's place and choices stay. */
function replaceParts(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const open = [...document.querySelectorAll("details")].map((one) => one.open);
  const lefts = [...document.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const top = window.scrollY;
  for (const plot of PLOTS.values()) plot.destroy();
  PLOTS.clear();
  WATCH.disconnect();
  DATA = dataOf(page);
  for (const part of PARTS) document.querySelector(part).replaceWith(document.adoptNode(page.querySelector(part)));
  drawNew();
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
    status.textContent = answer.status < 400 ? "follows the run" : text;
  } catch (error) {
    status.textContent = "no longer follows the run: mcore-rl report --serve has ended";
  }
  setTimeout(follow, Math.max(LEAST_WAIT_MS, 5 * (performance.now() - begun)), stamp);
}

setTimeout(follow, LEAST_WAIT_MS, document.documentElement.dataset.stamp);
