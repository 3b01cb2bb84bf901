// The states of a request as a diagram. It shows the numbers at this frame and the changes of the
// step; a click explains a state and lights the requests in it.

import type { ReadonlySignal } from "@preact/signals";
import { STATES } from "../state";
import { catalog, chosenState, lit } from "../store";
import { rowOf, View } from "../view";
import { useShown } from "./shown";
import { count } from "./words";

const PLACES: Record<string, [number, number]> = {
  waiting: [62, 56], prefill: [214, 56], decoding: [366, 56], swapped: [214, 150], finished: [366, 150],
};
const WIDTH = 104, HEIGHT = 44;
interface Edge { from: string; to: string; path: string; label: string; at: [number, number] }
const EDGES: Edge[] = [
  { from: "waiting", to: "prefill", path: "M114 56H156", label: "admit", at: [136, 49] },
  { from: "prefill", to: "decoding", path: "M266 56H308", label: "done", at: [288, 49] },
  {
    from: "decoding", to: "waiting", path: "M366 34C366 2 62 2 62 28", label: "preempt, compute again",
    at: [214, 25],
  },
  { from: "decoding", to: "swapped", path: "M330 78L262 124", label: "swap out", at: [328, 108] },
  { from: "swapped", to: "prefill", path: "M206 128V84", label: "swap in", at: [180, 106] },
  { from: "decoding", to: "finished", path: "M376 78V122", label: "end", at: [391, 103] },
  { from: "prefill", to: "waiting", path: "M166 72L116 72", label: "", at: [0, 0] },
  { from: "prefill", to: "swapped", path: "M228 78V122", label: "", at: [0, 0] },
];

export function Machine({ view, name }: { view: ReadonlySignal<View | null>; name: string }) {
  const { shown, ref } = useShown(view), now = shown.value;
  const moves = now ? movesOf(now) : new Set<string>();
  const row = now && rowOf(now, lit.value), own = row ? STATES[row.status] : null;
  const chosen = chosenState.value, arrow = `arrow-${name.replace(/\W/g, "")}`;
  const meaning = chosen && (catalog.value?.states[chosen] ?? "");
  return (
    <section class="card machine" ref={ref} aria-label={`States of a request${name}`}>
      <h2>States of a request</h2>
      <svg viewBox="0 0 428 180" role="group" aria-label="State machine">
        <defs>
          <marker
            id={arrow} viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
            orient="auto-start-reverse"
          >
            <path d="M0 0L8 4L0 8z" class="head" />
          </marker>
        </defs>
        {EDGES.map(({ from, to, path, label, at }) => (
          <g key={path} class={moves.has(`${from} ${to}`) ? "edge now" : "edge"}>
            <path d={path} marker-end={`url(#${arrow})`} />
            {label && <text x={at[0]} y={at[1]}>{label}</text>}
          </g>
        ))}
        {STATES.map((state, i) => {
          const [x, y] = PLACES[state];
          const classes = ["node", state, chosen === state && "chosen", own === state && "own"];
          const toggle = () => (chosenState.value = chosen === state ? null : state);
          return (
            <g
              key={state} class={classes.filter(Boolean).join(" ")} role="button" tabIndex={0}
              aria-pressed={chosen === state} aria-label={`${state} ${count(now?.counts[i] ?? 0)} requests`}
              onClick={toggle}
              onKeyDown={(event) => {
                if (event.key !== "Enter" && event.key !== " ") return;
                event.preventDefault();
                event.stopPropagation();
                toggle();
              }}
            >
              <rect x={x - WIDTH / 2} y={y - HEIGHT / 2} width={WIDTH} height={HEIGHT} rx="8" />
              <text x={x} y={y - 4}>{state}</text>{" "}
              <text x={x} y={y + 13} class="number">{count(now?.counts[i] ?? 0)}</text>
            </g>
          );
        })}
      </svg>
      <p class="meaning">{chosen ? `${chosen}: ${meaning}` : "Click a state to see what it means."}</p>
    </section>
  );
}

/** The changes of state in a frame, as "from to". */
function movesOf(view: View): Set<string> {
  const moves = new Set<string>(), { work, recording, frame } = view;
  for (const r of [...work.admitted, ...work.preempted, ...work.finished]) {
    const life = recording.timeline.lives.get(r), i = life?.frames.indexOf(frame) ?? -1;
    if (life && i >= 0) moves.add(`${STATES[life.states[i - 1] ?? 0]} ${STATES[life.states[i]]}`);
  }
  for (const { r } of work.chunks) {
    if (view.state.requests.get(r)?.status === 2) moves.add("prefill decoding");
  }
  return moves;
}
