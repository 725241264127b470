// What the pages do with scripts on: go on while something runs, copy a hash, share a cursor.
// Without scripts every page has the same content; nothing is fetched but the page itself.
"use strict";

const AGAIN = 2000;
const status = document.getElementById("live");

// A page that may change asks for itself again, and takes over the parts that changed. The server
// answers 304 as long as nothing did.
let asking = document.body.hasAttribute("data-live");
let asked = null;

async function refresh() {
  if (!asking) return;
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, {
        headers: asked ? { "If-None-Match": asked } : {}, cache: "no-store", redirect: "error",
      });
      if (answer.ok) {
        const first = asked === null;
        asked = answer.headers.get("ETag");
        take(new DOMParser().parseFromString(await answer.text(), "text/html"), first);
      } else if (answer.status !== 304) {
        tell(`not up to date: the server answered ${answer.status}`);
      } else if (status.dataset.lost) {
        tell("");
      }
    } catch {
      tell("not up to date: the server does not answer");
    }
  }
  setTimeout(refresh, AGAIN);
}

function take(page, first) {
  for (const fresh of page.querySelectorAll("[data-part]")) {
    const old = document.querySelector(`[data-part="${CSS.escape(fresh.dataset.part)}"]`);
    if (!old) { location.reload(); return; }
    if (old.contains(document.activeElement) && old.querySelector("details") === null) {
      // Who reads here with the keyboard is not thrown out: the part is taken over later.
      if (old.dataset.waits !== "1" && old.tagName !== "TBODY") { old.dataset.waits = "1"; continue; }
    }
    if (same(old, fresh)) continue;
    keep(old, fresh);
    old.replaceWith(fresh);
    ready(fresh);
    if (!first) tell(`Updated ${new Date().toLocaleTimeString()}`);
  }
  if (!page.body.hasAttribute("data-live")) asking = false;
}

const same = (old, fresh) => (old.source ??= old.innerHTML) === fresh.innerHTML;

// What a person has opened stays open, and a log that was read to its end stays at its end.
function keep(old, fresh) {
  fresh.source = fresh.innerHTML;
  for (const opened of old.querySelectorAll("details[open]")) {
    const again = opened.id && fresh.querySelector(`#${CSS.escape(opened.id)}`);
    if (again) again.open = true;
  }
  const focus = old.contains(document.activeElement) && document.activeElement;
  const path = focus && focus.getAttribute("href");
  const logs = [...old.querySelectorAll("pre.log")].map(
    (log) => [log.scrollTop, log.scrollHeight - log.scrollTop - log.clientHeight < 4]);
  queueMicrotask(() => {
    fresh.querySelectorAll("pre.log").forEach((log, at) => {
      if (logs[at]) log.scrollTop = logs[at][1] ? log.scrollHeight : logs[at][0];
    });
    if (path) fresh.querySelector(`a[href="${CSS.escape(path)}"]`)?.focus();
  });
}

function tell(text) {
  status.textContent = text;
  if (text.startsWith("not")) status.dataset.lost = "1"; else delete status.dataset.lost;
}

// A hash that can be copied has a button for it.
function ready(part) {
  for (const hash of part.querySelectorAll("[data-copy]")) {
    if (!navigator.clipboard || hash.nextElementSibling?.matches("button.copy")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy ${hash.textContent}`);
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(hash.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    hash.after(" ", button);
  }
}

// One cursor for all charts: the step under the pointer, upright in each of them.
function point(event) {
  const chart = event.target.closest?.("svg.chart");
  if (!chart) return;
  const section = chart.closest("section");
  const box = chart.getBoundingClientRect();
  const { first, last, left, inner } = Object.fromEntries(
    Object.entries(chart.dataset).map(([name, value]) => [name, Number(value)]));
  const x = (event.clientX - box.left) * (chart.viewBox.baseVal.width / box.width);
  const step = Math.round(first + (last - first) * Math.min(Math.max((x - left) / inner, 0), 1));
  for (const other of section.querySelectorAll("svg.chart")) {
    const from = Number(other.dataset.first), to = Number(other.dataset.last);
    const line = other.querySelector(".cursor");
    const at = left + inner * (step - from) / (to - from || 1);
    line.setAttribute("visibility", step < from || step > to ? "hidden" : "visible");
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
  }
  const readout = section.querySelector("[data-readout]");
  if (readout) readout.textContent = `step ${step}`;
}

document.addEventListener("pointermove", point, { passive: true });
ready(document);
if (asking) setTimeout(refresh, AGAIN);
