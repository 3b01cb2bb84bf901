// A story: text, a question to guess first, places to look at, and the numbers of the run.

import { signal } from "@preact/signals";
import { a, b, catalog, open, seek, seekStep, version } from "../store";
import type { Film } from "../film";
import type { Story } from "../spec";
import { figure, flatten } from "./words";

export const guess = signal<number | null>(null); // -1: shown without a guess

/** Show a story from its start. The second scheduler appears after the guess. */
export function openStory(story: Story): void {
  guess.value = null;
  open(withName(story.spec, story), story.question ? null : story.other && withName(story.other, story), 0);
}

const withName = <T extends object>(spec: T, story: Story): T => ({ ...spec, story: story.name });

export function currentStory(): Story | null {
  const name = a.spec.value?.story;
  return (name && catalog.value?.stories.find((story) => story.name === name)) || null;
}

export function StoryPanel() {
  const story = currentStory();
  if (!story) return null;
  const isOpen = guess.value !== null || !story.question;
  return (
    <section class="card story" aria-label="Story" key={story.name}>
      <h2>{story.title}</h2>
      {story.text.map((text, i) => <p key={i}>{text}</p>)}
      {story.looks.length > 0 && (
        <ol class="looks">
          {story.looks.map(({ frame, step, text }, i) => (
            <li key={i}>
              <button
                type="button"
                onClick={() => (frame !== undefined ? seek(frame) : seekStep(step ?? 0))}
              >
                <span class="when">{frame !== undefined ? `frame ${frame}` : `step ${step ?? 0}`}</span>
                <span>{text}</span>
              </button>
            </li>
          ))}
        </ol>
      )}
      {story.question && <Question story={story} />}
      {isOpen && <Numbers story={story} />}
    </section>
  );
}

function Question({ story }: { story: Story }) {
  const { text, choices, answer, why } = story.question!, chosen = guess.value;
  const choose = (i: number) => {
    guess.value = i;
    if (story.other && !b.spec.value) open(a.spec.value!, withName(story.other, story));
  };
  return (
    <div class="question">
      <p><b>Guess first.</b> {text}</p>
      <div class="choices" role="group" aria-label="Choices">
        {choices.map((choice, i) => (
          <button
            key={choice} type="button" disabled={chosen !== null} aria-pressed={chosen === i}
            class={chosen === null ? "" : i === answer ? "right" : chosen === i ? "wrong" : ""}
            onClick={() => choose(i)}
          >
            {chosen !== null && (i === answer ? "✓ " : chosen === i ? "✗ " : "")}{choice}
          </button>
        ))}
        {chosen === null && (
          <button type="button" class="plain" onClick={() => choose(-1)}>Show the answer</button>
        )}
      </div>
      <div role="status">
        {chosen !== null && chosen >= 0 && chosen !== answer && <p class="wrong">{why[chosen]}</p>}
        {chosen !== null && <p class="right">{why[answer]}</p>}
      </div>
    </div>
  );
}

function metric(film: Film | null, name: string): number | null {
  const found = flatten(film?.end?.summary ?? {}).find(([key]) => key === name);
  return found ? found[1] : null;
}

function Numbers({ story }: { story: Story }) {
  version.value;
  if (!story.numbers.length) return null;
  return (
    <dl class="numbers">
      {story.numbers.map(({ label, metric: name, unit }) => {
        const isOther = name.startsWith("other."), film = isOther ? b.film.value : a.film.value;
        const value = metric(film, isOther ? name.slice(6) : name);
        return (
          <div key={label + name}>
            <dt>{label}</dt>
            <dd data-metric={name} data-value={value ?? ""}>
              {value === null ? "…" : figure(value)} {unit ?? ""}
            </dd>
          </div>
        );
      })}
    </dl>
  );
}

const CHIEF = [
  "steps", "seconds", "completed", "rejected", "preemptions", "output_tokens_per_second", "ttft.p50",
  "ttft.p99", "tpot.p50", "recompute_tax",
];

/** The summary of the run, and of the second one beside it. */
export function Summary() {
  version.value;
  const first = flatten(a.film.value?.end?.summary ?? {}), second = new Map(flatten(b.film.value?.end?.summary ?? {}));
  const chief = CHIEF.flatMap((name) => first.filter(([key]) => key === name));
  const others = first.filter(([key]) => !CHIEF.includes(key));
  const rejected = a.film.value?.end?.rejected ?? [];
  return (
    <section class="card summary" aria-label="Result of the run">
      <h2>Result of the run</h2>
      {first.length ? <Table rows={chief.length ? chief : others} second={second} /> : (
        <p class="none">The result appears when the run has ended.</p>
      )}
      {rejected.length > 0 && (
        <details>
          <summary>{rejected.length} rejected</summary>
          <ul>{rejected.slice(0, 50).map(([id, why]) => <li key={id}>{id}: {why}</li>)}</ul>
        </details>
      )}
      {chief.length > 0 && others.length > 0 && (
        <details>
          <summary>All numbers</summary>
          <Table rows={others} second={second} />
        </details>
      )}
    </section>
  );
}

function Table({ rows, second }: { rows: [string, number][]; second: Map<string, number> }) {
  return (
    <table>
      <thead class={second.size ? "" : "unseen"}>
        <tr><th scope="col">metric</th><th scope="col">first</th>{second.size > 0 && <th scope="col">second</th>}</tr>
      </thead>
      <tbody>
        {rows.map(([name, value]) => (
          <tr key={name}>
            <th scope="row">{name.replaceAll("_", " ")}</th>
            <td data-summary={name} data-value={value}>{figure(value)}</td>
            {second.size > 0 && <td>{second.has(name) ? figure(second.get(name)!) : ""}</td>}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
