// What runs: story, workload, scheduler. Every change runs again from the start.

import { useSignal } from "@preact/signals";
import { a, b, canRun, catalog, change, load, open, runAgain, seek, selected, version, whyNot } from "../store";
import { Dial, dials, Edit, seedOf, Spec, turn, Value, withSeed } from "../spec";
import { openStory } from "./story";

export function Setup() {
  const known = catalog.value, spec = a.spec.value ?? {};
  if (!known) return null;
  return (
    <section class="setup" aria-label="Setup">
      {whyNot.value && <p class="hint">{whyNot.value}</p>}
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
          <button type="button" id="run" disabled={!a.spec.value} title="Run again (g)" onClick={runAgain}>Run</button>
          <small class="quiet"> Every change runs at once.</small>
        </p>
      </fieldset>}
    </section>
  );
}

/** What ran, where it cannot be changed: the settings in the film's header. */
function Facts() {
  version.value;
  const header = a.film.value?.header, workload = a.spec.value?.workload;
  if (!header) return null;
  return (
    <>
      {workload && <p class="workload">{workload}</p>}
      <table>
        <tbody>
          {Object.entries(header.config).map(([name, value]) => (
            <tr key={name}><th scope="row">{name}</th><td>{String(value)}</td></tr>
          ))}
        </tbody>
      </table>
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
          placeholder={spec.requests ? `${spec.requests.length} requests of the story` : spec.trace ?? ""}
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
            id="profile" value={spec.profile ?? ""}
            onChange={(event) => change({ profile: event.currentTarget.value || undefined })}
          >
            <option value="">default</option>
            {profiles.map(({ name, description }) => (
              <option key={name} value={name} title={description}>{name}</option>
            ))}
          </select>
        </label>
      </div>
      <label class="field">
        <span>Trace file</span>
        <input
          type="file" id="trace" accept=".jsonl,.gz,.json"
          onChange={(event) => {
            const file = event.currentTarget.files?.[0];
            if (!file) return;
            b.film.value = b.spec.value = a.spec.value = selected.value = null;
            seek(0);
            void load(a, { kind: "file", file });
          }}
        />
      </label>
    </>
  );
}

function Requests({ spec }: { spec: Spec }) {
  return (
    <details class="listed">
      <summary>{spec.requests!.length} requests</summary>
      <table>
        <thead><tr><th>id</th><th>arrival</th><th>prompt</th><th>output</th></tr></thead>
        <tbody>
          {spec.requests!.slice(0, 40).map((each) => (
            <tr key={each.id}>
              <td>{each.id}</td><td>{each.arrival ?? 0}</td>
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

interface SchedulerProps { spec: Spec; title: string; onChange: (changes: Partial<Spec>) => void }

function Scheduler({ spec, title, onChange }: SchedulerProps) {
  const { presets, slots, numbers } = catalog.value!, set = spec.set ?? {};
  const base = presets[spec.preset ?? ""] ?? {};
  const put = (name: string, value: Value | "") => {
    const next = { ...set };
    if (value === "" || String(base[name]) === String(value)) delete next[name];
    else next[name] = value;
    onChange({ set: next });
  };
  const isFirst = title === "Scheduler", numChanged = Object.keys(set).length;
  return (
    <div class="scheduler">
      <label class="field">
        <span>{title}</span>
        <select
          id={isFirst ? "preset" : "preset2"} value={spec.preset ?? ""}
          onChange={(event) => onChange({ preset: event.currentTarget.value })}
        >
          {!spec.preset && <option value="">as recorded</option>}
          {Object.keys(presets).map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      </label>
      <details>
        <summary>Slots and numbers{numChanged > 0 && <b> {numChanged} changed</b>}</summary>
        {Object.entries(slots).map(([slot, { help, values }]) => (
          <label class="field row2" key={slot} title={help}>
            <span>{slot}</span>
            <input
              list={`values-${slot}`} value={set[slot] ?? ""} placeholder={String(base[slot] ?? "")}
              class={slot in set ? "changed" : ""} spellcheck={false}
              title={values.map((each) => `${each.value}: ${each.help}`).join("\n")}
              onChange={(event) => put(slot, event.currentTarget.value.trim())}
            />
            {isFirst && (
              <datalist id={`values-${slot}`}>
                {values.map((each) => <option key={each.value} value={each.value}>{each.help}</option>)}
              </datalist>
            )}
          </label>
        ))}
        {Object.entries(numbers).map(([name, { low, high, default: usual, help }]) => (
          <label class="field row2" key={name} title={help}>
            <span>{name}</span>
            <input
              type="number" min={low} max={high} value={set[name] ?? ""} step="any"
              placeholder={String(base[name] ?? usual ?? "")} class={name in set ? "changed" : ""}
              onChange={(event) => {
                const text = event.currentTarget.value;
                put(name, text === "" ? "" : Number(text));
              }}
            />
          </label>
        ))}
        <label class="check">
          <input
            type="checkbox" checked={spec.async_scheduling ?? false}
            onChange={(event) => onChange({ async_scheduling: event.currentTarget.checked })}
          /> async scheduling: plan the next step while this one runs
        </label>
      </details>
    </div>
  );
}

/** A second scheduler on the same workload. */
export function toggleSecond(): void {
  const spec = a.spec.value;
  if (!spec || spec.trace || !canRun.value) return;
  const names = Object.keys(catalog.value!.presets);
  const other = names.find((name) => name !== spec.preset && name !== "static") ?? names[0];
  open(spec, b.spec.value ? null : { ...spec, preset: other });
}

function Second({ spec }: { spec: Spec }) {
  const other = b.spec.value;
  return (
    <>
      <label class="check">
        <input type="checkbox" id="compare" checked={other !== null} onChange={toggleSecond} /> compare
        with a second scheduler
      </label>
      {other && (
        <Scheduler
          spec={other} title="Second scheduler"
          onChange={(changes) => open(spec, { ...other, ...changes })}
        />
      )}
    </>
  );
}

function Edits({ spec }: { spec: Spec }) {
  const own = spec.edits ?? [], others = b.spec.value?.edits ?? [];
  const extra = others.filter((edit) => !own.some((each) => JSON.stringify(each) === JSON.stringify(edit)));
  if (!own.length && !extra.length) return null;
  const without = (target: Spec, edit: Edit): Spec => ({
    ...target, edits: target.edits?.filter((each) => JSON.stringify(each) !== JSON.stringify(edit)),
  });
  const remove = (edit: Edit) => {
    const isFork = extra.includes(edit);
    open(without(spec, edit), isFork ? null : b.spec.value && without(b.spec.value, edit));
  };
  return (
    <div class="edits">
      <h3>Changes in the middle</h3>
      <ul>
        {[...own, ...extra].map((edit) => (
          <li key={JSON.stringify(edit)}>
            <span>{editText(edit)}{extra.includes(edit) && " (second only)"}</span>
            <button type="button" class="small" onClick={() => remove(edit)} aria-label={`Remove: ${editText(edit)}`}>
              remove
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}

function editText({ step, add, abort, set }: Edit): string {
  if (add) return `step ${step}: add ${add.id} (${JSON.stringify(add.prompt)} + ${add.output} tokens)`;
  if (abort) return `step ${step}: abort ${abort}`;
  return `step ${step}: ${Object.entries(set ?? {}).map(([k, v]) => `${k} = ${v}`).join(", ")}`;
}
