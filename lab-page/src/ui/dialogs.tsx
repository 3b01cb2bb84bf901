// Dialogs: add a request, fork with another policy, import own policies, help.

import { signal, useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { KEYS } from "../keys";
import {
  a, answer, asked, canEdit, catalog, edit, editStep, fork, isHelpOpen, whyNoEdit,
} from "../store";

export const isAdding = signal(false), isForking = signal(false);
const isAsking = {
  get value() { return asked.value.length > 0; },
  set value(_: boolean) { void answer(false); }, // closed without an answer
};

interface DialogProps {
  isOpen: { value: boolean };
  title: string;
  children: preact.ComponentChildren;
}

function Dialog({ isOpen, title, children }: DialogProps) {
  const ref = useRef<HTMLDialogElement>(null), on = isOpen.value;
  useLayoutEffect(() => {
    const dialog = ref.current!;
    if (on && !dialog.open) dialog.showModal();
    else if (!on && dialog.open) dialog.close();
  }, [on]);
  const close = () => (isOpen.value = false);
  return (
    <dialog
      ref={ref} aria-label={title} onClose={close}
      onClick={(event) => event.target === ref.current && close()}
    >
      {on && (
        <div class="dialog">
          <h2>{title}<button type="button" class="close" aria-label="Close" onClick={close}>×</button></h2>
          {children}
        </div>
      )}
    </dialog>
  );
}

export function Dialogs() {
  return (
    <>
      <Dialog isOpen={isAdding} title="Add a request"><AddForm /></Dialog>
      <Dialog isOpen={isForking} title="Fork here"><ForkForm /></Dialog>
      <Dialog isOpen={isAsking} title="Import own policies?"><Import /></Dialog>
      <Dialog isOpen={isHelpOpen} title="Keys"><Help /></Dialog>
    </>
  );
}

function Import() {
  return (
    <>
      <p>This run names policies that are not ready-made. To run it, the lab imports their modules:</p>
      <ul class="own">{asked.value.map((name) => <li key={name}><code>{name}</code></li>)}</ul>
      <p>This executes their code on this machine. Import only code that you trust.</p>
      <p class="submit">
        <button type="button" onClick={() => void answer(false)}>Do not import</button>{" "}
        <button type="button" onClick={() => void answer(true)}>Import and run</button>
      </p>
    </>
  );
}

function freeId(): string {
  const ids = new Set(a.recording.value?.entries.map((entry) => entry.id));
  for (let i = 1; ; i++) if (!ids.has(`new${i}`)) return `new${i}`;
}

function AddForm() {
  const id = useSignal(freeId()), prompt = useSignal(64), output = useSignal(32), priority = useSignal(0);
  const numbers = [
    ["prompt tokens", prompt, 1], ["output tokens", output, 1],
    ["priority (lower runs first)", priority, -1000],
  ] as const;
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        isAdding.value = false;
        const more = priority.value ? { priority: priority.value } : {};
        edit({ add: { id: id.value, prompt: prompt.value, output: output.value, ...more } });
      }}
    >
      <p>The request arrives before step {editStep()}. The workload runs again with it.</p>
      <label class="field"><span>id</span>
        <input
          autofocus value={id.value} required onInput={(event) => (id.value = event.currentTarget.value)}
        />
      </label>
      {numbers.map(([label, value, low]) => (
        <label class="field" key={label}><span>{label}</span>
          <input
            type="number" min={low} max={1_000_000} required value={value.value}
            onInput={(event) => (value.value = Number(event.currentTarget.value))}
          />
        </label>
      ))}
      <Submit text="Add and run" />
    </form>
  );
}

function ForkForm() {
  const { slots, numbers } = catalog.value!, names = [...Object.keys(slots), ...Object.keys(numbers)];
  const name = useSignal("victim" in slots ? "victim" : names[0]), value = useSignal("");
  const config = a.recording.value?.header?.config ?? {}, options = slots[name.value]?.values;
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        isForking.value = false;
        const text = value.value.trim();
        fork({ [name.value]: options ? text : Number(text) });
      }}
    >
      <p>
        From step {editStep()} on, a second scheduler runs with this change. Both are the same before.
      </p>
      <label class="field"><span>slot or number</span>
        <select
          autofocus value={name.value}
          onChange={(event) => { name.value = event.currentTarget.value; value.value = ""; }}
        >
          {names.map((each) => <option key={each} value={each}>{each}</option>)}
        </select>
        {slots[name.value]?.help && <small class="quiet">{slots[name.value].help}.</small>}
      </label>
      <label class="field"><span>new value (now {String(config[name.value] ?? "default")})</span>
        <input
          list={options ? "fork-values" : undefined} type={options ? "text" : "number"} required
          value={value.value} onInput={(event) => (value.value = event.currentTarget.value)}
        />
        {options && (
          <datalist id="fork-values">
            {options.map((each) => <option key={each.value} value={each.value}>{each.help}</option>)}
          </datalist>
        )}
      </label>
      {options && (
        <ul class="options">
          {options.map((each) => (
            <li key={each.value}>
              <button
                type="button" aria-pressed={value.value === each.value}
                onClick={() => (value.value = each.value)}
              >
                <b>{each.value}</b> {each.help}
              </button>
            </li>
          ))}
        </ul>
      )}
      <Submit text="Fork" />
    </form>
  );
}

function Submit({ text }: { text: string }) {
  return (
    <p class="submit">
      <button type="submit" class="main" disabled={!canEdit.value}>{text}</button>
      {!canEdit.value && <span class="quiet"> {whyNoEdit.value}</span>}
    </p>
  );
}

function Help() {
  return (
    <dl class="keys">
      {KEYS.map(([keys, text]) => (
        <div key={text}>
          <dt>{keys.split(" ").map((key) => <kbd key={key}>{key}</kbd>)}</dt><dd>{text}</dd>
        </div>
      ))}
    </dl>
  );
}
