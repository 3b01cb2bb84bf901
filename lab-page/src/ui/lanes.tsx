// One lane per request over time, with the present frame and marks of preemptions and ends.

import type { ReadonlySignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { color } from "../colors";
import type { Recording } from "../recording";
import { lastAtMost } from "../growing";
import { DECODING, FINISHED, PREFILL, SWAPPED, WAITING } from "../state";
import { hovered, lit, seekIn, select, selected, span, version } from "../store";
import type { Life } from "../timeline";
import { stepOf, type View } from "../view";
import { Canvas } from "./canvas";
import { Legend } from "./legend";
import { count, shortId } from "./words";

const GUTTER = 56, AXIS = 16, MIN_ROW = 10, MAX_ROW = 18, MIN_SPAN = 20, MAX_LANES = 20;
const COLORS: Record<number, string> = {
  [WAITING]: "waiting", [PREFILL]: "prefill", [DECODING]: "decoding", [SWAPPED]: "swapped",
};

const LEGEND: [string, string][] = [
  ["waiting", "waiting"], ["prefill", "prefill"], ["decoding", "decoding"], ["swapped", "swapped"],
  ["tick", "preempted"],
];

interface Drawn { rows: number[]; height: number; shown: [number, number]; width: number }

/** The frames that lanes and charts show. */
export function shownSpan(numFrames: number): [number, number] {
  const chosen = span.value;
  return chosen ? [chosen[0], Math.min(chosen[1], Math.max(numFrames, chosen[0] + MIN_SPAN))]
    : [0, Math.max(numFrames, MIN_SPAN)];
}

/** Show more or fewer frames round a place. */
export function zoom(factor: number, middle: number, numFrames: number): void {
  const [low, high] = shownSpan(numFrames), width = Math.max(MIN_SPAN, (high - low) * factor);
  if (width >= numFrames) span.value = null;
  else {
    const share = high > low ? (middle - low) / (high - low) : 0.5;
    const from = Math.round(Math.max(0, Math.min(numFrames - width, middle - share * width)));
    span.value = [from, Math.round(from + width)];
  }
}

export function Lanes({ view, name }: { view: ReadonlySignal<View | null>; name: string }) {
  const drawn = useRef<Drawn>({ rows: [], height: MAX_ROW, shown: [0, 1], width: 1 }); // for the pointer
  const draw = (context: CanvasRenderingContext2D, w: number, h: number) => {
    version.value;
    const now = view.value;
    context.clearRect(0, 0, w, h);
    if (!now) return;
    const shown = shownSpan(now.recording.numFrames), width = w - GUTTER;
    const rows = pick(now, shown, Math.floor((h - AXIS) / MIN_ROW));
    const height = Math.min(MAX_ROW, Math.max(MIN_ROW, Math.floor((h - AXIS) / Math.max(1, rows.length))));
    drawn.current = { rows, height, shown, width };
    paintLanes(context, now, rows, height, shown, width, h);
  };
  const frameAt = (x: number) => {
    const { shown, width } = drawn.current;
    return shown[0] + ((x - GUTTER) / width) * (shown[1] - shown[0]);
  };
  const onPoint = (x: number, y: number, kind: "move" | "click") => {
    const { rows, height } = drawn.current, recording = view.peek()?.recording, r = rows[Math.floor(y / height)];
    const id = recording && r !== undefined ? recording.entries[r].id : null;
    if (kind === "move") hovered.value = id;
    else {
      if (x >= GUTTER && recording) seekIn(recording, Math.floor(frameAt(x)));
      if (id !== null && (x < GUTTER || selected.value !== id)) select(id);
    }
  };
  const onWheel = (event: WheelEvent, x: number) => {
    const recording = view.peek()?.recording;
    if (!recording || !event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, frameAt(x), recording.numFrames);
  };
  const change = (factor: number) => () => {
    const now = view.peek();
    if (now) zoom(factor, now.frame, now.recording.numFrames);
  };
  return (
    <section class="card lanes" aria-label={`Requests over time${name}`}>
      <h2>
        Requests over time
        <small>{laneText(view.value)}</small>
        <span class="tools">
          <button type="button" onClick={change(0.5)} aria-label="Show fewer frames">+</button>
          <button type="button" onClick={change(2)} aria-label="Show more frames">−</button>
          <button type="button" onClick={() => (span.value = null)} aria-label="Show all frames">all</button>
        </span>
      </h2>
      <Canvas
        draw={draw} class="lanes-canvas" onPoint={onPoint} onLeave={() => (hovered.value = null)}
        onWheel={onWheel} label="One lane for each request; the colour is its state at each step"
      />
      <Legend items={LEGEND} />
    </section>
  );
}

function laneText(view: View | null): string {
  version.value;
  const all = view?.recording.timeline.lives.size ?? 0;
  return all > MAX_LANES ? `${count(all)} requests, the nearest shown` : "";
}

/** Requests with a lane: those in the span; if there are too many, those nearest to the frame. */
function pick({ recording, state, work, frame }: View, span: [number, number], most: number): number[] {
  const inside = requestsIn(recording, span);
  if (inside.length <= most) return inside;
  const { lives } = recording.timeline;
  const next = () => lastAtMost(recording.entries.length, frame, (r) => lives.get(r)?.frames[0] ?? -1) + 1;
  const [open = next()] = state.requests.keys(); // the first one that is open, or the next to arrive
  const first = lastAtMost(inside.length, Math.min(open, ...work.finished) - 1, (i) => inside[i]) + 1;
  const from = Math.max(0, Math.min(first - 2, inside.length - most));
  return inside.slice(from, from + most);
}

const spans = new WeakMap<Recording, { key: string; inside: number[] }>();

/** The requests that are open in a span of frames. Only its latest answer is kept for a recording. */
function requestsIn(recording: Recording, [low, high]: [number, number]): number[] {
  const key = `${low} ${high} ${recording.numFrames} ${recording.numDropped}`, known = spans.get(recording);
  if (known?.key === key) return known.inside;
  const inside: number[] = [];
  for (const [r, life] of recording.timeline.lives) {
    if (life.frames[0] < high && (life.finish?.frame ?? Infinity) >= low) inside.push(r);
  }
  spans.set(recording, { key, inside });
  return inside;
}

function paintLanes(
  context: CanvasRenderingContext2D, view: View, rows: number[], height: number,
  [low, high]: [number, number], width: number, bottom: number,
): void {
  const { recording } = view, scale = width / (high - low);
  const chosen = lit.value === null ? -1 : (recording.numbers.get(lit.value) ?? -1);
  context.font = `${Math.min(11, height)}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  rows.forEach((r, i) => {
    const y = i * height, life = recording.timeline.lives.get(r)!;
    if (r === chosen) {
      context.fillStyle = color("lit");
      context.fillRect(0, y, GUTTER + width, height);
    }
    if (height >= 9) {
      context.fillStyle = color(r === chosen ? "ink" : "quiet");
      context.fillText(shortId(recording.entries[r].id, 8), 2, y + height / 2 + 1, GUTTER - 6);
    }
    paintLane(context, life, y, height, low, high, scale, recording.numFrames);
  });
  const x = GUTTER + (view.frame + 0.5 - low) * scale;
  context.fillStyle = color("ink");
  if (x >= GUTTER) context.fillRect(Math.round(x) - 1, 0, 2, bottom - AXIS);
  context.fillStyle = color("quiet");
  context.font = "10px system-ui, sans-serif";
  context.fillText(`step ${stepOf(recording, Math.min(low, recording.numFrames - 1))}`, GUTTER, bottom - AXIS / 2);
  context.textAlign = "right";
  const lastStep = stepOf(recording, Math.min(Math.round(high), recording.numFrames) - 1);
  const end = GUTTER + Math.min(width, (recording.numFrames - low) * scale); // a short recording ends before
  context.fillText(String(lastStep), end, bottom - AXIS / 2);
  context.textAlign = "left";
}

function paintLane(
  context: CanvasRenderingContext2D, life: Life, y: number, height: number, low: number, high: number,
  scale: number, numFrames: number,
): void {
  const inset = height > 9 ? 2 : 1;
  for (let i = 0; i < life.frames.length; i++) {
    const state = life.states[i], from = Math.max(low, life.frames[i]);
    const to = Math.min(high, life.frames[i + 1] ?? numFrames);
    if (state === FINISHED || to <= from) continue;
    const isWaiting = state === WAITING, thin = isWaiting ? Math.max(1, Math.floor(height / 3)) : inset;
    context.fillStyle = color(COLORS[state]);
    const x = GUTTER + (from - low) * scale, w = Math.max(0.75, (to - from) * scale);
    context.fillRect(x, y + thin, w, height - 2 * thin);
  }
  context.fillStyle = color("red");
  for (const frame of life.preemptions) {
    if (frame >= low && frame < high) {
      context.fillRect(GUTTER + (frame - low) * scale - 1, y + 1, 3, height - 2);
    }
  }
}
