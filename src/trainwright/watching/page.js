"use strict";
// Everything from runs is set as text, never as HTML.
const token = new URLSearchParams(location.search).get("token");
const at = id => document.getElementById(id);
const address = (path, asked = {}) => {
  const query = new URLSearchParams({ token });
  for (const [key, value] of Object.entries(asked)) for (const each of [value].flat()) query.append(key, each);
  return `${path}?${query}`;
};
const ask = async (path, asked, method = "GET") => {
  const answer = await fetch(address(path, asked), { method });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
};
const element = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);
const short = value => value == null ? "" : Number(value).toLocaleString("en", { maximumSignificantDigits: 4 });
const COLUMNS = [
  ["name", "Run"], ["status", "Status"], ["step", "Step"], ["best", "Best loss"], ["speed", "Tokens/s"],
  ["goodput", "Goodput"], ["changed", "Last event"], ["task", "Task"], ["model", "Model"],
];
const CURVES = ["loss", "validation/loss", "learning_rate", "grad_norm", "tokens_per_second", "step_time", "memory_bytes"];
const COLORS = ["#1f77d0", "#d9541e", "#2a9d50", "#9457c9", "#c4426f", "#8a7a12", "#1595a3", "#7a6a5a"];
const rows = new Map(), selected = new Map();  // id to row; id to color
const stopping = new Set();  // ids of runs that were asked to stop and still train
let order = "changed", descending = true, opened = null, drawn = "";
let pointer = null, point = () => {};  // where the picture is pointed at, and what shows the values there

// Show an element for each item. Those of before stay, so that what is open or focused, and a click, outlast updates.
function keep(place, items, key, make, fill = () => {}) {
  const had = new Map([...place.children].map(child => [child.dataset.key, child])), focused = document.activeElement;
  const wanted = new Map(items.map(item => {
    const found = had.get(key(item)) ?? make(item);
    found.dataset.key = key(item);
    fill(found, item);
    return [found.dataset.key, found];
  }));
  for (const child of [...place.children]) if (wanted.get(child.dataset.key) !== child) child.remove();
  [...wanted.values()].forEach((each, i) => { if (place.children[i] !== each) place.insertBefore(each, place.children[i] ?? null); });
  if (focused !== document.activeElement && place.contains(focused)) focused.focus({ preventScroll: true });
}

const moment = seconds => new Date(1000 * seconds).toLocaleString("sv");  // 2026-01-31 23:59:59

function shown(row, key) {
  if (key === "step") return row.step == null ? "" : row.steps ? `${row.step}/${row.steps}` : `${row.step}`;
  if (key === "goodput") return row.goodput == null ? "" : `${Math.round(100 * row.goodput)}%`;
  if (key === "changed") return row.changed == null ? "" : moment(row.changed);
  if (key === "note" && row.read < 1) return [`reading, ${Math.floor(100 * row.read)}%`, row.note].filter(Boolean).join("; ");
  return typeof row[key] === "number" ? short(row[key]) : row[key] ?? "";
}

function table() {
  const text = at("filter").value.toLowerCase(), status = at("status").value;
  const kept = [...rows.values()].filter(row => (!status || row.status === status)
    && `${row.name} ${row.task} ${row.model}`.toLowerCase().includes(text));
  kept.sort((a, b) => {
    const [x, y] = [a[order], b[order]];
    if (x == null || y == null) return (x == null) - (y == null);
    const sign = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return descending ? -sign : sign;
  });
  keep(at("runs"), kept, row => row.id, line, fill);
  for (const head of at("head").children) if (head.dataset.by)
    head.ariaSort = head.dataset.by === order ? descending ? "descending" : "ascending" : "none";
  at("state").textContent = `${kept.length} of ${rows.size} runs`;
}

function line(row) {
  const found = element("tr"), first = found.appendChild(element("td"));
  first.append(element("input", "", { type: "checkbox", ariaLabel: `Show the curves of ${row.name}`,
    onchange: event => choose(row.id, event.target.checked) }));
  for (const [key] of COLUMNS) {
    const cell = found.appendChild(element("td", "", { className: key }));
    if (key === "name") cell.append(
      element("button", row.name, { type: "button", dir: "auto", onclick: () => show(row.id) }), element("div", "", { className: "note" }));
  }
  return found;
}

function fill(found, row) {
  found.querySelector("input").checked = selected.has(row.id);
  COLUMNS.forEach(([key], i) => {
    const cell = key === "name" ? found.querySelector(".note") : found.children[i + 1];
    const text = shown(row, key === "name" ? "note" : key);
    if (cell.textContent !== text) cell.textContent = text;
    if (key === "status") cell.className = row.status;
    if (key === "model") cell.title = text;  // the cell cuts long ones
  });
}

function choose(id, wanted) {
  if (wanted) selected.set(id, COLORS.find(color => ![...selected.values()].includes(color)) ?? COLORS[selected.size % COLORS.length]);
  else selected.delete(id);
  refresh();
}

async function refresh() {
  const names = [...selected.keys()].filter(id => rows.has(id));
  const wanted = { run: names, curve: at("curve").value, axis: at("axis").value, points: 600 };
  const state = JSON.stringify([wanted, at("log").checked, names.map(id => rows.get(id).version)]);
  if (state === drawn) return;
  drawn = state;
  try {
    const curves = names.length ? await ask("curves", wanted) : {};
    if (state === drawn) draw(curves);
    at("differences").hidden = names.length < 2;
    if (names.length > 1) differences(names, await ask("differences", { run: names }));
  } catch (error) { drawn = ""; }  // a run that is gone; the table says so
}

function differences(names, found) {
  at("keys").replaceChildren(element("th", "Key"), ...names.map(id => element("th", rows.get(id)?.name ?? id)));
  const lines = Object.entries(found).map(([key, values]) => {
    const row = element("tr");
    row.append(...[key, ...values].map(value => element("td", value)));
    return row;
  });
  const same = element("tr");
  same.append(element("td", "The recipes are the same.", { colSpan: names.length + 1 }));
  at("values").replaceChildren(...(lines.length ? lines : [same]));
}

function svg(tag, attributes, text) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text != null) found.textContent = text;
  return found;
}

function draw(curves) {
  const log = at("log").checked, width = Math.max(280, at("chart").clientWidth), height = 320;
  const [left, right, top, bottom] = [64, 20, 12, 34];
  const usable = (x, y) => x != null && y != null && (!log || y > 0);
  const scaled = y => log ? Math.log10(y) : y;
  let xs = [], ys = [];
  for (const [places, means, lows, highs] of Object.values(curves)) places.forEach((x, i) => {
    if (usable(x, means[i])) { xs.push(x); ys.push(...[means[i], lows[i], highs[i]].filter(y => usable(x, y)).map(scaled)); }
  });
  at("legend").replaceChildren(...Object.keys(curves).map(id => {
    const entry = element("li"), mark = element("i");
    mark.style.background = selected.get(id);
    entry.append(mark, element("bdi", rows.get(id)?.name ?? id));
    return entry;
  }));
  if (!xs.length) {
    point = () => {};
    at("chart").replaceChildren(element("p", selected.size ? "No values yet." : "Tick runs in the table to draw their curves over each other.", { className: "soft empty" }));
    return;
  }
  const least = list => list.reduce((a, b) => Math.min(a, b)), most = list => list.reduce((a, b) => Math.max(a, b));
  const [x0, x1, y0, y1] = [least(xs), most(xs), least(ys), most(ys)];
  const across = x => left + (x - x0) / (x1 - x0 || 1) * (width - left - right);
  const up = y => height - bottom - (scaled(y) - y0) / (y1 - y0 || 1) * (height - top - bottom);
  const name = at("curve").selectedOptions[0].textContent, axis = at("axis").selectedOptions[0].textContent;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} by ${axis}` });
  const places = [ticks(x0, x1, width < 500 ? 4 : 8), log ? between(y0, y1) : ticks(y0, y1, 5)];
  for (const x of places[0]) picture.append(svg("text", { x: across(x), y: height - 14, "text-anchor": "middle" },
    Intl.NumberFormat("en", { notation: "compact" }).format(x)));
  for (const value of places[1]) {
    const y = up(log ? 10 ** value : value);
    picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }),
      svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, short(log ? 10 ** value : value)));
  }
  for (const [id, [places, means, lows, highs]] of Object.entries(curves)) {
    const color = selected.get(id), use = places.map((x, i) => i).filter(i => usable(places[i], means[i]));
    if (!use.length) continue;
    const edge = (values, indices) => indices.filter(i => usable(places[i], values[i])).map(i => `${across(places[i])},${up(values[i])}`);
    picture.append(svg("polygon", { class: "band", fill: color, points: [...edge(highs, use), ...edge(lows, [...use].reverse())].join(" ") }),
      svg("polyline", { class: "line", stroke: color, "data-points": use.length, points: edge(means, use).join(" ") }));
    if (use.length === 1) picture.append(svg("circle", { cx: across(places[use[0]]), cy: up(means[use[0]]), r: 3, fill: color }));
  }
  at("chart").replaceChildren(picture);
  hover(picture, curves, { width, height, left, right, top, bottom, x0, x1, across });
}

// Round places between two values, about as many as are wanted.
function ticks(from, to, wanted) {
  const raw = (to - from || Math.abs(to) || 1) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(each => each * power >= raw * 0.999);
  const found = [];
  for (let each = Math.ceil(from / step - 1e-9); each * step <= to + step * 1e-9; each++) found.push(each * step);
  return found.length ? found : [from];
}

// Places of a logarithmic axis, as exponents: 1, 2 and 5 of each power of ten, or those powers alone.
function between(from, to) {
  const all = to - from > 3 ? [1] : [1, 2, 5], found = [];
  for (let power = Math.floor(from); power <= Math.ceil(to); power++)
    for (const each of all) { const y = power + Math.log10(each); if (y >= from && y <= to) found.push(y); }
  return found.length > 1 ? found : ticks(from, to, 4);
}

function hover(picture, curves, { width, height, left, right, top, bottom, x0, x1, across }) {
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  picture.append(cursor);
  const values = [...at("legend").children].map(entry => entry.appendChild(element("b")));
  point = () => {
    cursor.setAttribute("visibility", "hidden");
    for (const value of values) value.textContent = "";
    if (pointer == null) return;
    const box = picture.getBoundingClientRect();
    const x = x0 + ((pointer - box.left) * width / box.width - left) / (width - left - right) * (x1 - x0 || 1);
    let nearest = null;
    Object.values(curves).forEach(([places, means], index) => {
      let best = -1;
      places.forEach((place, i) => {
        if (place != null && means[i] != null && (best < 0 || Math.abs(place - x) < Math.abs(places[best] - x))) best = i;
      });
      values[index].textContent = best < 0 ? "" : short(means[best]);
      if (best >= 0 && (nearest == null || Math.abs(places[best] - x) < Math.abs(nearest - x))) nearest = places[best];
    });
    if (nearest == null) return;
    cursor.setAttribute("x1", across(nearest)); cursor.setAttribute("x2", across(nearest));
    cursor.setAttribute("visibility", "visible");
  };
  point();
}

async function show(id) {
  if (opened !== id) { at("answer").textContent = ""; at("text").textContent = ""; }
  opened = id;
  let found;
  try { found = await ask("details", { run: id }); } catch (error) { return; }
  if (opened !== id) return;
  at("details").hidden = false;
  at("title").textContent = found.row?.name ?? id;
  const trains = found.row?.status === "training";
  if (!trains) stopping.delete(id);
  at("checkpoint").disabled = !trains;
  at("stop").disabled = !trains || stopping.has(id);
  keep(at("samples"), found.samples.slice().reverse(), each => JSON.stringify(each), each => {
    const sample = element("details");
    sample.append(element("summary", `Step ${each.step}: ${each.prompt}`), element("pre", each.text || "(no text)"));
    return sample;
  });
  if (!found.samples.length) at("samples").append(element("p", "None yet.", { className: "soft" }));
  keep(at("events"), found.events, each => JSON.stringify(each), each => {
    const told = [each.event, each.step != null ? `step ${each.step}` : "", each.resumed_from != null ? `from ${each.resumed_from}` : "",
      each.kind, each.rank != null ? `rank ${each.rank}` : "", each.detail, each.action, each.message, each.status];
    const entry = element("li", "", { className: each.event === "fault" ? "failed" : "" });
    if (each.time != null) entry.append(element("time", moment(each.time), { className: "soft" }), " ");
    entry.append(told.filter(Boolean).join(" · "));
    return entry;
  });
  const file = at("file").value;
  keep(at("file"), found.logs, name => name, name => element("option", name));
  const first = found.logs.includes(file) ? file : found.logs.find(name => name.startsWith("rank-"));
  if (first) at("file").value = first;
  await time();
  await log();
}

// A row for each category, a column for each rank: few ranks fit a narrow window, and many scroll.
async function time() {
  const run = opened;
  const { categories, ranks } = await ask("seconds", { run }).catch(() => ({ categories: [], ranks: [] }));
  if (run !== opened) return;
  at("time").hidden = !ranks.length;
  at("ranks").replaceChildren(element("th", "Seconds"), ...ranks.map(each => element("th", `Rank ${each.rank}`)));
  const whole = ranks.map(each => Object.values(each.seconds).reduce((a, b) => a + b, 0) || 1);
  const most = Math.max(...ranks.map((each, i) => Math.max(...Object.values(each.seconds)) / whole[i]));
  const lines = categories.map(category => {
    const row = element("tr");
    row.append(element("th", category, { scope: "row" }), ...ranks.map((each, i) => {
      const value = each.seconds[category] ?? 0, cell = element("td", value ? short(value) : "", { className: "share" });
      cell.style.setProperty("--share", value / whole[i] / most);
      cell.title = `rank ${each.rank}, ${category}: ${(100 * value / whole[i]).toFixed(1)}%`;
      return cell;
    }));
    return row;
  });
  const last = element("tr");
  last.append(element("th", "in training", { scope: "row" }), ...ranks.map(each => element("td", `${(100 * each.trained).toFixed(1)}%`)));
  at("seconds").replaceChildren(...lines, last);
}

async function log() {
  const file = at("file").value;
  if (!file) return;
  const text = await ask("log", { run: opened, file }).catch(error => error.message), place = at("text");
  const follows = place.scrollTop + place.clientHeight >= place.scrollHeight - 4;  // unless scrolled up
  if (place.textContent !== text) place.textContent = text;
  if (follows) place.scrollTop = place.scrollHeight;
}

at("head").append(element("th", "", { ariaLabel: "Curves" }), ...COLUMNS.map(([key, title]) => {
  const head = element("th", "", { className: key });
  head.dataset.by = key;
  head.append(element("button", title, { type: "button", onclick: () => {
    [order, descending] = [key, order === key ? !descending : typeof [...rows.values()][0]?.[key] === "number"];
    table();
  } }));
  return head;
}));
at("curve").append(...CURVES.map(name => element("option", name.replace("/", " ").replaceAll("_", " "), { value: name })));
at("status").append(...["training", "finished", "stopped", "failed", "ended"].map(name => element("option", name)));
for (const id of ["filter", "status"]) at(id).oninput = table;
for (const id of ["curve", "axis", "log"]) at(id).oninput = refresh;
at("file").onchange = log;
at("chart").onpointermove = event => { pointer = event.clientX; point(); };
at("chart").onpointerleave = () => { pointer = null; point(); };
at("stop").onclick = async () => {
  const run = opened;
  stopping.add(run);
  at("stop").disabled = true;
  at("answer").textContent = await ask("stop", { run }, "POST").catch(error => { stopping.delete(run); return error.message; });
};
at("checkpoint").onclick = async () => {
  at("answer").textContent = await ask("checkpoint", { run: opened }, "POST").catch(error => error.message);
};
addEventListener("resize", () => { drawn = ""; refresh(); });
draw({});
const stream = new EventSource(address("events"));
stream.onmessage = message => {
  const { rows: changed, gone } = JSON.parse(message.data);
  for (const row of changed) rows.set(row.id, row);
  for (const id of gone) { rows.delete(id); selected.delete(id); }
  if (gone.includes(opened)) { opened = null; at("details").hidden = true; }
  table();
  refresh();
  if (changed.some(row => row.id === opened)) show(opened);
};
stream.onerror = () => { at("state").textContent = "no connection; is trainwright watch running?"; };
