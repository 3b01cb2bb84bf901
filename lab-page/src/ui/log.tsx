// What the scheduler decided up to this frame, newest first; and the decisions of one request.

import type { ReadonlySignal } from "@preact/signals";
import { hovered, isLive, lit, onlySelected, seekIn, select, selected, viewA } from "../store";
import { STATES, SWAPPED, WAITING } from "../state";
import { canEdit, catalog, edit, whyNoEdit } from "../store";
import { rowOf, Row, stepOf, View } from "../view";
import { needOf, Progress, whyWaits } from "./requests";
import { useShown } from "./shown";
import { count, MAX_ID, plural, seconds, shortId, thing } from "./words";

const MAX_SHOWN = 36;

export function Log({ view, name }: { view: ReadonlySignal<View | null>; name: string }) {
  const { shown, ref } = useShown(view), now = shown.value, id = selected.value;
  const r = onlySelected.value && id !== null ? (now?.recording.numbers.get(id) ?? -2) : -1;
  const found = now && r !== -2 ? now.recording.latestTexts(now.frame, MAX_SHOWN, r) : [];
  return (
    <section class="card log" ref={ref} aria-label={`Decisions${name}`}>
      <h2>
        Decisions
        <label class="tools">
          <input
            type="checkbox" checked={onlySelected.value} disabled={id === null}
            onChange={(event) => (onlySelected.value = event.currentTarget.checked)}
          /> of the selected request
        </label>
      </h2>
      {now && <p class="work">{workOf(now)}</p>}
      <Sentences view={now} found={found} none={noneText(now, r)} />
    </section>
  );
}

/** What the step computes, in a sentence. */
function workOf({ recording, frame, step, isAfter, work }: View): string {
  if (isAfter) return `Step ${count(step)} has ended. Nothing is planned.`;
  const decodes = recording.column("decodes", frame), tokens = recording.column("prefill", frame);
  const parts = [
    decodes > 0 && plural(decodes, "decode"),
    work.drafts.length > 0 && draftsOf(work.drafts),
    tokens > 0 && `${plural(tokens, "token")} of ${plural(work.chunks.length, "prompt")}`,
    work.preempted.length > 0 && plural(work.preempted.length, "preemption"),
  ].filter(Boolean);
  const took = recording.ended.at(frame) - recording.started.at(frame);
  return `Step ${count(step)}: ${parts.join(", ") || "no work"}${took > 0 ? `; takes ${seconds(took)}` : ""}.`;
}

function draftsOf(drafts: View["work"]["drafts"]): string {
  const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);
  const right = sum(drafts.map((draft) => Math.max(0, draft.right)));
  return `${plural(sum(drafts.map((draft) => draft.count)), "draft")}, ${right} right`;
}

function noneText(view: View | null, r: number): string {
  if (view && r !== -1) return "No decisions about the selected request up to this step.";
  if (view) return "No decisions up to this step. Press → to run the next one.";
  return isLive.value
    ? "The server has not run a step since this page was opened. Send it a request to see its decisions."
    : "The decisions appear here when the run starts.";
}

const sentence = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);

function Sentences({ view, found, none }: { view: View | null; found: number[]; none: string }) {
  if (!view || !found.length) return <p class="none">{none}</p>;
  return (
    <ol class="sentences">
      {found.map((i, place) => {
        const { frame, kind, request, text } = view.recording.text(i);
        const id = request >= 0 ? view.recording.entries[request]?.id : undefined;
        const classes = [kind, frame === view.frame && "now", id !== undefined && id === lit.value && "lit"];
        return (
          <li key={place} class={classes.filter(Boolean).join(" ")}>
            <button
              type="button" title={id && id.length > MAX_ID ? text : undefined}
              onClick={() => {
                seekIn(view.recording, frame);
                if (id !== undefined && selected.value !== id) select(id);
              }}
              onMouseEnter={() => (hovered.value = id ?? null)} onMouseLeave={() => (hovered.value = null)}
            >
              <span class="when">{stepOf(view.recording, frame)}</span>
              <span>{sentence(id ? text.replace(id, shortId(id)) : text)}</span>
            </button>
          </li>
        );
      })}
    </ol>
  );
}

/** "Why?": the state of the selected request, its latest sentence, and what it needs. */
export function Why({ view, name }: { view: ReadonlySignal<View | null>; name: string }) {
  const { shown, ref } = useShown(view), now = shown.value, id = selected.value;
  const row = now && rowOf(now, id);
  return (
    <section
      class={row ? "card why" : "card why empty"} ref={ref} aria-label={`Why${name}`}
      id={name ? undefined : "why"}
    >
      <h2>
        Why?
        {row && <small title={row.id}>{shortId(row.id)}, step {now.step}</small>}
      </h2>
      {row ? <Answer row={row} view={now} /> : (
        <p class="none">
          {id === null
            ? "Select a request, in any pane, to see why it is in its state."
            : `Request ${id} has not arrived by this frame.`}
        </p>
      )}
    </section>
  );
}

function Answer({ row, view }: { row: Row; view: View }) {
  const { recording } = view, entry = recording.entries[row.r], state = STATES[row.status];
  const history = recording.latestTexts(view.frame, 30, row.r);
  const latest = history.length ? `${sentence(recording.text(history[0]).text)}.` : "";
  const { blocked } = row, isWaiting = row.status === WAITING || row.status === SWAPPED;
  return (
    <>
      <p class="answer">
        <b class={`state ${state}`}>{state}</b>{" "}
        {isWaiting ? whyWaits(row, view) : latest}
      </p>
      <Progress row={row} />
      {blocked && blocked.need > 0 && <NeedHave row={row} view={view} />}
      {isWaiting && latest && <p>Latest decision: {latest}</p>}
      <p class="quiet">{catalog.value?.states[state]}</p>
      <dl>
        <dt>prompt</dt><dd>{plural(row.numPrompt, "token")}, {count(row.cached)} cached</dd>
        <dt>computed</dt><dd>{count(row.computed)}</dd>
        <dt>generated</dt><dd>{count(row.generated)} of {count(row.limit - row.numPrompt)}</dd>
        <dt>blocks</dt><dd>{count(row.numBlocks)}{row.numHost > 0 && `, ${row.numHost} on the host`}</dd>
        <dt>preemptions</dt><dd>{row.preemptions}</dd>
        <dt>arrival</dt><dd>{seconds(entry.arrival)}</dd>
        {entry.priority !== 0 && <><dt>priority</dt><dd>{entry.priority}</dd></>}
        {entry.client && <><dt>client</dt><dd>{entry.client}</dd></>}
        {entry.parent && <><dt>sample of</dt><dd>{entry.parent}</dd></>}
      </dl>
      {row.finish === null && view === viewA.value && (
        <button
          type="button" class="small" disabled={!canEdit.value}
          title={canEdit.value ? "Run again; the request is aborted before the next step" : whyNoEdit.value}
          onClick={() => edit({ abort: row.id })}
        >
          Abort {shortId(row.id)} here
        </button>
      )}
      <Sentences view={view} found={history} none="" />
    </>
  );
}

function NeedHave({ row, view }: { row: Row; view: View }) {
  const { need, have, reason } = row.blocked!, most = Math.max(need, have, 1);
  const what = thing(view.recording.header!.reasons[reason]);
  const width = (n: number) => ({ width: `${(100 * Math.max(0, n)) / most}%` });
  return (
    <div class="need" role="img" aria-label={needOf(row, view)}>
      <span>needs</span><i><u class="wanted" style={width(need)} /></i><b>{count(need)} {what}</b>
      <span>has</span><i><u class="there" style={width(have)} /></i><b>{count(have)}</b>
    </div>
  );
}
