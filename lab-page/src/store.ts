// The state of the page as signals, and the actions that change it.

import { batch, computed, effect, ReadonlySignal, signal, Signal } from "@preact/signals";
import { allow, OwnPolicies, Source, stream } from "./api";
import { Recording, whereTheyPart } from "./recording";
import { Catalog, Edit, Spec, tidy } from "./spec";
import { makeView, stepOf, View } from "./view";

export type Sync = "step" | "time";

/** One of the two schedulers. */
export interface Side {
  recording: Signal<Recording | null>;
  spec: Signal<Spec | null>;
  isLoading: Signal<boolean>;
  abort: AbortController | null;
}

const side = (): Side => ({
  recording: signal(null), spec: signal(null), isLoading: signal(false), abort: null,
});

export const a = side(), b = side();
export const version = signal(0); // grows when frames arrive
export const catalog = signal<Catalog | null>(null);
export const position = signal(0); // frame; of both recordings, unless they are shown by time
export const clock = signal(0); // seconds, when they are shown by time
export const sync = signal<Sync>("step");
export const selected = signal<string | null>(null);
export const hovered = signal<string | null>(null);
export const chosenState = signal<string | null>(null);
export const onlySelected = signal(false); // whether the log shows one request
export const guess = signal<number | null>(null); // of a story's question; -1: shown without a guess
export const isPlaying = signal(false);
export const speed = signal(5); // frames per second
export const isFollowing = signal(false);
export const isLive = signal(false);
export const banner = signal<string | null>(null);
export const isHelpOpen = signal(false);
export const asked = signal<string[]>([]); // policies of other modules, until the user answers
export const theme = signal<"auto" | "light" | "dark">("auto");
export const MARKS = ["PREEMPTION", "BLOCK", "HIT", "END", "ABORT"];
export const chosenMarks = signal<string[]>(MARKS);
export const span = signal<[number, number] | null>(null); // frames that lanes and charts show
export let wanted: number | null = null; // a frame to show once it has arrived

export const lit = computed(() => hovered.value ?? selected.value);
export const isComparing = computed(() => b.spec.value !== null || b.recording.value !== null);
export const isByTime = computed(() => isComparing.value && sync.value === "time");
export const canRun = computed(() => catalog.value?.mode === "lab");
export const whyNot = computed(() => {
  const mode = catalog.value?.mode;
  if (mode === "export") return "This file holds a recorded run. Start `headway lab` to run another.";
  if (mode === "lab" || !mode) return "";
  return "This page follows a live server. Start `headway lab` to run a workload of your own.";
});

/** Whether the run can be changed in the middle; and why not. */
export const whyNoEdit = computed(() => {
  if (!canRun.value) return whyNot.value || "The lab is starting.";
  if (a.spec.value === null) return "Open the file with `headway lab FILE` to change this run.";
  const isRedacted = a.spec.value.trace && a.recording.value?.header?.is_redacted;
  return isRedacted ? "This trace is redacted: it has no tokens, so its run cannot be repeated." : "";
});
export const canEdit = computed(() => whyNoEdit.value === "");

export const numFrames = computed(() => {
  version.value;
  return Math.max(a.recording.value?.numFrames ?? 0, b.recording.value?.numFrames ?? 0);
});

/** The frame of a side at the present position. */
export function frameOf(each: Side): number {
  version.value;
  const recording = each.recording.value;
  if (!recording || !recording.numFrames) return -1;
  if (isByTime.value) return recording.frameAt(clock.value);
  return Math.min(position.value, recording.numFrames - 1);
}

const viewOf = (each: Side) => computed<View | null>(() => {
  const frame = frameOf(each);
  return frame < 0 ? null : makeView(each.recording.value!, frame);
});
export const viewA = viewOf(a), viewB = viewOf(b);

/** A view that follows another one after the next picture: for panes that are off the screen. */
function late(view: ReadonlySignal<View | null>): ReadonlySignal<View | null> {
  const shown = signal<View | null>(null);
  let isDue = false;
  effect(() => {
    view.value;
    if (isDue) return;
    isDue = true;
    afterPicture(() => {
      isDue = false;
      shown.value = view.peek();
    });
  });
  return shown;
}
const lateViews = new Map([viewA, viewB].map((view) => [view, late(view)] as const));
export const lateView = (view: ReadonlySignal<View | null>) => lateViews.get(view) ?? view;

/** Call back once the next picture is painted. */
function afterPicture(call: () => void): void {
  requestAnimationFrame(() => setTimeout(call));
}

let compared: { left: Recording; right: Recording; upTo: number } | null = null;

/** The first frame in which the two recordings differ; -1 if there is none so far. */
export const partsAt = computed(() => {
  version.value;
  const [left, right] = [a.recording.value, b.recording.value];
  if (!left?.numFrames || !right?.numFrames) return -1;
  if (compared?.left !== left || compared.right !== right) compared = { left, right, upTo: 0 };
  const found = whereTheyPart(left, right, compared.upTo);
  compared.upTo = found >= 0 ? found : Math.min(left.numFrames, right.numFrames);
  return found;
});

// Moving.

export function seek(frame: number, isUser = true): void {
  const last = Math.max(0, numFrames.value - 1), to = Math.max(0, Math.min(last, Math.round(frame)));
  batch(() => {
    if (isUser) {
      wanted = null;
      if (isLive.value) isFollowing.value = frame >= last;
    }
    position.value = to;
    const recording = a.recording.value?.numFrames ? a.recording.value : b.recording.value;
    if (recording?.numFrames) clock.value = recording.planned.at(Math.min(to, recording.numFrames - 1));
  });
}

export function stepBy(count: number): void {
  if (!isByTime.value) return seek(position.value + count);
  for (let i = 0; i < Math.abs(count); i++) tick(count > 0 ? 1 : -1);
}

/** By time: go to the next plan of either recording. */
function tick(way: 1 | -1): void {
  const now = clock.value, times: number[] = [];
  for (const recording of [a.recording.value, b.recording.value]) {
    if (!recording?.numFrames) continue;
    let at = recording.frameAt(now);
    if (way < 0) while (at >= 0 && recording.planned.at(at) >= now) at--;
    else at++;
    if (at >= 0 && at < recording.numFrames) times.push(recording.planned.at(at));
  }
  if (times.length) seekTime(way > 0 ? Math.min(...times) : Math.max(...times));
}

export function seekTime(time: number): void {
  batch(() => {
    clock.value = time;
    if (a.recording.value) position.value = a.recording.value.frameAt(time);
  });
}

export function seekMark(way: 1 | -1): void {
  const found: number[] = [];
  for (const each of [a, b]) {
    const recording = each.recording.value;
    if (!recording?.numFrames) continue;
    const mask = chosenMarks.value.reduce((sum, name) => sum | (recording.header!.marks[name] ?? 0), 0);
    const frame = recording.nextMark(frameOf(each), mask, way);
    if (frame >= 0) found.push(isByTime.value ? recording.planned.at(frame) : frame);
  }
  if (!found.length) return;
  const to = way > 0 ? Math.min(...found) : Math.max(...found);
  if (isByTime.value) seekTime(to);
  else seek(to);
}

/** Go to a frame of one of the two recordings. */
export function seekIn(recording: Recording, frame: number): void {
  if (isByTime.value) seekTime(recording.planned.at(Math.max(0, Math.min(frame, recording.numFrames - 1))));
  else seek(frame);
}

/** Go to the end; of a run that is still computed, to its end when it has arrived. */
export function seekEnd(): void {
  seek(numFrames.value - 1);
  if (!isLive.value && (a.isLoading.value || b.isLoading.value)) wanted = Number.MAX_SAFE_INTEGER;
  if (isByTime.value) {
    const ends = [a, b].map(({ recording: { value } }) => value?.planned.at(value.numFrames - 1) ?? 0);
    seekTime(Math.max(...ends));
  }
}

/** Show a frame now, or as soon as it has arrived. */
export function want(frame: number): void {
  wanted = frame;
  seek(frame, false);
}

/** Go to a step of the first recording; of the second one, if only that is so long. */
export function seekStep(step: number): void {
  const both = [a.recording.value, b.recording.value];
  const recordings = both.filter((each): each is Recording => !!each?.numFrames);
  const recording = recordings.find((each) => stepOf(each, each.numFrames - 1) >= step) ?? recordings[0];
  if (recording) seekIn(recording, recording.frameOfStep(step));
}

export function select(id: string | null): void {
  selected.value = selected.value === id ? null : id;
}

// Playing.

let before = 0, due = 0;

export function play(on = !isPlaying.value): void {
  if (on && position.value >= numFrames.value - 1 && !a.isLoading.value) seek(0);
  isPlaying.value = on;
}

effect(() => {
  if (!isPlaying.value) return;
  before = performance.now();
  due = 1;
  const turn = (now: number) => {
    if (!isPlaying.peek()) return;
    due += ((now - before) / 1000) * speed.peek();
    before = now;
    if (due >= 1) {
      const at = position.peek(), at2 = clock.peek();
      stepBy(Math.floor(due));
      due %= 1;
      const isStuck = position.peek() === at && clock.peek() === at2;
      if (isStuck && !a.isLoading.peek() && !b.isLoading.peek()) isPlaying.value = false;
    }
    requestAnimationFrame(turn);
  };
  requestAnimationFrame(turn);
});

// Loading.

let isScheduled = false;

/** Tell the panes about new frames, at most once per picture. */
function arrived(): void {
  if (isScheduled) return;
  isScheduled = true;
  setTimeout(() => {
    isScheduled = false;
    refresh();
  }, 60);
}

const MAX_LIVE_FRAMES = 20_000, MAX_LIVE_BYTES = 48 << 20; // that are kept of a live recording
const SLACK = 1.2; // more than this share above a limit is dropped at once

/** Drop the oldest frames of a live recording, which has no end. What is shown moves along. */
function forgetOldest(): void {
  const recording = a.recording.peek();
  if (!isLive.peek() || !recording || !recording.isOver(SLACK * MAX_LIVE_FRAMES, SLACK * MAX_LIVE_BYTES)) return;
  const count = recording.keepLatest(MAX_LIVE_FRAMES, MAX_LIVE_BYTES), shift = (at: number) => Math.max(0, at - count);
  position.value = shift(position.peek());
  if (wanted !== null) wanted = shift(wanted);
  if (span.peek()) span.value = [shift(span.peek()![0]), Math.max(20, span.peek()![1] - count)];
}

function refresh(): void {
  batch(() => {
    forgetOldest();
    version.value = version.peek() + 1;
    if (isFollowing.value) seek(numFrames.value - 1, false);
    else if (wanted !== null && position.value !== wanted) seek(wanted, false);
  });
}

/** Load a recording into a side; whether it has frames. What is shown stays until the first ones arrive. */
export async function load(each: Side, source: Source): Promise<boolean> {
  each.abort?.abort();
  const abort = (each.abort = new AbortController()), recording = new Recording();
  each.isLoading.value = true;
  try {
    await stream(source, recording, abort.signal, () => {
      if (each.recording.value !== recording && recording.numFrames) {
        batch(() => {
          if (each.recording.value) span.value = null;
          each.recording.value = recording;
          refresh(); // the first frames at once
        });
      }
      arrived();
    });
    if (recording.end?.error) banner.value = recording.end.error;
    else if (recording.header?.notice) {
      banner.value = `Shown from the recorded lines, without alternatives: ${recording.header.notice}`;
    }
    if (!recording.numFrames && !recording.end?.error) banner.value = "The run has no steps: no request arrived.";
    ask(recording.header?.own ?? []);
  } catch (error) {
    if (abort.signal.aborted || (error instanceof OwnPolicies && ask(error.names))) return false;
    banner.value = (error as Error).message;
    if (each === b && !b.recording.value) b.spec.value = null; // there is nothing to compare with
  } finally {
    batch(() => {
      if (each.abort === abort) each.isLoading.value = false;
      refresh(); // so that no part of the page shows fewer frames than the recording has
    });
  }
  return each.recording.value === recording;
}

/** Ask the user whether the lab may import policies; false if it does not allow that. */
function ask(names: string[]): boolean {
  if (!names.length || !catalog.value?.asks) return false;
  asked.value = [...new Set([...asked.value, ...names])];
  return true;
}

/** Take the user's answer: import what was asked for and run again, or import nothing. */
export async function answer(isAllowed: boolean): Promise<void> {
  const names = asked.value;
  if (!names.length) return;
  asked.value = [];
  if (!isAllowed) {
    banner.value = `Not imported: ${names.join(", ")}`;
    if (!b.recording.value) b.spec.value = null;
    return;
  }
  try {
    await allow(names);
    runAgain();
  } catch (error) {
    banner.value = (error as Error).message;
  }
}

/** Run a spec, and a second one beside it. The frame stays, unless another one is given. */
export function open(spec: Spec, other: Spec | null, frame: number | null = null): void {
  batch(() => {
    banner.value = null;
    asked.value = [];
    isPlaying.value = false;
    const isSame = JSON.stringify(a.spec.value) === JSON.stringify(tidy(spec)) && a.recording.value?.end;
    a.spec.value = tidy(spec);
    b.spec.value = other && tidy(other);
    if (!other) {
      b.abort?.abort();
      b.recording.value = null;
    }
    // While a recording is loading, the frame shown is that of another one.
    wanted = frame ?? (a.isLoading.peek() ? wanted : null) ?? position.value;
    if (!isSame) void load(a, { kind: "spec", spec: a.spec.value });
    else if (frame !== null) seek(frame, false);
    if (other) void load(b, { kind: "spec", spec: b.spec.value! });
  });
}

/** Run what is shown once more, for example after the connection was lost. */
export function runAgain(): void {
  banner.value = null;
  wanted = position.value;
  for (const each of [a, b]) if (each.spec.value) void load(each, { kind: "spec", spec: each.spec.value });
}

/** Run again with a change of the spec; the second scheduler gets the same workload. */
export function change(changes: Partial<Spec>): void {
  const spec = { ...(a.spec.value ?? {}), ...changes };
  const shared: Partial<Spec> = {};
  for (const key of ["workload", "requests", "trace", "profile", "story"] as const) {
    if (key in changes) Object.assign(shared, { [key]: changes[key] });
  }
  open(spec, b.spec.value && { ...b.spec.value, ...shared });
}

/** The step before whose plan an edit takes effect: the one after the step that is shown. */
export function editStep(): number {
  return (viewA.value?.step ?? -1) + 1;
}

export function edit(change: Omit<Edit, "step">): void {
  const entry = { step: editStep(), ...change };
  const edited = (spec: Spec): Spec => ({ ...spec, edits: [...(spec.edits ?? []), entry] });
  open(edited(a.spec.value!), b.spec.value && edited(b.spec.value), position.value + 1);
}

export function fork(set: Record<string, string | number>): void {
  const spec = a.spec.value!;
  open(spec, { ...spec, edits: [...(spec.edits ?? []), { step: editStep(), set }] });
}
