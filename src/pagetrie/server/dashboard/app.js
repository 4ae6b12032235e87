// The page: reads frames, keeps what the viewer chose, and has them drawn.

import {
  PHASES, colours, drawBars, drawMap, drawRequests, drawTree, element, ownerName, readTree, swatch,
} from "./draw.js";
import { Feed, ask, key } from "./feed.js";

const $ = (id) => document.getElementById(id);
const choice = { zoomed: null, selected: null, found: new Set() };
const tree = $("tree");
let frame = null;
let drawn = null;
let earlier = null;

// -- numbers ----------------------------------------------------------------------------------------------------------

const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const milliseconds = (value) => (value === undefined ? "–" : value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`);

function rate(field) {
  if (!earlier) return "–";
  const seconds = frame.server.time - earlier.server.time;
  return seconds > 0 ? `${Math.round((frame.load[field] - earlier.load[field]) / seconds)} tok/s` : "–";
}

function tiles() {
  const { load, pages, latency, hits, memory } = frame;
  const cached = Object.values(hits.tiers).reduce((a, b) => a + b, 0);
  const sharing = memory.pages ? `${(memory.references / memory.pages).toFixed(2)}×` : "–";
  const entries = [
    ["Running", load.running], ["Waiting", load.waiting], ["Decode", rate("generated_tokens")],
    ["Prefill", rate("prefill_tokens")], ["Prompt tokens cached", percent(cached, hits.prompt)],
    ["Pages in use", `${pages.active} of ${pages.total}`], ["Shared", sharing],
    ["TTFT p50", milliseconds(latency.ttft.p50)], ["TTFT p90", milliseconds(latency.ttft.p90)],
    ["TTFT p99", milliseconds(latency.ttft.p99)], ["TPOT p50", milliseconds(latency.tpot.p50)],
    ["TPOT p99", milliseconds(latency.tpot.p99)], ["Preemptions", load.preemptions],
    ["Waste now", percent(memory.unused, memory.slots)],
    ["Waste if reserved", percent(memory.unused_if_reserved, memory.reserved)],
  ];
  $("tiles").replaceChildren(...entries.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

function bars() {
  const colour = colours();
  const { hits, misses, memory } = frame;
  const cached = Object.values(hits.tiers).reduce((a, b) => a + b, 0);
  const sources = [...Object.entries(hits.tiers).map(([name, value]) => [name, value, "hit"]),
    ["computed", hits.prompt - cached, "prefill"]];
  drawBars($("hits"), sources.map(([name, value, kind]) => (
    { name, value, shown: `${value.toLocaleString()} (${percent(value, hits.prompt)})`, colour: colour(kind) })));
  drawBars($("misses"), Object.entries(misses).sort((a, b) => b[1] - a[1]).map(([name, value]) => (
    { name: name.replaceAll("_", " "), value, shown: value.toLocaleString(), colour: colour("active") })));
  drawBars($("waste"), [
    { name: "held, used", value: memory.slots - memory.unused, shown: `${memory.slots - memory.unused} slots`, colour: colour("active") },
    { name: "held, unused", value: memory.unused, shown: `${memory.unused} slots`, colour: colour("preempted") },
    { name: "reserved, unused", value: memory.unused_if_reserved, shown: `${memory.unused_if_reserved} slots`, colour: colour("preempted") },
  ]);
  const mebibytes = (bytes) => `${(bytes / 2 ** 20).toFixed(0)} MiB`;
  $("tiers-text").textContent = Object.entries(frame.tiers).map(([name, { pages, used, capacity, healthy }]) =>
    `${name}: ${pages.toLocaleString()} pages, ${mebibytes(used)}${capacity ? ` of ${mebibytes(capacity)}` : ""}` +
    `${healthy ? "" : ", not working"}`).join("; ");
  $("waste-text").textContent = `Running sequences hold ${memory.pages} pages; page tables have ${memory.references} entries, so ` +
    `${memory.references - memory.pages} are shared. One contiguous reservation each would take ${memory.reserved} slots.`;
}

// -- the tree ---------------------------------------------------------------------------------------------------------

function showTree() {
  if (!frame) return;
  drawn = readTree(frame);
  const zoomed = choice.zoomed === null ? null : drawn.byNumber.get(choice.zoomed) ?? null;
  if (!zoomed) choice.zoomed = null;
  if (choice.selected !== null && !drawn.byNumber.has(choice.selected)) choice.selected = null;
  drawTree(tree, drawn, frame, { ...choice, zoomed });
  const path = [];
  for (let edge = zoomed; edge; edge = edge.up) path.unshift(edge);
  const steps = path.map((edge) => [edge.label ?? `${edge.tokens} tokens`, edge.number]);
  $("crumbs").replaceChildren(...(path.length ? [["Whole tree", null], ...steps] : []).map(([name, number], i) => {
    const button = element("button", { type: "button", "data-zoom": number ?? "" }, name.replace(/\s+/g, " ").slice(0, 24));
    if (i === steps.length) button.setAttribute("aria-current", "true");
    return button;
  }));
  showEdge();
}

function showEdge() {
  const edge = choice.selected === null ? null : drawn.byNumber.get(choice.selected);
  const holder = $("edge");
  if (!edge) return holder.replaceChildren();
  const rows = [
    ["Text", edge.label ?? "not yours to see"], ["Tokens", `${edge.start} to ${edge.start + edge.tokens}`],
    ["Pages", edge.pages], ["State", edge.active ? "in use" : "cached"],
    ["Standing here", `${edge.pins} ${edge.pins === 1 ? "sequence or context" : "sequences or contexts"}`],
    ["Below", `${edge.below} tokens, ${edge.leaves} ${edge.leaves === 1 ? "end" : "ends"}`], ["Owner", ownerName(frame.owners[edge.owner])],
  ];
  if (edge.hidden) rows.push(["Not shown", `${edge.hidden} small branches`]);
  return holder.replaceChildren(...rows.flatMap(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, String(value))]));
}

function select(number, focus = true) {
  choice.selected = number;
  showTree();
  if (focus) tree.querySelector(`[data-number="${number}"]`)?.focus();
}

function zoom(number) {
  choice.zoomed = number;
  showTree();
  tree.querySelector('[tabindex="0"]')?.focus();
}

const numberOf = (target) => {
  const group = target.closest?.("[data-number]");
  return group ? Number(group.getAttribute("data-number")) : null;
};

tree.addEventListener("click", (event) => {
  const number = numberOf(event.target);
  if (number === null) return;
  if (number === choice.selected && drawn.byNumber.get(number).children.length) zoom(number);
  else select(number);
});

tree.addEventListener("keydown", (event) => {
  const number = numberOf(event.target);
  const edge = number === null ? null : drawn.byNumber.get(number);
  if (!edge) return;
  const family = edge.up ? edge.up.children : drawn.roots;
  const place = family.indexOf(edge);
  const steps = {
    ArrowRight: () => edge.children[0],
    ArrowLeft: () => (edge.number === choice.zoomed ? null : edge.up),
    ArrowDown: () => (edge.number === choice.zoomed ? null : family[place + 1]),
    ArrowUp: () => (edge.number === choice.zoomed ? null : family[place - 1]),
    Home: () => family[0],
    End: () => family.at(-1),
  };
  if (event.key in steps) {
    const next = steps[event.key]();
    if (next) select(next.number);
  } else if (event.key === "Enter" || event.key === " ") {
    zoom(number);
  } else if (event.key === "Escape" && choice.zoomed !== null) {
    zoom(drawn.byNumber.get(choice.zoomed)?.up?.number ?? null);
  } else {
    return;
  }
  event.preventDefault();
});

$("crumbs").addEventListener("click", (event) => {
  const target = event.target.closest("button");
  if (target) zoom(target.dataset.zoom === "" ? null : Number(target.dataset.zoom));
});

$("search").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("query").value;
  choice.found = new Set();
  if (!text) {
    $("search-result").textContent = "";
    return showTree();
  }
  let answer;
  try {
    answer = await (await ask(`/v1/admin/find?text=${encodeURIComponent(text)}`)).json();
  } catch (error) {
    $("search-result").textContent = error.message;
    return showTree();
  }
  if (!drawn) return undefined;
  for (const { path } of answer.matches) {
    const shown = path.filter((number) => drawn.byNumber.has(number)).at(-1);
    if (shown !== undefined) choice.found.add(shown);
  }
  const count = answer.matches.length;
  const first = count ? `; the first, after ${answer.matches[0].start} tokens: …${answer.matches[0].text}…` : "";
  const unseen = answer.searched_all ? "" : "; not all was searched";
  $("search-result").textContent = `${count}${answer.more ? " and more" : ""} found${first}${unseen}`;
  if (choice.found.size) choice.selected = [...choice.found][0];
  return showTree();
});

// -- the page ---------------------------------------------------------------------------------------------------------

function draw() {
  if (!frame) return;
  $("model").textContent = frame.server.model;
  tiles();
  drawMap($("map"), $("map-legend"), $("map-text"), frame, $("map-by").value);
  showTree();
  drawRequests($("requests").tBodies[0], frame);
  $("requests-more").textContent = frame.more_waiting ? `${frame.more_waiting} more wait.` : "";
  bars();
}

function legend() {
  const colour = colours();
  const kinds = ["queued", "hit", "prefill", "decode", "preempted"];
  $("timeline-legend").replaceChildren(...kinds.map((kind, i) => element("li", {}, swatch(colour(kind)), PHASES[i])));
}

function say(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

function onFrame(news) {
  say("live");
  $("entry").hidden = true;
  $("view").hidden = false;
  $("forget").hidden = !key.get();
  document.documentElement.dataset.frames = Number(document.documentElement.dataset.frames ?? 0) + 1;
  earlier = frame;
  frame = news;
  draw();
}

const SHOWN = ["model", "tiles", "tree", "crumbs", "edge", "search-result", "requests-more", "hits", "tiers-text", "misses",
  "waste", "waste-text"];

// The key is missing, wrong, or not an admin's: nothing of what was seen stays on the page.
function onRefused(error) {
  say("not connected");
  frame = earlier = drawn = null;
  for (const id of SHOWN) $(id).replaceChildren();
  drawMap($("map"), $("map-legend"), $("map-text"), null);
  $("view").hidden = true;
  $("forget").hidden = true;
  $("entry").hidden = false;
  $("entry-form").hidden = !error.wantsKey;
  $("entry-message").textContent = error.code === "missing_api_key" ? "" : error.message;
  key.set("");
  if (error.wantsKey) $("key").focus();
}

const feed = new Feed({ onFrame, onRefused, onTrouble: (error) => say(`${error.message}; trying again`) });

$("entry-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  say("connecting");
  feed.open();
});
$("forget").addEventListener("click", () => {
  key.set("");
  feed.open();
});

const THEMES = ["auto", "light", "dark"];
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
  if (next === "auto") delete root.dataset.theme;
  else root.dataset.theme = next;
  $("theme").textContent = `Theme: ${next}`;
  legend();
  draw();
});
$("pause").addEventListener("click", () => {
  feed.pause(!feed.paused);
  $("pause").setAttribute("aria-pressed", String(feed.paused));
  say(feed.paused ? "paused" : "connecting");
});
$("map-by").addEventListener("change", draw);
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  legend();
  draw();
});
legend();
feed.open();
