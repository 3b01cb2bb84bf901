// Forwards, backwards, play, jump: all movement through a run.

import { signal } from "@preact/signals";

import { color, paint } from "../colors";
import {
  a, b, chosenMarks, clock, frameOf, isComparing, isByTime, isFollowing, isLive, isPlaying, MARKS, numFrames,
  partsAt, play, position, seek, seekEnd, seekMark, seekStep, seekTime, speed, stepBy, sync, version,
  viewA, viewB,
} from "../store";
import { stepOf, View } from "../view";
import { Canvas } from "./canvas";
import { count, seconds } from "./words";

const SPEEDS = [1, 2, 5, 10, 20, 60, 200, 1000];
const MARK_TEXTS: Record<string, string> = {
  PREEMPTION: "preemption", BLOCK: "new reason to wait", HIT: "cache hit", END: "end", ABORT: "abort",
  ADMISSION: "admission", ARRIVAL: "arrival",
};
const MARK_COLORS: [string, string][] = [["PREEMPTION", "red"], ["ABORT", "red"], ["HIT", "cached"]];
const typed = signal<string | null>(null); // in the field for a step, until it is left or entered

export function Transport() {
  const view = shownView(), last = Math.max(0, numFrames.value - 1);
  const byTime = isByTime.value, isAtStart = position.value <= 0 && !(byTime && clock.value > 0);
  const isAtEnd = byTime ? clock.value >= endTime() : position.value >= last;
  return (
    <section class="transport" aria-label="Steps">
      <div class="buttons">
        <Press label="First step" keys="Home" off={isAtStart} on={() => seek(0)}>|◀</Press>
        <Press label="Previous decision" keys="[" off={isAtStart} on={() => seekMark(-1)}>◆ Previous</Press>
        <Press label="Back one step" keys="←" off={isAtStart} on={() => stepBy(-1)}>◀ Back</Press>
        <Press label="Run one step" keys="→" off={isAtEnd} on={() => stepBy(1)} main>Step ▶</Press>
        <Press label="Next decision" keys="]" off={isAtEnd} on={() => seekMark(1)}>Next ◆</Press>
        <Press label={isPlaying.value ? "Pause" : "Play"} keys="space" on={() => play()}>
          {isPlaying.value ? "❚❚ Pause" : "▶▶ Play"}
        </Press>
        <Press label="Last step" keys="End" off={isAtEnd} on={seekEnd}>▶|</Press>
        <label class="speed">
          <span class="hide-narrow">speed</span>
          <select
            aria-label="Frames per second" value={String(speed.value)}
            onChange={(event) => (speed.value = Number(event.currentTarget.value))}
          >
            {SPEEDS.map((each) => <option key={each} value={each}>{each}/s</option>)}
          </select>
        </label>
        <Marks />
        {isLive.value && (
          <button
            type="button" class={isFollowing.value ? "live on" : "live"} aria-pressed={isFollowing.value}
            onClick={() => (isFollowing.value ? (isFollowing.value = false) : seekEnd())}
          >
            ● {isFollowing.value ? "Live" : "Follow live"}
          </button>
        )}
      </div>
      <p class="where" data-frame={view?.frame ?? -1} data-step={view?.step ?? -1}>
        <label>
          step{" "}
          <input
            id="jump" type="number" min="0" value={typed.value ?? view?.step ?? ""} disabled={!view}
            aria-label="Jump to step"
            onInput={(event) => (typed.value = event.currentTarget.value)}
            onChange={(event) => {
              typed.value = null;
              seekStep(Number(event.currentTarget.value));
            }}
            onBlur={() => (typed.value = null)}
          />
        </label>
        <span>of {count(lastStep())}</span>
        {dropped() > 0 && (
          <span class="time" id="dropped" title="Record with --trace-out to keep all steps">
            from {count(dropped())}; earlier steps are in the trace only
          </span>
        )}
        <span class="time">{view ? seconds(byTime ? clock.value : view.time) : ""}</span>
        <span class="loading" role="status">
          {(a.isLoading.value || b.isLoading.value) && !isLive.value ? "running…" : ""}
        </span>
        <span class="ended">{view?.isAfter ? "after it" : "\u00a0"}</span>
      </p>
      <p class="unseen" role="status">{isPlaying.value || !view ? "" : spoken(view)}</p>
      {isComparing.value && <Compare />}
      <div class="scrub">
        <MarkStrip />
        <input
          type="range" min="0" aria-label={byTime ? "Time" : "Frame"}
          max={byTime ? endTime() : last} value={byTime ? clock.value : position.value}
          step={byTime ? "any" : 1} aria-valuetext={view ? `step ${view.step}` : "no frame"}
          onInput={(event) => (byTime ? seekTime : seek)(Number(event.currentTarget.value))}
        />
      </div>
    </section>
  );
}

/** The view whose step is shown above the panes: of the second run after the end of the first. */
function shownView(): View | null {
  const first = viewA.value, second = viewB.value;
  if (!first || !second) return first ?? second;
  return !isByTime.value && second.frame > first.frame ? second : first;
}

/** What a screen reader says after a step. */
function spoken({ recording, frame, step }: View): string {
  const found = recording.latestTexts(frame, 3).filter((i) => recording.textFrames.at(i) === frame);
  return [`Step ${step}`, ...found.reverse().map((i) => recording.text(i).text)].join(". ");
}

function lastStep(): number {
  version.value;
  const sides = isByTime.value ? [a] : [a, b];
  const lasts = sides.map(({ recording: { value } }) => (value?.numFrames ? stepOf(value, value.numFrames - 1) : 0));
  return Math.max(...lasts);
}

/** When the last plan of either recording was made. */
function endTime(): number {
  version.value;
  const recordings = [a.recording.value, b.recording.value];
  return Math.max(...recordings.map((each) => (each?.numFrames ? each.planned.at(each.numFrames - 1) : 0)));
}

/** The first step that is kept of a live recording; 0 if all are. */
function dropped(): number {
  version.value;
  const recording = a.recording.value;
  return recording?.numDropped ? recording.column("step", 0) : 0;
}

interface PressProps {
  label: string;
  keys: string;
  on: () => void;
  off?: boolean;
  main?: boolean;
  children: preact.ComponentChildren;
}

function Press({ label, keys, on, off, main, children }: PressProps) {
  // aria-disabled keeps the focus where it is when the first or the last step is reached.
  return (
    <button
      type="button" class={main ? "main" : ""} aria-label={label} title={`${label} (${keys})`}
      aria-disabled={off ?? false} onClick={() => !off && on()}
    >
      {children}
    </button>
  );
}

const kinds = (n: number): string => (n === MARKS.length ? "all" : n === 1 ? "1 kind" : `${n} kinds`);

function Marks() {
  const toggle = (name: string) => {
    const chosen = chosenMarks.value;
    const next = chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name];
    chosenMarks.value = MARKS.filter((each) => next.includes(each));
  };
  return (
    <details class="marks">
      <summary title="Which decisions ◆ stops at">◆ stops at {kinds(chosenMarks.value.length)}</summary>
      <div>
        {MARKS.map((name) => (
          <label key={name}>
            <input
              type="checkbox" checked={chosenMarks.value.includes(name)} onChange={() => toggle(name)}
            />{" "}
            {MARK_TEXTS[name]}
          </label>
        ))}
      </div>
    </details>
  );
}

function Compare() {
  const parts = partsAt.value;
  return (
    <p class="sync">
      <span role="radiogroup" aria-label="Show both recordings by">
        {(["step", "time"] as const).map((way) => (
          <label key={way}>
            <input
              type="radio" name="sync" checked={sync.value === way}
              onChange={() => {
                sync.value = way;
                const recording = a.recording.value;
                if (way === "time" && recording) seekTime(recording.planned.at(Math.max(0, frameOf(a))));
              }}
            />{" "}
            same {way}
          </label>
        ))}
      </span>
      <button
        type="button" class="small" disabled={parts < 0} id="part" data-frame={parts}
        title="Jump to the first step in which the two schedulers decide differently (p)"
        onClick={() => seek(parts)}
      >
        {parts < 0
          ? "No difference so far"
          : `Jump to where they part: step ${count(stepOf(a.recording.value!, parts))}`}
      </button>
    </p>
  );
}

/** Marks of preemptions, aborts and hits over the whole recording, above the scrubber. */
function MarkStrip() {
  const draw = (context: CanvasRenderingContext2D, width: number, height: number) => {
    version.value; paint.value;
    context.clearRect(0, 0, width, height);
    const recordings = [a.recording.value, b.recording.value], byTime = isByTime.value;
    const end = byTime ? endTime() || 1 : Math.max(1, numFrames.value - 1);
    recordings.forEach((recording, i) => {
      if (!recording?.numFrames) return;
      const marks = recording.columns.marks.values, names = recording.header!.marks;
      const high = recordings[1] ? height / 2 : height, y = i * high;
      for (const [name, shade] of [...MARK_COLORS].reverse()) {
        context.fillStyle = color(shade);
        const bit = names[name] ?? 0;
        let x = -1;
        for (let f = 0; f < marks.length; f++) {
          if (!(marks[f] & bit)) continue;
          const at = Math.round(8 + ((byTime ? recording.planned.at(f) : f) / end) * (width - 16));
          if (at !== x) context.fillRect((x = at), y, 1.5, high - 1);
        }
      }
    });
  };
  return <Canvas draw={draw} class="strip" label="Preemptions (red) and cache hits over the run" />;
}
