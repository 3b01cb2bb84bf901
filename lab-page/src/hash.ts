// All state of the page in the hash of its URL, so that a link shows the same frame.

import { batch, effect } from "@preact/signals";
import { download } from "./api";
import { pack, Spec, unpack } from "./spec";
import * as store from "./store";

const DELAY = 150; // ms; browsers limit how often the URL may change

export function toHash(): string {
  const parts: [string, string][] = [];
  const { a, b, position } = store, frame = position.value;
  if (a.spec.value) parts.push(["spec", pack(a.spec.value)]);
  if (b.spec.value) parts.push(["other", pack(b.spec.value)]);
  const isLoading = a.isLoading.value || b.isLoading.value;
  parts.push(["frame", String(isLoading ? (store.wanted ?? frame) : frame)]);
  if (store.isByTime.value) {
    parts.push(["sync", "time"], ["clock", String(store.clock.value)]);
  }
  if (store.selected.value !== null) parts.push(["request", encodeURIComponent(store.selected.value)]);
  if (store.speed.value !== 5) parts.push(["speed", String(store.speed.value)]);
  if (store.theme.value !== "auto") parts.push(["theme", store.theme.value]);
  if (store.chosenState.value) parts.push(["state", store.chosenState.value]);
  if (store.chosenMarks.value.length !== store.MARKS.length) {
    parts.push(["marks", store.chosenMarks.value.join(".")]);
  }
  if (store.onlySelected.value) parts.push(["only", "1"]);
  if (a.spec.value?.story && store.guess.value !== null) parts.push(["guess", String(store.guess.value)]);
  if (store.span.value) parts.push(["span", store.span.value.join("-")]);
  return `#${parts.map(([key, value]) => `${key}=${value}`).join("&")}`;
}

/** Save what is shown as one HTML file. */
export async function exportFile(): Promise<void> {
  try {
    await download(store.a.spec.value ?? {}, store.b.spec.value, toHash());
  } catch (error) {
    store.banner.value = (error as Error).message;
  }
}

export interface Link {
  spec: Spec | null;
  other: Spec | null;
  frame: number | null;
  isDamaged: boolean;
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Take over what a hash says; returns the runs that it names. */
export function fromHash(hash: string): Link {
  const parts = new Map<string, string>();
  for (const part of hash.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    if (at > 0) parts.set(part.slice(0, at), part.slice(at + 1));
  }
  const number = (key: string) => {
    const value = Number(parts.get(key));
    return parts.has(key) && Number.isFinite(value) ? value : null;
  };
  batch(() => {
    if (parts.get("sync") === "time") store.sync.value = "time";
    store.clock.value = number("clock") ?? 0;
    store.selected.value = parts.has("request") ? decoded(parts.get("request")!) : null;
    store.speed.value = number("speed") ?? 5;
    const theme = parts.get("theme");
    if (theme === "light" || theme === "dark") store.theme.value = theme;
    store.chosenState.value = parts.get("state") ?? null;
    if (parts.has("marks")) store.chosenMarks.value = parts.get("marks")!.split(".").filter(Boolean);
    store.onlySelected.value = parts.has("only");
    store.guess.value = number("guess");
    const span = /^(\d+)-(\d+)$/.exec(parts.get("span") ?? "");
    if (span) store.span.value = [Number(span[1]), Number(span[2])];
  });
  const spec = parts.has("spec") ? unpack<Spec>(parts.get("spec")!) : null;
  const other = parts.has("other") ? unpack<Spec>(parts.get("other")!) : null;
  return { spec, other, frame: number("frame"), isDamaged: parts.has("spec") && !spec };
}

/** Keep the hash equal to the state, and follow links that the user opens in this page. */
export function followHash(onLink: (link: Link) => void): void {
  let timer = 0, known = location.hash;
  effect(() => {
    const hash = toHash();
    clearTimeout(timer);
    timer = window.setTimeout(() => {
      if (location.hash !== known) return; // the user opened a link: its event comes next
      if (hash !== known) history.replaceState(null, "", hash);
      known = location.hash;
    }, DELAY);
  });
  addEventListener("hashchange", () => {
    if (location.hash === known) return;
    known = location.hash;
    onLink(fromHash(known));
  });
}
