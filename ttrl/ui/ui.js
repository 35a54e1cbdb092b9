// Follow the page's own address: ask again with the last ETag, and replace the main part when it has changed.
"use strict";
const EVERY = 1500;
const link = document.getElementById("link");
let etag = `"${document.querySelector("main").dataset.stamp}"`;

function seconds(count) {
  const whole = Math.max(0, Math.round(count));
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " min " + (whole % 60) + " s";
  return Math.floor(whole / 3600) + " h " + Math.floor((whole % 3600) / 60) + " min";
}

function tick() {
  const now = Date.now() / 1000;
  for (const one of document.querySelectorAll("time[data-since]")) one.textContent = seconds(now - Number(one.dataset.since));
  for (const one of document.querySelectorAll("progress[data-since]")) one.value = Math.max(0, now - Number(one.dataset.since));
  for (const one of document.querySelectorAll("[data-left]")) {
    one.textContent = seconds(Number(one.dataset.left) - (now - Number(one.dataset.at)));
  }
}

// What the reader has opened, chosen or typed stays.
function replace(main) {
  const old = document.querySelector("main");
  const opened = [...old.querySelectorAll("details")].map((one) => one.open);
  main.querySelectorAll("details").forEach((one, place) => { if (opened[place]) one.open = true; });
  for (const one of old.querySelectorAll("input[id]:checked")) {
    const same = main.querySelector("#" + CSS.escape(one.id));
    if (same && same.value === one.value) same.checked = true;
  }
  const filter = old.querySelector("#filter");
  const next = main.querySelector("#filter");
  if (filter && next) next.value = filter.value;
  old.replaceWith(main);
  narrow();
  tick();
}

function busy() {
  const at = document.activeElement;
  const selected = document.getSelection();
  return (at && at.closest("main form") && at.matches("input:not([type=checkbox]), select")) || (selected && !selected.isCollapsed);
}

async function follow() {
  if (document.hidden || document.querySelector("iframe")) return;
  const answer = await fetch(location.href, { headers: { "If-None-Match": etag }, cache: "no-store" });
  link.textContent = answer.status === 401 ? "open the printed address again" : "";
  if (answer.status !== 200) return;
  if (busy()) return;
  etag = answer.headers.get("ETag");
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const main = page.querySelector("main");
  if (main) replace(document.adoptNode(main));
}

function narrow() {
  const filter = document.getElementById("filter");
  if (!filter) return;
  const words = filter.value.toLowerCase().split(/\s+/);
  for (const row of document.querySelectorAll("tr[data-words]")) row.hidden = !words.every((word) => row.dataset.words.includes(word));
}

async function run() {
  try {
    await follow();
  } catch {
    link.textContent = "no connection";
  }
  setTimeout(run, EVERY);
}

document.addEventListener("input", (event) => { if (event.target.id === "filter") narrow(); });
document.addEventListener("keydown", (event) => { if (event.target.id === "filter" && event.key === "Enter") event.preventDefault(); });
setInterval(tick, 1000);
tick();
run();
