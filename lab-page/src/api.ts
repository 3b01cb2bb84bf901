// Everything that comes from outside the page: catalog, recordings, exports.

import { Recording } from "./recording";
import { Catalog, fromBase64, Spec } from "./spec";

export async function fetchCatalog(): Promise<Catalog> {
  const answer = await fetch("api/catalog");
  if (!answer.ok) throw await refusal(answer);
  return (await answer.json()) as Catalog;
}

/** A run names policies of other modules, which the lab has not imported. */
export class OwnPolicies extends Error {
  constructor(message: string, readonly names: string[]) {
    super(message);
  }
}

/** Allow the lab to import policies that the user has confirmed. */
export async function allow(own: string[]): Promise<void> {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch("api/allow", { method: "POST", body: JSON.stringify({ own }), headers });
  if (!answer.ok) throw await refusal(answer);
}

const BUSY = 24; // ms of reading between two pictures

export type Source =
  | { kind: "spec"; spec: Spec }
  | { kind: "live" }
  | { kind: "file"; file: File }
  | { kind: "embedded"; id: string };

/** Read a recording while it is made; `onProgress` is called whenever frames arrived. */
export async function stream(
  source: Source, recording: Recording, signal: AbortSignal, onProgress: () => void,
): Promise<void> {
  const body = source.kind === "embedded" ? embedded(source.id) : await request(source, signal);
  const reader = body.getReader();
  let rested = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      if (recording.read(value)) onProgress();
      if (performance.now() - rested > BUSY) { // let the page draw
        await new Promise((resolve) => setTimeout(resolve));
        rested = performance.now();
      }
    }
  } catch (error) {
    if (signal.aborted || !(error instanceof TypeError)) throw error;
  }
  if (!recording.end && !signal.aborted) {
    const end = source.kind === "live"
      ? `The server ended the connection after ${recording.numDropped + recording.numFrames} frames. ` +
        "They stay. Reload the page to follow the server again."
      : `The connection ended after ${recording.numFrames} frames, before the end of the run. ` +
        "The frames that arrived stay. Press Run to start again.";
    throw new Error(end);
  }
}

async function request(source: Source, signal: AbortSignal): Promise<ReadableStream<Uint8Array>> {
  let answer: Response;
  try {
    if (source.kind === "live") answer = await fetch("api/live", { signal });
    else if (source.kind === "file") {
      const name = encodeURIComponent(source.file.name);
      answer = await fetch(`api/trace?name=${name}`, { method: "POST", body: source.file, signal });
    } else {
      const body = JSON.stringify((source as { spec: Spec }).spec);
      const headers = { "Content-Type": "application/json" };
      answer = await fetch("api/recording", { method: "POST", body, headers, signal });
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Error("The lab's server cannot be reached. Start `headway lab` again, then press Run.");
  }
  if (!answer.ok || !answer.body) throw await refusal(answer);
  return answer.body;
}

async function refusal(answer: Response): Promise<Error> {
  const text = await answer.text();
  try {
    const { error, own } = JSON.parse(text) as { error?: string | { message?: string }; own?: string[] };
    if (typeof error === "string") return own ? new OwnPolicies(error, own) : new Error(error);
    if (error?.message) return new Error(error.message);
  } catch {
    // not JSON
  }
  return new Error(`The server answered ${answer.status} ${answer.statusText}.`);
}

export const hasEmbedded = (id: string): boolean => document.getElementById(id) !== null;

/** The catalog in an exported file, if it has one. */
export function embeddedCatalog(): Partial<Catalog> {
  const text = document.getElementById("catalog")?.textContent;
  return text ? (JSON.parse(text) as Partial<Catalog>) : {};
}

/** The state with which an exported file opens. */
export const embeddedHash = (): string =>
  document.querySelector<HTMLMetaElement>('meta[name="lab-hash"]')?.content ?? "";

function embedded(id: string): ReadableStream<Uint8Array> {
  const bytes = fromBase64(document.getElementById(id)?.textContent ?? "");
  const packed = new Blob([bytes as BlobPart]).stream();
  return packed.pipeThrough(new DecompressionStream("gzip"));
}

/** Download what is shown as one HTML file. */
export async function download(spec: Spec, other: Spec | null, hash: string): Promise<void> {
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify({ spec, other, hash });
  const answer = await fetch("api/export", { method: "POST", body, headers });
  if (!answer.ok) throw await refusal(answer);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = `headway-${spec.story ?? spec.preset ?? "run"}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
