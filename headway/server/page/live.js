
"use strict";
// Asks /live twice a second and draws what it says. Names come from clients: text, never markup.

const EVERY = 500;
const KEY = "headway-api-key";
const at = (id) => document.getElementById(id);

function number(value) {
  const digits = value < 10 && !Number.isInteger(value) ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function seconds(value) {
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  if (value >= 100) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return value >= 1 ? `${value.toFixed(1)} s` : `${Math.round(value * 1000)} ms`;
}

function bar(name, part, whole, words) {
  const share = whole ? part / whole : 0;
  at(`${name}_fill`).style.width = `${100 * share}%`;
  at(`${name}_fill`).className = share > 0.95 ? "full" : "";
  at(`${name}_text`).textContent = words;
}

function shape(kind, points) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  made.setAttribute("points", points.map((point) => point.join(",")).join(" "));
  return made;
}

// The last minute; above it, the most there was.
function spark(what, values, unit) {
  const known = values.map((value, place) => [place, value]).filter(([, value]) => value !== null);
  const most = Math.max(...known.map(([, value]) => value), 1e-9);
  const points = known.map(([place, value]) => [place, 30 - (28 * value) / most]);
  if (points.length) points.push([points.at(-1)[0] + 0.5, points.at(-1)[1]]); // one alone shows too
  const drawing = at(`spark_${what}`);
  drawing.setAttribute("viewBox", `0 0 ${values.length - 0.5} 31`);
  drawing.setAttribute("preserveAspectRatio", "none");
  const ground = points.length ? [[points[0][0], 30], ...points, [points.at(-1)[0], 30]] : [];
  drawing.replaceChildren(shape("polygon", ground), shape("polyline", points));
  at(`peak_${what}`).textContent = most > 1e-9 ? `at most ${unit(most)}` : "";
}

function row(cells) {
  const line = document.createElement("tr");
  for (const [text, kind, whole] of cells) {
    const cell = document.createElement("td");
    cell.textContent = text;
    cell.title = whole ?? text;
    if (kind) cell.className = kind;
    line.append(cell);
  }
  return line;
}

function list(id, lines) {
  at(id).replaceChildren(...lines);
  const holder = at(id).closest(".scroll");
  holder.hidden = !lines.length;
  holder.previousElementSibling.hidden = lines.length > 0;
}

// Ids are long; their first letters tell them apart.
const short = (text) => text.replace(/(?:(?:chat)?cmpl-)?([0-9a-f]{8})[0-9a-f]{8,}/g, "$1");
const part = (some, all) => (some < all ? `${number(some)} / ${number(all)}` : number(all));

function more(count, listed) {
  return count > listed ? `${number(count)}, the first ${listed} listed` : number(count);
}

// Only worth a line once a step takes long: then the page shows how things were at its start.
function age(s) {
  if (s.age < 1) return "";
  const step = s.step_seconds === null ? "" : `, step running for ${seconds(s.step_seconds)}`;
  return `as of ${seconds(s.age)} ago${step}`;
}

function waiting(s) {
  const received = s.num_new ? `, ${number(s.num_new)} received during this step` : "";
  const listed = s.waiting.length + s.num_new;
  const first = s.num_waiting > listed ? `, the first ${s.waiting.length} listed` : "";
  return number(s.num_waiting) + received + first;
}

function draw(s) {
  at("model").textContent = s.model;
  at("facts").textContent = `version ${s.version}, up ${seconds(s.uptime)}, step ${number(Math.max(0, s.step))}`;
  for (const id of ["output_tokens", "requests", "prompt_tokens", "preemptions", "steps"]) {
    at(id).textContent = number(s.rates[id]);
  }
  spark("tokens", s.history.output_tokens, number);
  for (const id of ["ttft", "itl"]) {
    at(id).textContent = s.rates[id] ? seconds(s.rates[id]) : "–";
    spark(id, s.history[id], seconds);
  }
  const hits = s.minute.prefix_cache_hit_rate;
  at("hit_rate").textContent = hits === null ? "–" : `${Math.round(100 * hits)} %`;
  for (const id of ["errors", "aborts"]) at(id).textContent = number(s.minute[id]);
  const { requests, errors, aborts } = s.totals;
  at("totals").textContent =
    `since start: ${number(requests)} requests, ${number(errors)} errors, ${number(aborts)} aborts`;
  at("age").textContent = age(s);
  bar("seats", s.seats.taken, s.seats.limit, `${number(s.seats.taken)} of ${number(s.seats.limit)}`);
  const b = s.blocks;
  bar("blocks", b.held, b.total, `${number(b.held)} of ${number(b.total)}`);
  at("host").hidden = !b.host_total;
  bar("host", b.host_held, b.host_total, `${number(b.host_held)} of ${number(b.host_total)}`);
  at("num_running").textContent = more(s.num_running, s.running.length);
  at("num_waiting").textContent = waiting(s);
  list("running", s.running.map((r) => row([
    [short(r.id), r.state, r.id], [r.client, "who"], [r.state, `wide ${r.state}`],
    [part(r.computed, r.prompt), "num"], [`${number(r.output)} / ${number(r.most)}`, "num"],
    [number(r.blocks), "num wide"], [seconds(r.age), "num"],
  ])));
  list("waiting", s.waiting.map((r) => row([
    [short(r.id), r.state, `${r.id}, ${r.state}`], [r.client, "who"],
    [number(r.prompt + r.output), "num wide"], [seconds(r.age), "num"], [r.reason, "long"],
  ])));
  at("none_waiting").hidden = s.num_waiting > 0;
  list("decisions", s.decisions.slice().reverse().map((d) => {
    const line = document.createElement("li");
    const step = document.createElement("span");
    const words = document.createElement("span");
    step.textContent = d.step < 0 ? "" : number(d.step);
    words.textContent = short(d.words);
    words.title = d.words;
    words.className = d.kind;
    line.append(step, words);
    return line;
  }));
  tell(s.fault ? `The latest step failed: ${s.fault}` : "");
}

function tell(words) {
  at("banner").textContent = words;
  at("banner").hidden = !words;
}

async function look() {
  const key = sessionStorage.getItem(KEY);
  try {
    const answer = await fetch("live", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    at("door").hidden = answer.status !== 401;
    const body = await answer.json();
    if (answer.ok) draw(body);
    else tell(body.error ? body.error.message : `The server answers ${answer.status}.`);
    document.querySelector("main").className = answer.ok ? "" : "stale";
  } catch (error) {
    tell(`The server does not answer: ${error.message}`);
    document.querySelector("main").className = "stale";
  }
  setTimeout(look, document.hidden ? 4 * EVERY : EVERY);
}

at("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
});
look();
