// Numbers and words as the page prints them.

export const MAX_ID = 10;

/** A whole number with separators. toLocaleString is slow, and a frame prints hundreds of numbers. */
export function count(value: number): string {
  const text = String(Math.round(value));
  return text.length < 4 ? text : text.replace(/\B(?=(\d{3})+$)/g, ",");
}

/** What a reason for waiting counts. */
export function thing(reason: string): string {
  if (reason === "token_budget") return "tokens";
  if (reason === "max_num_seqs" || reason === "reserved_rows") return "rows";
  return "blocks";
}

/** A number with separators and this many digits after the point. */
export function fixed(value: number, digits: number): string {
  const [whole, rest] = value.toFixed(digits).split(".");
  return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? `.${rest}` : "");
}

/** An id of at most this many characters. The end stays: there the ids of a server differ. */
export const shortId = (id: string, length = MAX_ID): string =>
  id.length > length ? `…${id.slice(1 - length)}` : id;

export const plural = (value: number, noun: string): string =>
  `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Seconds with a unit that fits. */
export function seconds(value: number): string {
  if (value === 0) return "0 s";
  if (Math.abs(value) < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (Math.abs(value) < 1) return `${(value * 1e3).toFixed(1)} ms`;
  return `${value.toFixed(3)} s`;
}

/** A number of a summary: whole numbers with separators, others with four digits. */
export function figure(value: number): string {
  if (Number.isInteger(value)) return count(value);
  if (Math.abs(value) >= 1000) return count(value);
  return String(Number(value.toPrecision(4)));
}

/** Nested numbers by dotted names: {ttft: {p50: 1}} gives "ttft.p50". */
export function flatten(value: unknown, prefix = ""): [string, number][] {
  if (typeof value === "number") return [[prefix, value]];
  if (typeof value !== "object" || value === null || Array.isArray(value)) return [];
  return Object.entries(value).flatMap(([key, each]) => flatten(each, prefix ? `${prefix}.${key}` : key));
}
