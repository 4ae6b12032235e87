// Pictures of a frame: the page map, the prefix tree, the timeline. Nothing here keeps state of its own.

export const STATES = ["free", "active", "cached", "loading"];
export const PHASES = ["queued", "cached part of the prompt", "prefill", "decode", "preempted"];
const SVG = "http://www.w3.org/2000/svg";
const MINUTE = 60;

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

export function swatch(colour) {
  const mark = element("i", { "aria-hidden": "true" });
  mark.style.background = colour;
  return mark;
}

export function ownerName(owner) {
  if (!owner) return "others";
  if (owner.public) return "public";
  if (owner.tenant === null) return "removed tenants";
  const name = owner.tenant === "" ? "shared by all" : owner.tenant;
  return owner.salted ? `${owner.tenant === "" ? "" : `${name}, `}under a salt` : name;
}

function ownerColour(owner, owners) {
  if (!owner) return "#888888";
  const place = owners.map(ownerName).indexOf(ownerName(owner));
  return `hsl(${(place * 137 + 210) % 360} 55% 50%)`;
}

const sharingColour = (share, colour) =>
  share <= 1 ? colour("active") : `hsl(${Math.max(0, 60 - 8 * Math.min(share, 8))} 85% 48%)`;
const digit = (character) => (character === "-" ? -1 : parseInt(character, 36));

// -- the page map -----------------------------------------------------------------------------------------------------

export function drawMap(canvas, legend, note, frame, by) {
  if (!frame) {
    canvas.width = canvas.height = 0;
    legend.replaceChildren();
    note.textContent = "";
    return;
  }
  const { pages, owners } = frame;
  const colour = colours();
  const counts = new Map();
  const fills = Array.from(pages.states, (character, i) => {
    const state = STATES[digit(character)];
    const share = digit(pages.shares[i]);
    const owner = digit(pages.owner[i]);
    let key = state;
    let fill = colour(state);
    if (by === "sharing" && state === "active") {
      key = share === 0 ? "held by a context" : share === 1 ? "by one" : share < 8 ? "by 2 to 7" : "by 8 and more";
      fill = share === 0 ? colour("soft") : sharingColour(share, colour);
    } else if (by === "owner" && state !== "free" && state !== "loading") {
      key = ownerName(owners[owner]);
      fill = ownerColour(owners[owner], owners);
    }
    const entry = counts.get(key) ?? { count: 0, fill };
    entry.count += 1;
    counts.set(key, entry);
    return fill;
  });
  const width = canvas.clientWidth || 600;
  const size = Math.max(3, Math.min(14, Math.floor(Math.sqrt((width * 170) / fills.length))));
  const columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(fills.length / columns) * size;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, width, height);
  const gap = size > 5 ? 1 : 0;
  fills.forEach((fill, i) => {
    pen.fillStyle = fill;
    pen.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - gap, size - gap);
  });
  const keys = by === "state" ? STATES : [...counts.keys()].sort();
  legend.replaceChildren(...keys.map((key) => {
    const { count, fill } = counts.get(key) ?? { count: 0, fill: colour(key) };
    return element("li", { "data-key": key, "data-count": count }, swatch(fill), `${key} ${count.toLocaleString()}`);
  }));
  const unit = pages.per_cell === 1 ? "Each cell is a page" : `Each cell is ${pages.per_cell} pages`;
  note.textContent = `${unit} of ${frame.server.page_size} tokens, ${pages.total.toLocaleString()} in all: ` +
    `${pages.free} free, ${pages.active} in use (${pages.pinned} pinned), ${pages.cached} cached, ${pages.loading} loading.`;
}

// -- the prefix tree --------------------------------------------------------------------------------------------------

const FIELDS = ["number", "parent", "owner", "start", "tokens", "pages", "below", "leaves", "pins", "active", "heat",
  "hidden", "label"];

export function readTree(frame) {
  const edges = frame.tree.edges.map((row) => {
    const edge = Object.fromEntries(FIELDS.map((field, i) => [field, row[i]]));
    return { ...edge, children: [] };
  });
  const roots = [];
  for (const edge of edges) {
    edge.up = edge.parent < 0 ? null : edges[edge.parent];
    (edge.up ? edge.up.children : roots).push(edge);
  }
  return { edges, roots, byNumber: new Map(edges.map((edge) => [edge.number, edge])) };
}

// Rows in the picture: one per end, fewer where not all are shown.
function layOut(roots, from) {
  let rows = 0;
  let end = from;
  const placed = [];
  const place = (edge, depth) => {
    const first = rows;
    edge.children.forEach((child) => place(child, depth + 1));
    if (!edge.children.length) rows += 1;
    end = Math.max(end, edge.start + edge.tokens);
    placed.push({ edge, depth, first, count: rows - first });
  };
  roots.forEach((edge) => place(edge, 1));
  return { placed, rows, tokens: Math.max(1, end - from) };
}

function heatColour(heat, colour) {
  return `color-mix(in oklab, ${colour("hot")} ${heat}%, ${colour("cold")})`;
}

export function describeEdge(edge, owners) {
  const text = edge.label === null ? "a text that isn't yours to see" : `“${edge.label}”`;
  const use = edge.active ? "in use" : "cached";
  return `${edge.tokens} tokens, ${use}, ${edge.leaves} ${edge.leaves === 1 ? "end" : "ends"} below, ` +
    `${ownerName(owners[edge.owner])}: ${text}`;
}

export function drawTree(holder, tree, frame, { zoomed, selected, found }) {
  const top = zoomed ? [zoomed] : tree.roots;
  const from = zoomed ? zoomed.start : 0;
  const { placed, rows, tokens } = layOut(top, from);
  const colour = colours();
  const width = holder.clientWidth || 600;
  const row = Math.max(4, Math.min(28, Math.floor(420 / Math.max(1, rows))));
  const height = Math.max(row, rows * row);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "presentation" });
  const inOrder = placed.sort((a, b) => a.first - b.first || a.depth - b.depth);
  const focus = inOrder.some(({ edge }) => edge.number === selected) ? selected : inOrder[0]?.edge.number;
  for (const { edge, depth, first, count } of inOrder) {
    const x = ((edge.start - from) / tokens) * width;
    const w = Math.max(2, (edge.tokens / tokens) * width);
    const group = shape("g", {
      role: "treeitem",
      "aria-level": depth,
      "aria-label": describeEdge(edge, frame.owners),
      "aria-selected": String(edge.number === selected),
      tabindex: edge.number === focus ? 0 : -1,
      "data-number": edge.number,
      "data-children": edge.children.length,
      "data-tokens": edge.tokens,
    });
    if (edge.children.length) group.setAttribute("aria-expanded", "true");
    if (found.has(edge.number)) group.classList.add("found");
    group.append(shape("rect", { x, y: first * row, width: w, height: count * row, fill: heatColour(edge.heat, colour) }));
    if (w > 40 && count * row >= 14) {
      const ink = colour(edge.heat > 50 ? "hot-text" : "cold-text");
      const text = shape("text", { x: x + 4, y: first * row + Math.min(count * row, 28) / 2 + 4, fill: ink, "aria-hidden": "true" });
      const label = edge.label === null ? `${edge.tokens} tokens` : edge.label.replace(/\s+/g, " ");
      text.textContent = label.slice(0, Math.floor((w - 8) / 6.6));
      group.append(text);
    }
    svg.append(group);
  }
  const held = holder.contains(document.activeElement) ? document.activeElement.getAttribute("data-number") : null;
  holder.replaceChildren(svg);
  if (held !== null) (svg.querySelector(`[data-number="${held}"]`) ?? svg.querySelector('[tabindex="0"]'))?.focus();
}

// -- the timeline -----------------------------------------------------------------------------------------------------

// Spans of a request as [colour, seconds ago it began, seconds ago it ended]. Prefill is split by what was cached.
function spans(request) {
  const found = [];
  request.phases.forEach(([phase, began], i) => {
    const ended = i + 1 < request.phases.length ? request.phases[i + 1][1] : 0;
    if (phase === "done") return;
    if (phase === "prefill" && request.prompt) {
      const cut = began - (began - ended) * (request.cached / request.prompt);
      found.push(["hit", began, cut], ["prefill", cut, ended]);
    } else {
      found.push([phase, began, ended]);
    }
  });
  return found;
}

export function drawRequests(body, frame) {
  const colour = colours();
  const rows = frame.requests.map((request) => {
    const state = request.reason || request.phases.at(-1)[0];
    const track = element("div", { class: "track", "aria-hidden": "true" });
    for (const [name, began, ended] of spans(request)) {
      if (ended > MINUTE) continue;
      const bar = element("i");
      bar.style.background = colour(name);
      bar.style.left = `${100 * (1 - Math.min(began, MINUTE) / MINUTE)}%`;
      bar.style.width = `max(1px, ${(100 * (Math.min(began, MINUTE) - ended)) / MINUTE}%)`;
      track.append(bar);
    }
    const output = request.reason ? `${request.generated}` : `${request.generated} of ${request.max}`;
    const again = request.preemptions ? ` (preempted ${request.preemptions}×)` : "";
    return element("tr", { "data-id": request.id, "data-state": state, "data-pages": request.pages },
      element("td", { class: "id", title: request.id }, request.id), element("td", { class: "tenant" }, request.tenant),
      element("td", {}, state + again), element("td", {}, String(request.prompt)), element("td", {}, String(request.cached)),
      element("td", {}, output), element("td", {}, String(request.pages)), element("td", { class: "wide" }, track));
  });
  body.parentElement.classList.toggle("tenants", frame.requests.some(({ tenant }) => tenant));
  body.replaceChildren(...rows);
}

// -- bars -------------------------------------------------------------------------------------------------------------

export function drawBars(holder, rows) {
  const most = Math.max(1, ...rows.map(({ value }) => value));
  holder.replaceChildren(...rows.flatMap(({ name, value, shown, colour }) => {
    const track = element("div", { class: "track", "aria-hidden": "true" });
    const bar = element("i");
    bar.style.background = colour;
    bar.style.left = "0";
    bar.style.width = `${(100 * value) / most}%`;
    track.append(bar);
    return [element("span", {}, name), track, element("b", {}, shown)];
  }));
}
