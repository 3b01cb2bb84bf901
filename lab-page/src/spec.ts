// The specification of a run, its form in the URL, and the numbers in a workload's text.

export type Value = string | number;

export interface RequestSpec {
  id: string;
  count?: number; // copies of it
  every?: number; // seconds between them
  arrival?: number;
  prompt: unknown;
  output: number;
  priority?: number;
  client?: string;
}

export interface Edit {
  step: number;
  add?: RequestSpec;
  abort?: string;
  set?: Record<string, Value>;
}

export interface Spec {
  workload?: string;
  requests?: RequestSpec[];
  trace?: string;
  preset?: string;
  set?: Record<string, Value>;
  profile?: string;
  async_scheduling?: boolean;
  edits?: Edit[];
  story?: string;
}

export interface Look {
  step: number;
  text: string;
  run?: string; // spec, other or a name of more
}

/** A number that the runs of a story give: of one run, or of one per another. */
export interface StoryNumber {
  label: string;
  metric: string;
  unit?: string;
  run?: string;
  per?: string;
  digits?: number;
  scale?: number; // from seconds and shares to the unit
}

export interface Story {
  name: string;
  title: string;
  text: string[];
  lesson?: string;
  spec: Spec;
  other: Spec | null;
  more?: Record<string, Spec>; // further runs
  sync: "step" | "time"; // how two of its runs are compared
  looks: Look[];
  question?: { text: string; choices: string[]; answer: number; why: string[] } | null;
  numbers: StoryNumber[];
}

export interface Catalog {
  mode: "lab" | "serve" | "attach" | "export";
  presets: Record<string, Record<string, Value>>;
  slots: Record<string, { help: string; values: { value: string; help: string }[] }>;
  numbers: Record<string, { low: number; high: number; default: Value | null; help?: string }>;
  profiles: { name: string; description: string }[];
  stories: Story[];
  traces: { name: string; title: string }[];
  default: Spec;
  asks?: boolean; // whether the user may allow policies of other modules
  states: Record<string, string>;
  blocked?: Record<string, string>; // why a request was not admitted, with {need} and {have}
  not_considered?: Record<string, string>; // why a step did not consider it, with {limit}
  version: string;
}

/** JSON as base64url, for the URL. */
export function pack(value: unknown): string {
  const bytes = new TextEncoder().encode(JSON.stringify(value));
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** The value of `pack`'s text; null if the text is damaged. */
export function unpack<T>(text: string): T | null {
  try {
    return JSON.parse(new TextDecoder().decode(fromBase64(text))) as T;
  } catch {
    return null;
  }
}

export function fromBase64(text: string): Uint8Array {
  const binary = atob(text.trim().replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** The spec without parts that say nothing, so that equal runs have equal URLs. */
export function tidy(spec: Spec): Spec {
  const out: Spec = { ...spec };
  if (out.set && !Object.keys(out.set).length) delete out.set;
  if (out.edits && !out.edits.length) delete out.edits;
  if (!out.async_scheduling) delete out.async_scheduling;
  return out;
}

/** Whether two runs differ in their requests, and not only in their schedulers. */
export const hasOtherRequests = (a: Spec, b: Spec): boolean =>
  a.workload !== b.workload || a.trace !== b.trace || JSON.stringify(a.requests) !== JSON.stringify(b.requests);

/** One number of a workload's text, which a slider can change. */
export interface Dial {
  label: string;
  value: number;
  start: number; // place in the text
  end: number;
  max: number;
  step: number;
}

const PARTS: Record<string, string[]> = {
  uniform: ["from", "to"], lognormal: ["mean", "sigma", "from", "to"], fixed: [""],
  poisson: ["per s"], bursty: ["per s", "variation"], zipf: ["exponent"], heavy: ["share"],
  prefix: ["number", "tokens", "share"],
};

/** The numbers of a workload such as `requests=60,prompt=uniform(20,60)`. */
export function dials(text: string): Dial[] {
  const found: Dial[] = [];
  for (const field of text.matchAll(/([a-z_]+)\s*=\s*((?:[^,(]|\([^)]*\))+)/g)) {
    if (field[1] === "seed") continue;
    const [all, key, value] = field, offset = field.index + all.length - value.length;
    const call = /([a-z_]+)\(/.exec(value)?.[1] ?? "";
    let place = 0;
    for (const number of value.matchAll(/\d+(\.\d+)?/g)) {
      const at = offset + number.index;
      if (text[at + number[0].length] === "*") { // a mixture: share*form(numbers)+...
        found.push(dial(`${key} share`, number[0], at));
        continue;
      }
      const kind = key === "arrivals" && call === "uniform" ? "poisson" : call || key;
      const name = PARTS[kind]?.[place] ?? "";
      found.push(dial(`${key} ${name}`.trim(), number[0], at));
      place++;
    }
  }
  return found;
}

function dial(label: string, text: string, start: number): Dial {
  const value = Number(text), isWhole = !text.includes(".");
  const max = isWhole ? Math.max(10, 10 ** Math.ceil(Math.log10(Math.max(1, value) * 2))) : 2 * value || 1;
  return { label, value, start, end: start + text.length, max, step: isWhole ? 1 : max / 100 };
}

/** The text with one number replaced. */
export function turn(text: string, dial: Dial, value: number): string {
  const shown = Number.isInteger(dial.value) ? String(Math.round(value)) : value.toFixed(2);
  return text.slice(0, dial.start) + shown + text.slice(dial.end);
}

/** The seed in a workload's text. */
export const seedOf = (text: string): number => Number(/(?:^|,)\s*seed\s*=\s*(\d+)/.exec(text)?.[1] ?? 0);

/** The text with another seed. */
export function withSeed(text: string, seed: number): string {
  const bare = text.replace(/(^|,)\s*seed\s*=\s*\d+/, "").replace(/^,/, "");
  return seed ? `${bare},seed=${seed}` : bare;
}
