
"use strict";
// Polls /live twice a second and draws the snapshot. Client names are inserted as text, not HTML.

const INTERVAL = 500; // milliseconds
const DIAGNOSIS = 5000; // milliseconds
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

function bar(name, part, whole) {
  const share = whole ? part / whole : 0;
  at(`${name}_fill`).style.width = `${100 * share}%`;
  at(`${name}_fill`).className = share > 0.95 ? "full" : "";
  at(`${name}_text`).textContent = `${number(part)} of ${number(whole)}`;
}

function shape(kind, points) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  made.setAttribute("points", points.map((point) => point.join(",")).join(" "));
  return made;
}

// A line for the last minute, with the maximum above it.
function spark(what, values, unit) {
  const known = values.map((value, place) => [place, value]).filter(([, value]) => value !== null);
  const peak = Math.max(...known.map(([, value]) => value), 1e-9);
  const points = known.map(([place, value]) => [place, 30 - (28 * value) / peak]);
  if (points.length) points.push([points.at(-1)[0] + 0.5, points.at(-1)[1]]); // makes a single value visible
  const drawing = at(`spark_${what}`);
  drawing.setAttribute("viewBox", `0 0 ${values.length - 0.5} 31`);
  drawing.setAttribute("preserveAspectRatio", "none");
  const area = points.length ? [[points[0][0], 30], ...points, [points.at(-1)[0], 30]] : [];
  drawing.replaceChildren(shape("polygon", area), shape("polyline", points));
  at(`peak_${what}`).textContent = peak > 1e-9 ? `max ${unit(peak)}` : "";
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

// Show only the first characters of long ids.
const short = (text) => text.replace(/(?:(?:chat)?cmpl-)?([0-9a-f]{8})[0-9a-f]{8,}/g, "$1");
const part = (some, all) => (some < all ? `${number(some)} / ${number(all)}` : number(all));

// During a long step the page shows the state at the start of the step.
function age(s) {
  if (s.age < 1) return "";
  const step = s.step_seconds === null ? "" : `, step running for ${seconds(s.step_seconds)}`;
  return `as of ${seconds(s.age)} ago${step}`;
}

function countText({ count, requests, new: received = 0 }) {
  const arrived = received ? `, ${number(received)} received during this step` : "";
  const listed = count > requests.length + received ? `, ${requests.length} listed` : "";
  return number(count) + arrived + listed;
}

function amount({ value, unit }) {
  if (value === null) return "–";
  if (unit === "%") return `${(100 * value).toFixed(1)} %`;
  return unit === "s" ? seconds(value) : `${number(value)}${unit}`;
}

function element(kind, text, className = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = className;
  return made;
}

function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Findings with a button for every change that can be tried.
function drawFindings(findings) {
  at("none_found").hidden = findings.length > 0;
  at("findings").replaceChildren(...findings.map((finding) => {
    const card = document.createElement("section");
    card.append(element("p", finding.symptom, "symptom"), element("p", finding.cause, "quiet"));
    card.append(element("p", finding.remedy));
    for (const change of finding.changes) {
      const button = element("button", `Try ${change}`);
      button.addEventListener("click", () => tryChange(change));
      card.append(button);
    }
    return card;
  }));
}

// Simulates the recent requests with a change; the server itself stays as it is.
async function tryChange(change) {
  const [, name, value] = change.match(/^([^=]*)=(.*)$/);
  at("trial_status").hidden = false;
  at("trial_status").textContent = `Simulating the recent requests with ${change} …`;
  const headers = { ...authorization(), "Content-Type": "application/json", Accept: "text/plain" };
  const body = JSON.stringify({ changes: { [name]: value } });
  try {
    const response = await fetch("doctor/try", { method: "POST", headers, body });
    const text = await response.text();
    at("trial_status").textContent = response.ok
      ? "Simulated; nothing was changed."
      : JSON.parse(text).error.message;
    at("trial").textContent = response.ok ? text : "";
    at("trial").parentElement.hidden = !response.ok;
  } catch (error) {
    at("trial_status").textContent = `The server does not respond: ${error.message}`;
  }
}

async function diagnose() {
  try {
    const response = await fetch("doctor", { headers: { ...authorization(), Accept: "application/json" } });
    if (response.ok) drawFindings((await response.json()).findings);
  } catch (error) {
    drawFindings([]); // the banner says that the server does not respond
  }
  setTimeout(diagnose, document.hidden ? 4 * DIAGNOSIS : DIAGNOSIS);
}

// One row for each engine, if there are several behind this server.
function drawReplicas(replicas) {
  at("fleet").hidden = !replicas;
  if (!replicas) return;
  at("num_replicas").textContent = number(replicas.length);
  at("replicas").replaceChildren(...replicas.map((replica) => row([
    [replica.name, replica.fault ? "unhealthy" : "", replica.fault ?? replica.name],
    [number(replica.output_tokens), "num"],
    [part(replica.running, replica.limit), "num"], [number(replica.waiting), "num"],
    [part(replica.blocks_used, replica.blocks_total), "num"],
    [replica.cache_hit_rate === null ? "–" : `${(100 * replica.cache_hit_rate).toFixed(0)} %`, "num wide"],
    [number(replica.requests), "num wide"], [seconds(replica.uptime), "num"],
  ])));
}

function draw(s) {
  drawReplicas(s.replicas);
  at("vitals").replaceChildren(...s.vitals.map((vital) => row([
    [vital.name, vital.is_healthy ? "" : "unhealthy"],
    [amount(vital), vital.is_healthy ? "num" : "num unhealthy"], [vital.healthy, "long"],
  ])));
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
  const hits = s.last_minute.prefix_cache_hit_rate;
  at("hit_rate").textContent = hits === null ? "–" : `${Math.round(100 * hits)} %`;
  for (const id of ["errors", "aborts"]) at(id).textContent = number(s.last_minute[id]);
  const { requests, errors, aborts } = s.totals;
  at("totals").textContent =
    `since start: ${number(requests)} requests, ${number(errors)} errors, ${number(aborts)} aborts`;
  at("age").textContent = age(s);
  const { running, waiting, kv_blocks: blocks } = s;
  bar("running", running.count, running.limit);
  bar("blocks", blocks.used, blocks.total);
  at("host").hidden = !blocks.host_total;
  bar("host", blocks.host_used, blocks.host_total);
  at("num_running").textContent = countText(running);
  at("num_waiting").textContent = countText(waiting);
  list("running", running.requests.map((r) => row([
    [short(r.id), r.state, r.id], [r.client, "client"], [r.state, `wide ${r.state}`],
    [part(r.computed_prompt_tokens, r.prompt_tokens), "num"],
    [`${number(r.output_tokens)} / ${number(r.max_output_tokens)}`, "num"],
    [number(r.blocks), "num wide"], [seconds(r.age), "num"],
  ])));
  list("waiting", waiting.requests.map((r) => row([
    [short(r.id), r.state, `${r.id}, ${r.state}`], [r.client, "client"],
    [number(r.prompt_tokens + r.output_tokens), "num wide"], [seconds(r.age), "num"],
    [r.why, "long"],
  ])));
  at("none_waiting").hidden = waiting.count > 0;
  list("decisions", s.decisions.slice().reverse().map((d) => {
    const line = document.createElement("li");
    const step = document.createElement("span");
    const text = document.createElement("span");
    step.textContent = d.step < 0 ? "" : number(d.step);
    text.textContent = short(d.text);
    text.title = d.text;
    text.className = d.kind;
    line.append(step, text);
    return line;
  }));
  showError(s.fault ? `The latest step failed: ${s.fault}` : "");
}

function showError(text) {
  at("banner").textContent = text;
  at("banner").hidden = !text;
}

async function update() {
  try {
    const response = await fetch("live", { headers: authorization() });
    at("login").hidden = response.status !== 401;
    const body = await response.json();
    if (response.ok) draw(body);
    else showError(body.error ? body.error.message : `The server returned status ${response.status}.`);
    document.querySelector("main").className = response.ok ? "" : "stale";
  } catch (error) {
    showError(`The server does not respond: ${error.message}`);
    document.querySelector("main").className = "stale";
  }
  setTimeout(update, document.hidden ? 4 * INTERVAL : INTERVAL);
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
});
update();
diagnose();
