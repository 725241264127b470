// What the pages do with scripts on: go on while something runs, copy a hash, share a cursor.
// Without scripts every page has the same content; nothing is asked but this server.
"use strict";

const AGAIN = 2000;
const ALREADY = 150;
// Spoken to those who listen, so only what matters; when it was updated is for those who look.
const status = document.getElementById("live");
const updated = document.getElementById("updated");

// A page that may change asks for itself again and takes over the parts that changed; as long as
// nothing did, the server answers 304.
let asking = document.body.hasAttribute("data-live");
let tag = "";

async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, {
        headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store", redirect: "error",
      });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        tag = answer.headers.get("ETag") ?? "";
        take(page);
      } else if (answer.status !== 304) {
        tell(`Not up to date: the server answered ${answer.status}`);
      }
    } catch {
      tell("Not up to date: the server does not answer");
    }
  }
  if (asking) setTimeout(refresh, AGAIN);
}

function take(page) {
  const names = (whole) => [...whole.querySelectorAll("[data-part]")].map((p) => p.dataset.part);
  if (names(page).join() !== names(document).join()) {
    location.reload(); // a part came or went
    return;
  }
  const before = states(document);
  for (const fresh of page.querySelectorAll("[data-part]")) {
    const old = document.querySelector(`[data-part="${CSS.escape(fresh.dataset.part)}"]`);
    if (sources.get(old) === fresh.innerHTML) continue;
    const kept = keep(old);
    sources.set(fresh, fresh.innerHTML);
    old.replaceWith(fresh);
    ready(fresh);
    kept(fresh);
    if (updated) updated.textContent = `Updated ${new Date().toLocaleTimeString()}.`;
  }
  const news = [...states(document)].filter(([name, state]) => before.get(name) !== state);
  if (news.length) tell(news.slice(0, 3).map(([name, state]) => `${name}: ${state}`).join("; "));
  asking = page.body.hasAttribute("data-live");
  if (!asking) tell("It has ended: this is how it came out");
}

// What every row of a table is called, and the word for its state.
function states(page) {
  const rows = [...page.querySelectorAll("tr")].filter((row) => row.querySelector(".state"));
  return new Map(rows.map((row) => [
    row.querySelector("th[scope=row], code")?.textContent ?? "",
    row.querySelector(".state").lastChild.textContent.trim(),
  ]));
}

// What stands in a part when it comes from the server, before anything here touches it.
const sources = new WeakMap();

// What a person has opened stays open, a log that was at its end stays there, and the focus stays
// where it was.
function keep(old) {
  const able = "a, button, summary, pre, [tabindex]";
  const opened = [...old.querySelectorAll("details[open]")].map((one) => one.id);
  const focused = [...old.querySelectorAll(able)].indexOf(document.activeElement);
  const logs = [...old.querySelectorAll("pre.log")].map((log) =>
    log.scrollHeight - log.scrollTop - log.clientHeight < 4 ? Infinity : log.scrollTop);
  return (fresh) => {
    for (const id of opened) {
      const again = id && document.getElementById(id);
      if (again) again.open = true;
    }
    fresh.querySelectorAll("pre.log").forEach((log, at) => {
      if (at in logs) log.scrollTop = Math.min(logs[at], log.scrollHeight);
    });
    if (focused >= 0) fresh.querySelectorAll(able)[focused]?.focus({ preventScroll: true });
  };
}

function tell(text) {
  if (status) status.textContent = text;
}

// A hash that can be copied has a button for it.
function ready(part) {
  if (!navigator.clipboard) return;
  for (const hash of part.querySelectorAll("[data-copy]")) {
    const button = document.createElement("button");
    button.type = "button";
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

// One cursor for all charts of a training: the step under the pointer, upright in each of them.
// The values are asked for, not read off the drawing, which is thinned out.
let soon = 0;

function point(event) {
  const chart = event.target.closest?.("svg.chart");
  const section = chart?.closest("section");
  if (!section) return;
  const box = chart.getBoundingClientRect();
  const { first, last, left, inner } = numbers(chart);
  const x = (event.clientX - box.left) * (chart.viewBox.baseVal.width / box.width);
  const step = Math.round(first + (last - first) * Math.min(Math.max((x - left) / inner, 0), 1));
  for (const other of section.querySelectorAll("svg.chart")) {
    const { first: from, last: to } = numbers(other);
    const line = other.querySelector(".cursor");
    const at = left + inner * (step - from) / (to - from || 1);
    line.setAttribute("visibility", step < from || step > to ? "hidden" : "visible");
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
  }
  const readout = section.querySelector("[data-readout]");
  if (!readout) return;
  readout.textContent = `step ${step}`;
  clearTimeout(soon);
  soon = setTimeout(() => values(chart, step, readout), ALREADY);
}

const numbers = (chart) => Object.fromEntries(
  Object.entries(chart.dataset).map(([name, value]) => [name, Number(value)]));

async function values(chart, step, readout) {
  const address = chart.closest("[data-values]").dataset.values;
  try {
    const answer = await fetch(`${address}?after=${Math.max(step - 1, 0)}&rows=1`);
    const { columns, rows } = await answer.json();
    if (!rows.length || readout.textContent !== `step ${step}`) return;
    const told = columns.slice(1).map((name, at) => {
      const value = rows[0][at + 1];
      return value === null ? "" : `${name} ${value === "NaN" ? value : +value.toPrecision(5)}`;
    });
    readout.textContent = `step ${rows[0][0]}: ${told.filter(Boolean).join(", ")}`;
  } catch {
    // The step alone stays there.
  }
}

for (const part of document.querySelectorAll("[data-part]")) sources.set(part, part.innerHTML);
ready(document);
document.addEventListener("pointermove", point, { passive: true });
if (asking) setTimeout(refresh, AGAIN);
