// The summary of the run, and of the second one beside it.

import { a, b, version } from "../store";
import { figure, flatten, seconds } from "./words";

const CHIEF = [
  "steps", "seconds", "completed", "rejected", "preemptions", "recomputed_tokens", "cache_hit_ratio",
  "output_tokens_per_second", "ttft.mean", "ttft.p99", "time_between_tokens.p99", "queue_time.mean",
];
const NAMES: Record<string, string> = { seconds: "time", ttft: "TTFT" };

/** "time_between_tokens.p99" as "time between tokens, p99". */
const nameOf = (key: string): string =>
  key.split(".").map((part) => (NAMES[part] ?? part).replaceAll("_", " ")).join(", ");

function valueOf(key: string, value: number): string {
  if (/^(ttft|time_between_tokens|end_to_end|queue_time)\.|(^|\.)seconds$/.test(key)) return seconds(value);
  if (/_(share|ratio|tax)$/.test(key)) return `${figure(100 * value)} %`;
  return figure(value);
}

export function Summary() {
  version.value;
  const first = flatten(a.recording.value?.end?.summary ?? {});
  const second = new Map(flatten(b.recording.value?.end?.summary ?? {}));
  const chief = CHIEF.flatMap((name) => first.filter(([key]) => key === name));
  const others = first.filter(([key]) => !CHIEF.includes(key));
  const rejected = a.recording.value?.end?.rejected ?? [];
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
        <tr>
          <th scope="col">metric</th><th scope="col">first</th>
          {second.size > 0 && <th scope="col">second</th>}
        </tr>
      </thead>
      <tbody>
        {rows.map(([name, value]) => (
          <tr key={name}>
            <th scope="row">{nameOf(name)}</th>
            <td data-summary={name} data-value={value}>{valueOf(name, value)}</td>
            {second.size > 0 && <td>{second.has(name) ? valueOf(name, second.get(name)!) : ""}</td>}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
