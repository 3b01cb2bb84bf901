// A story: text, a question to guess first, steps to look at, and the numbers of its runs.

import { signal } from "@preact/signals";
import { stream } from "../api";
import { Recording } from "../recording";
import { hasOtherRequests, type Look, type Spec, type Story, type StoryNumber } from "../spec";
import { a, b, canRun, catalog, guess, open, seekIn, seekStep, selected, Side, sync, version } from "../store";
import { Prose } from "./prose";
import { Stories } from "./setup";
import { fixed } from "./words";

const hidden = signal<Record<string, Record<string, number | null>>>({}); // numbers of runs not shown
const asked = new Set<string>();

/** Show a story from its start. The second run appears after the guess. */
export function openStory(story: Story): void {
  guess.value = selected.value = null;
  sync.value = story.sync;
  open(story.spec, story.question ? null : story.other, 0);
}

export function currentStory(): Story | null {
  const name = a.spec.value?.story?.split("/")[0];
  return (name && catalog.value?.stories.find((story) => story.name === name)) || null;
}

const runsOf = (story: Story): [string, Spec][] => [
  ["spec", story.spec],
  ...(story.other ? [["other", story.other] as [string, Spec]] : []),
  ...Object.entries(story.more ?? {}),
];

/** Which of the story's runs a side shows. */
function runOf(side: Side): string | null {
  const reference = side.spec.value?.story;
  return reference ? (reference.split("/")[1] ?? "spec") : null;
}

export function StoryPanel() {
  const story = currentStory();
  if (!catalog.value?.stories.length) return null;
  if (!story) return <section class="card story" aria-label="Story"><Stories /></section>;
  const isOpen = guess.value !== null || !story.question;
  return (
    <section class="card story" aria-label="Story">
      <Stories />
      {!isOpen && <p><Prose text={beginning(story.text[0] ?? "")} /></p>}
      {story.question && <Question story={story} />}
      {isOpen && story.text.map((text, i) => <p key={i}><Prose text={text} /></p>)}
      {isOpen && story.looks.length > 0 && <Looks story={story} />}
      {isOpen && <Numbers story={story} />}
      {isOpen && runsOf(story).length > 1 && <Runs story={story} />}
    </section>
  );
}

/** The first two sentences: what runs. The others tell what comes out. */
const beginning = (text: string): string => text.split(/(?<=[.!?])\s+/).slice(0, 2).join(" ");

function Looks({ story }: { story: Story }) {
  return (
    <ol class="looks" aria-label="Steps to look at">
      {story.looks.map((look, i) => (
        <li key={i}>
          <button type="button" onClick={() => lookAt(story, look)}>
            <span class="when">
              step {look.step}
              {look.run && look.run !== "spec" && <>, {lookRun(story, look.run)}</>}
            </span>
            <Prose text={look.text} />
          </button>
        </li>
      ))}
    </ol>
  );
}

function lookRun(story: Story, run: string): string {
  const spec = runsOf(story).find(([name]) => name === run)?.[1];
  return spec ? runText(story, run, spec) : run;
}

/** Go to a step of one of the story's runs; show the run first, if it is not there. */
function lookAt(story: Story, { step, run }: Look): void {
  const name = run ?? "spec", spec = runsOf(story).find(([each]) => each === name)?.[1];
  if (name === runOf(a)) seekStep(step);
  else if (name === runOf(b) && b.recording.value) seekIn(b.recording.value, b.recording.value.frameOfStep(step));
  else if (spec && canRun.value) open(a.spec.value!, spec, step);
}

function Runs({ story }: { story: Story }) {
  const runs = runsOf(story);
  const choose = (isFirst: boolean, name: string) => {
    const spec = runs.find(([each]) => each === name)?.[1] ?? null;
    if (isFirst) open(spec!, b.spec.value);
    else open(a.spec.value!, spec);
  };
  const picker = (side: Side, label: string, isFirst: boolean) => (
    <label class="field">
      <span>{label}</span>
      <select
        disabled={!canRun.value} value={runOf(side) ?? ""}
        onChange={(event) => choose(isFirst, event.currentTarget.value)}
      >
        {!isFirst && <option value="">none</option>}
        {runs.map(([name, spec]) => <option key={name} value={name}>{runText(story, name, spec)}</option>)}
      </select>
    </label>
  );
  return <div class="runs">{picker(a, "First run", true)}{picker(b, "Second run", false)}</div>;
}

/** A run by its name, or by what differs from the story's first run. */
function runText(story: Story, name: string, spec: Spec): string {
  if (name !== "spec" && name !== "other") return name.replaceAll("_", " ");
  const against = name === "spec" ? story.other?.set : story.spec.set;
  const changes = Object.entries(spec.set ?? {}).filter(([key, value]) => against?.[key] !== value);
  const preset = spec.preset ?? "headway", isSame = (story.other?.preset ?? "headway") === story.spec.preset;
  const names = changes.map(([key, value]) => `${key} ${value}`);
  if (name === "other" && hasOtherRequests(spec, story.spec)) names.push("other requests");
  return (isSame && names.length ? names : [preset, ...names]).join(", ");
}

function Question({ story }: { story: Story }) {
  const { text, choices, answer, why } = story.question!, chosen = guess.value;
  const choose = (i: number) => {
    guess.value = i;
    if (story.other && !b.spec.value && canRun.value) open(a.spec.value!, story.other);
  };
  return (
    <div class="question">
      <p><b>Guess first.</b> <Prose text={text} /></p>
      <div class="choices" role="group" aria-label="Choices">
        {choices.map((choice, i) => (
          <button
            key={choice} type="button" disabled={chosen !== null} aria-pressed={chosen === i}
            class={chosen === null ? "" : i === answer ? "right" : chosen === i ? "wrong" : ""}
            onClick={() => choose(i)}
          >
            {chosen !== null && (i === answer ? "✓ " : chosen === i ? "✗ " : "")}<Prose text={choice} />
          </button>
        ))}
        {chosen === null && (
          <button type="button" class="plain" onClick={() => choose(-1)}>Show the answer</button>
        )}
      </div>
      <div role="status">
        {chosen !== null && chosen >= 0 && chosen !== answer && <p class="wrong"><Prose text={why[chosen]} /></p>}
        {chosen !== null && <p class="right"><Prose text={why[answer]} /></p>}
      </div>
    </div>
  );
}

/** The numbers of a run: from its recording, or from a run in the background. */
function numbersOf(story: Story, run: string): Record<string, number | null> {
  for (const side of [a, b]) {
    const isShown = side.spec.value?.story?.split("/")[0] === story.name && runOf(side) === run;
    if (isShown && side.recording.value?.end) return side.recording.value.end.numbers ?? {};
    if (isShown) return {};
  }
  const key = `${story.name}/${run}`, spec = runsOf(story).find(([name]) => name === run)?.[1];
  if (spec && canRun.value && !asked.has(key)) {
    asked.add(key);
    const recording = new Recording();
    void stream({ kind: "spec", spec }, recording, new AbortController().signal, () => {}).then(
      () => (hidden.value = { ...hidden.peek(), [key]: recording.end?.numbers ?? {} }),
      () => asked.delete(key),
    );
  }
  return hidden.value[key] ?? {};
}

function valueOf(story: Story, number: StoryNumber): number | null {
  const value = numbersOf(story, number.run ?? "spec")[number.label] ?? null;
  if (value === null) return null;
  const divisor = number.per ? numbersOf(story, number.per)[number.label] : 1;
  return divisor ? (value / divisor) * (number.scale ?? 1) : null;
}

function Numbers({ story }: { story: Story }) {
  version.value;
  if (!story.numbers.length) return null;
  return (
    <dl class="numbers">
      {story.numbers.map((number) => {
        const value = valueOf(story, number), digits = number.digits ?? 0;
        if (value === null && !canRun.value) return null; // its run is not in the exported file
        const shown = value === null ? "…" : fixed(value, digits);
        return (
          <div key={number.label}>
            <dt>{number.label}</dt>
            <dd data-metric={number.label} data-value={value === null ? "" : value.toFixed(digits)}>
              {shown} {number.unit ?? ""}
            </dd>
          </div>
        );
      })}
    </dl>
  );
}
