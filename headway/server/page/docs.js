"use strict";

// Renders openapi.json: every endpoint with its request fields and response statuses.

const make = (tag, text = "", name = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
};

const resolve = (api, schema) => {
  if (!schema || !schema.$ref) return schema || {};
  return schema.$ref.replace("#/", "").split("/").reduce((at, part) => at[part], api);
};

const limits = (schema) => {
  const parts = [];
  const add = (key, sign) => { if (schema[key] !== undefined) parts.push(`${sign} ${schema[key]}`); };
  add("minimum", "≥"); add("exclusiveMinimum", ">"); add("maximum", "≤");
  if (schema.maxLength !== undefined) parts.push(`at most ${schema.maxLength} characters`);
  if (schema.maxItems !== undefined) parts.push(`at most ${schema.maxItems} items`);
  return parts.join(", ");
};

const type = (api, schema, depth = 0) => {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const variants = schema.anyOf || schema.oneOf;
  if (variants) {
    const kinds = variants.filter((each) => each.type !== "null");
    return kinds.map((each) => type(api, each, depth + 1)).join(" | ");
  }
  if (schema.type === "array") return `list of ${type(api, schema.items, depth + 1)}`;
  const range = limits(schema);
  return (schema.type || "any") + (range ? ` (${range})` : "");
};

const fields = (api, schema) => {
  const table = make("table");
  const head = make("tr");
  for (const title of ["field", "type", ""]) head.append(make("th", title));
  table.append(head);
  const required = new Set(schema.required || []);
  for (const [name, property] of Object.entries(schema.properties || {})) {
    const row = make("tr");
    const first = make("td");
    first.append(make("code", name));
    if (required.has(name)) first.append(make("span", " required", "quiet"));
    row.append(first, make("td", type(api, property)), make("td", property.description || ""));
    table.append(row);
  }
  return table;
};

const endpoint = (api, path, method, operation) => {
  const box = make("details");
  const summary = make("summary");
  summary.append(make("span", method.toUpperCase(), `method ${method.toUpperCase()}`));
  summary.append(make("code", path), make("span", operation.description || "", "quiet"));
  box.append(summary);
  const body = operation.requestBody && operation.requestBody.content["application/json"];
  if (body) {
    const schema = resolve(api, body.schema);
    box.append(make("h3", "Request body"), fields(api, schema));
  }
  const responses = make("table");
  for (const [status, response] of Object.entries(operation.responses)) {
    const row = make("tr");
    row.append(make("td", status), make("td", response.description || ""));
    responses.append(row);
  }
  box.append(make("h3", "Responses"), responses);
  return box;
};

const load = async () => {
  const key = sessionStorage.getItem("headway_key");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch("/openapi.json", { headers });
  if (response.status === 401) {
    const given = prompt("API key");
    if (!given) throw new Error("openapi.json requires an API key");
    sessionStorage.setItem("headway_key", given);
    return load();
  }
  if (!response.ok) throw new Error(`cannot load openapi.json: status ${response.status}`);
  const api = await response.json();
  document.getElementById("version").textContent = api.info.version;
  const main = document.getElementById("endpoints");
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      main.append(endpoint(api, path, method, operation));
    }
  }
};

load().catch((error) => {
  const problem = document.getElementById("problem");
  problem.textContent = String(error.message || error);
  problem.hidden = false;
});
