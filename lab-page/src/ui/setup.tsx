// What runs: story, workload, scheduler. Every change runs again from the start.

import { useSignal } from "@preact/signals";
import {
  a, b, canRun, catalog, change, load, open, runAgain, seek, selected, version, whyNot,
} from "../store";
import { Dial, dials, seedOf, Spec, turn, withSeed } from "../spec";
import { Edits, Scheduler, Second } from "./scheduler";
import { Prose } from "./prose";
import { openStory } from "./story";
import { plural } from "./words";

export function Setup() {
  const known = catalog.value, spec = a.spec.value ?? {};
  if (!known) return null;
  return (
    <section class="setup" aria-label="Setup">
      {whyNot.value && <p class="hint"><Prose text={whyNot.value} /></p>}
      {!canRun.value ? <Facts /> : <fieldset>
        <legend class="unseen">Run</legend>
        <Workload spec={spec} />
        {spec.trace ? (
          <p class="hint">
            A recorded run keeps its scheduler. Press Fork to change a policy from a step on.
          </p>
        ) : (
          <>
            <Scheduler spec={spec} title="Scheduler" onChange={(changes) => change(changes)} />
            <Second spec={spec} />
          </>
        )}
        <Edits spec={spec} />
        <p class="submit">
          <button type="button" id="run" disabled={!a.spec.value} title="Run again (g)" onClick={runAgain}>
            Run
          </button>
          <small class="quiet"> Every change runs at once.</small>
        </p>
      </fieldset>}
    </section>
  );
}

/** What ran, where it cannot be changed: the settings in the recording's header. */
function Facts() {
  version.value;
  const header = a.recording.value?.header, workload = a.spec.value?.workload;
  if (!header) return null;
  return (
    <>
      {workload && <p class="workload">{workload}</p>}
      <dl class="facts">
        {Object.entries(header.config).map(([name, value]) => (
          <div key={name}><dt>{name}</dt><dd>{String(value)}</dd></div>
        ))}
      </dl>
    </>
  );
}

export function Stories() {
  const stories = catalog.value?.stories ?? [];
  if (!stories.length) return null;
  return (
    <label class="field">
      <span>Story</span>
      <select
        id="story" disabled={!canRun.value} value={a.spec.value?.story ?? ""}
        onChange={(event) => {
          const story = stories.find(({ name }) => name === event.currentTarget.value);
          if (story) openStory(story);
          else change({ story: undefined });
        }}
      >
        <option value="">None: a workload of your own</option>
        {[...new Set(stories.map(({ lesson }) => lesson ?? "Stories"))].map((lesson) => (
          <optgroup key={lesson} label={lesson}>
            {stories.filter((story) => (story.lesson ?? "Stories") === lesson).map(({ name, title }) => (
              <option key={name} value={name}>{title}</option>
            ))}
          </optgroup>
        ))}
      </select>
    </label>
  );
}

function Workload({ spec }: { spec: Spec }) {
  const { profiles, traces } = catalog.value!;
  const text = useSignal<string | null>(null); // while a slider is moved
  const shown = text.value ?? spec.workload ?? "";
  const run = (workload: string) => {
    text.value = selected.value = null;
    if (workload.trim()) change({ workload, requests: undefined, trace: undefined, story: undefined });
  };
  return (
    <>
      {traces.length > 0 && (
        <label class="field">
          <span>Recorded run</span>
          <select
            value={spec.trace ?? ""}
            onChange={(event) => {
              const trace = event.currentTarget.value;
              if (trace) open({ trace }, null, 0);
              else open(catalog.value!.default, null, 0);
            }}
          >
            <option value="">None</option>
            {traces.map(({ name, title }) => <option key={name} value={name}>{title || name}</option>)}
          </select>
        </label>
      )}
      <label class="field">
        <span>Workload</span>
        <textarea
          id="workload" rows={3} spellcheck={false} value={shown}
          placeholder={spec.requests ? `${plural(numRequests(spec), "request")} of the story` : spec.trace ?? ""}
          onChange={(event) => run(event.currentTarget.value)}
        />
      </label>
      <div class="dials">
        {dials(shown).map((each, i) => (
          <Slider
            key={`${i} ${each.label}`} dial={each}
            onMove={(value) => (text.value = turn(shown, each, value))}
            onEnd={() => run(text.value ?? shown)}
          />
        ))}
      </div>
      {spec.requests && <Requests spec={spec} />}
      <div class="pair">
        <label class="field">
          <span>Seed</span>
          <input
            id="seed" type="number" min="0" value={seedOf(shown)} disabled={!spec.workload}
            onChange={(event) => run(withSeed(shown, Number(event.currentTarget.value)))}
          />
        </label>
        <label class="field">
          <span>Hardware</span>
          <select
            id="profile" value={spec.profile ?? catalog.value!.default.profile}
            onChange={(event) => change({ profile: event.currentTarget.value })}
          >
            {profiles.map(({ name, description }) => (
              <option key={name} value={name} title={description}>{name}</option>
            ))}
          </select>
        </label>
      </div>
      <label class="field">
        <span>Trace file</span>
        <input
          type="file" id="trace" accept=".jsonl,.json"
          onChange={(event) => {
            const file = event.currentTarget.files?.[0];
            if (file) void openFile(file);
          }}
        />
      </label>
    </>
  );
}

/** Show a trace of this machine. The lab keeps it, so that it can be forked. */
async function openFile(file: File): Promise<void> {
  const before = a.spec.value;
  b.abort?.abort();
  b.recording.value = b.spec.value = selected.value = null;
  a.spec.value = { trace: file.name };
  seek(0);
  if (!(await load(a, { kind: "file", file }))) {
    a.spec.value = before;
    return;
  }
  const { traces } = catalog.value!, others = traces.filter(({ name }) => name !== file.name);
  catalog.value = { ...catalog.value!, traces: [...others, { name: file.name, title: file.name }] };
}

const numRequests = (spec: Spec): number =>
  spec.requests!.reduce((sum, { count }) => sum + (count ?? 1), 0);

function Requests({ spec }: { spec: Spec }) {
  return (
    <details class="listed">
      <summary>{plural(numRequests(spec), "request")}</summary>
      <table>
        <thead><tr><th>id</th><th>arrival (s)</th><th>prompt</th><th>output</th></tr></thead>
        <tbody>
          {spec.requests!.slice(0, 40).map((each) => (
            <tr key={each.id}>
              <td>{each.id}{(each.count ?? 1) > 1 && ` × ${each.count}`}</td>
              <td>{each.arrival ?? 0}{each.every ? ` + ${each.every}` : ""}</td>
              <td>{JSON.stringify(each.prompt)}</td><td>{each.output}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}

interface SliderProps { dial: Dial; onMove: (value: number) => void; onEnd: () => void }

function Slider({ dial, onMove, onEnd }: SliderProps) {
  return (
    <label class="dial">
      <span>{dial.label}</span>
      <input
        type="range" min={dial.step < 1 ? dial.step : 1} max={Math.max(dial.max, dial.value)} step={dial.step}
        value={dial.value} onInput={(event) => onMove(Number(event.currentTarget.value))} onChange={onEnd}
      />
      <output>{dial.value}</output>
    </label>
  );
}
