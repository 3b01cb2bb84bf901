// The schedulers of a run: preset, slots and numbers, a second one, and changes in the middle.

import { a, b, canRun, catalog, open } from "../store";
import type { Edit, Spec, Value } from "../spec";

interface SchedulerProps { spec: Spec; title: string; onChange: (changes: Partial<Spec>) => void }

export function Scheduler({ spec, title, onChange }: SchedulerProps) {
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
          <label class="field" key={slot} title={help}>
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

export function Second({ spec }: { spec: Spec }) {
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

export function Edits({ spec }: { spec: Spec }) {
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
            <button
              type="button" class="small" onClick={() => remove(edit)}
              aria-label={`remove: ${editText(edit)}`}
            >
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
