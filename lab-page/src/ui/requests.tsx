// The requests by state, each with its progress and, while it waits, what it needs and has.

import type { ReadonlySignal } from "@preact/signals";
import { ownerColor, paint } from "../colors";
import type { Recording } from "../recording";
import { DECODING, PREFILL, STATES, WAITING } from "../state";
import { catalog, chosenState, hovered, lateView, lit, select, selected } from "../store";
import { type Groups, type Row, rowsOf, type View } from "../view";
import { Legend } from "./legend";
import { count, MAX_ID, plural, shortId, thing } from "./words";

const MAX_DRAFTS = 8; // drawn of one request
const MAX_ROWS = 32, MAX_FIRST = 9; // rows of one group: in all, and without scrolling
const LEGEND: [string, string][] = [
  ["cached", "cached"], ["computed", "computed"], ["generated", "generated"], ["lost", "to compute again"],
];
const TITLES: Record<keyof Groups, string> = {
  running: "Running", waiting: "Waiting", swapped: "Swapped", finished: "Finished",
};
const NONE: Record<keyof Groups, string> = {
  running: "No running requests.", waiting: "No waiting requests.",
  swapped: "No swapped requests.", finished: "No finished requests.",
};

export function Requests({ view, name }: { view: ReadonlySignal<View | null>; name: string }) {
  const now = view.value;
  return (
    <section class="card requests" aria-label={`Requests${name}`}>
      <h2>Requests</h2>
      <div class="groups" style={{ "--id": `${now ? idWidth(now.recording) : 2}ch` }}>
        {(["running", "waiting", "swapped", "finished"] as const).map((group) => (
          <Group key={group} group={group} view={now} late={lateView(view)} />
        ))}
      </div>
      <Legend items={LEGEND} />
    </section>
  );
}

const widths = new WeakMap<Recording, { of: number; width: number }>();

/** The length of the longest id that is shown, so that the bars of all rows start together. */
function idWidth(recording: Recording): number {
  const known = widths.get(recording);
  if (known?.of === recording.entries.length) return known.width;
  let width = 2;
  for (const { id } of recording.entries) width = Math.max(width, Math.min(MAX_ID, id.length));
  widths.set(recording, { of: recording.entries.length, width });
  return width;
}

interface GroupProps { group: keyof Groups; view: View | null; late: ReadonlySignal<View | null> }

function Group({ group, view, late }: GroupProps) {
  const total = group === "finished" ? (view?.numFinished ?? 0) : (view?.groups[group].length ?? 0);
  const numRows = Math.min(MAX_ROWS, view?.groups[group].length ?? 0);
  return (
    <div class={`group ${group}`}>
      <h3>{TITLES[group]} <b>{total}</b></h3>
      <ul>
        {view && <Rows group={group} view={view} from={0} to={MAX_FIRST} />}
        <LateRows group={group} late={late} />
        {!total && <li class="none">{NONE[group]}</li>}
        {total > MAX_ROWS && <li class="none">and {count(total - numRows)} more</li>}
      </ul>
    </div>
  );
}

function Rows({ group, view, from, to }: { group: keyof Groups; view: View; from: number; to: number }) {
  return <>{rowsOf(view, group, from, to).map((row, i) => <Request key={i} row={row} view={view} />)}</>;
}

/** The rows that are seen after scrolling; they follow after the picture. */
function LateRows({ group, late }: { group: keyof Groups; late: ReadonlySignal<View | null> }) {
  const view = late.value;
  return view && <Rows group={group} view={view} from={MAX_FIRST} to={MAX_ROWS} />;
}

function Request({ row, view }: { row: Row; view: View }) {
  paint.value;
  const isLit = lit.value === row.id;
  const isOther = chosenState.value !== null && STATES[row.status] !== chosenState.value;
  const names = ["row", isLit && "lit", isOther && "dim", row.blocked && "blocked"];
  const classes = names.filter(Boolean).join(" ");
  return (
    <li>
      <button
        type="button" class={classes} aria-pressed={selected.value === row.id} title={titleOf(row)}
        onClick={() => select(row.id)} onMouseEnter={() => (hovered.value = row.id)}
        onMouseLeave={() => (hovered.value = null)}
      >
        <i class="chip" style={{ background: ownerColor(row.r) }} />
        <span class="id">{shortId(row.id)}</span>
        <Progress row={row} />
        <span class="note">{noteOf(row, view)}</span>
      </button>
    </li>
  );
}

/** Shares of the longest length that the request can have. One element, as there are many rows. */
export function Progress({ row }: { row: Row }) {
  const total = Math.max(1, row.limit, row.numPrompt + row.generated);
  const cached = Math.min(row.cached, row.computed);
  const prompt = Math.min(row.computed, row.numPrompt), known = row.numPrompt + row.generated;
  const output = Math.max(0, Math.min(row.computed, known) - row.numPrompt);
  const isAgain = row.status === WAITING || row.status === PREFILL;
  const parts: [string, number][] = [
    ["cached", cached], ["prefill", prompt - cached], ["cell", row.numPrompt - prompt],
    ["decoding", isAgain ? output : row.generated], ["lost", isAgain ? row.generated - output : 0],
  ];
  let place = 0;
  const stops: string[] = [];
  for (const [shade, tokens] of parts) {
    if (tokens <= 0) continue;
    const from = place;
    place += (100 * tokens) / total;
    stops.push(`var(--${shade}) ${from.toFixed(2)}% ${place.toFixed(2)}%`);
  }
  stops.push(`var(--cell) ${place.toFixed(2)}%`);
  const background = `linear-gradient(90deg, ${stops.join(", ")})`;
  return <span class="progress" aria-hidden="true" style={{ background }} />;
}

function titleOf(row: Row): string {
  return (
    `${row.id}: ${STATES[row.status]}, ${row.cached} of ${row.numPrompt} prompt tokens cached, ` +
    `${row.computed} tokens computed, ${row.generated} of ${row.limit - row.numPrompt} generated`
  );
}

function noteOf(row: Row, view: View): preact.ComponentChildren {
  if (row.finish !== null) return row.finish === "length" ? `${row.generated} tokens` : row.finish;
  if (row.blocked?.need) {
    const { reason, need, have } = row.blocked, what = thing(view.recording.header!.reasons[reason]);
    return <>needs {count(need)}<span class="unit"> {what}</span>, has {count(have)}</>;
  }
  if (row.blocked) return needOf(row, view);
  if (row.drafts) return <Drafts drafts={row.drafts} />;
  if (row.chunk) return `+${count(row.chunk[1] - row.chunk[0])} tokens`;
  if (row.status === DECODING) return `${row.generated}/${row.limit - row.numPrompt}`;
  if (row.status === PREFILL) return `${row.computed}/${row.numPrompt + row.generated}`;
  return view.state.rest ? "not considered" : "next step";
}

/** Drafts as outlined tokens; those that were right are filled. */
function Drafts({ drafts: [number, right] }: { drafts: [number, number] }) {
  const text = `${plural(number, "draft")}, ${Math.max(0, right)} right`;
  return (
    <span class="drafts" role="img" aria-label={text} title={text}>
      {Array.from({ length: Math.min(number, MAX_DRAFTS) }, (_, i) => (
        <i key={i} class={i < right ? "draft right" : "draft"} />
      ))}
      {number > MAX_DRAFTS && `+${number - MAX_DRAFTS}`}
    </span>
  );
}

/** What a waiting request needs and what was available. */
export function needOf(row: Row, view: View): string {
  const { reason, need, have } = row.blocked!, name = view.recording.header!.reasons[reason];
  return need ? `needs ${count(need)} ${thing(name)}, has ${count(have)}` : name.replaceAll("_", " ");
}

/** Why a waiting request was not admitted in this step, in a sentence. */
export function whyWaits(row: Row, view: View): string {
  const { reasons, config } = view.recording.header!, known = catalog.value;
  const fill = (texts: Record<string, string> | undefined, name: string, numbers: Record<string, unknown>) =>
    (texts?.[name] ?? name.replaceAll("_", " "))
      .replace(/\{(\w+)\}/g, (_, key: string) => String(numbers[key]));
  if (row.blocked) {
    return `Step ${view.step}: ${fill(known?.blocked, reasons[row.blocked.reason], { ...row.blocked })}.`;
  }
  const { rest } = view.state;
  if (!rest) return "The next step considers it.";
  const why = fill(known?.not_considered, reasons[rest.reason], { limit: config.max_num_seqs });
  return `Step ${view.step} did not consider it: ${why}.`;
}
