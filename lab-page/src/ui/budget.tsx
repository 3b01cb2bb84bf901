// The token budget of the step as a bar: decodes, chunks by request, unused.

import type { ReadonlySignal } from "@preact/signals";
import { ownerColor, paint } from "../colors";
import { hovered, lit, select } from "../store";
import type { View } from "../view";
import { count, plural, shortId } from "./words";

const LETTER = 7, PADDING = 6, NARROW = 960, ASIDE = 340; // pixels
const CUT = 0.4, SHARE = 0.7; // below this use, the used part takes this share of the bar

export function Budget({ view, name }: { view: ReadonlySignal<View | null>; name: string }) {
  paint.value;
  const now = view.value;
  const limit = Number(now?.recording.header?.config.max_num_batched_tokens ?? 0);
  const decodes = now ? now.recording.column("decodes", now.frame) : 0;
  const chunks = now?.work.chunks ?? [];
  const isCharged = String(now?.recording.header?.config.batching).includes("charge_cached");
  const cached = now && isCharged ? now.recording.column("cached", now.frame) : 0;
  const drafts = now?.work.drafts ?? [];
  const drafted = drafts.reduce((sum, draft) => sum + 1 + draft.count, 0);
  const computed = decodes + drafted + chunks.reduce((sum, chunk) => sum + chunk.end - chunk.start, 0);
  const used = computed + cached;
  const total = Math.max(limit, used, 1), unused = Math.max(0, limit - used);
  const numSteps = now ? now.recording.column("num_steps", now.frame) : 1;
  const isCut = used > 0 && used / total < CUT; // the unused part is drawn shorter than it is
  const scale = isCut ? SHARE / used : 1 / total;
  const width = (tokens: number) => ({ width: `${100 * tokens * scale}%` });
  const barWidth = widthOfBar(name !== "");
  const fitting = (tokens: number, ...texts: string[]) =>
    texts.find((text) => text.length * LETTER + PADDING < tokens * scale * barWidth) ?? "";
  return (
    <section class="card budget" aria-label={`Token budget of the step${name}`}>
      <h2>
        Token budget of the step
        <small>{now && `${count(used)} of ${count(limit)} tokens`}</small>
      </h2>
      <div
        class="bar" role="img"
        aria-label={`${decodes} decodes, ${drafted} tokens of drafts, ${computed - decodes - drafted} prefill tokens, ${unused} unused`}
      >
        {decodes > 0 && (
          <i class="decodes" style={width(decodes)}>{fitting(decodes, plural(decodes, "decode"), count(decodes))}</i>
        )}
        {drafts.map(({ r, count: number, right }) => {
          const id = now!.recording.entries[r].id;
          return (
            <i
              key={`draft ${r}`} class={lit.value === id ? "drafted lit" : "drafted"}
              style={{ ...width(1 + number), borderColor: ownerColor(r) }}
              title={`${id}: ${plural(number, "draft")}, ${Math.max(0, right)} right`}
              onClick={() => select(id)}
              onMouseEnter={() => (hovered.value = id)} onMouseLeave={() => (hovered.value = null)}
            >
              {fitting(1 + number, `${shortId(id)}: 1+${number}`, shortId(id))}
            </i>
          );
        })}
        {chunks.map(({ r, start, end }) => {
          const id = now!.recording.entries[r].id;
          return (
            <i
              key={r} class={lit.value === id ? "chunk lit" : "chunk"}
              style={{ ...width(end - start), background: ownerColor(r) }}
              title={`${id}: tokens [${start}, ${end})`} onClick={() => select(id)}
              onMouseEnter={() => (hovered.value = id)} onMouseLeave={() => (hovered.value = null)}
            >
              {fitting(end - start, `${shortId(id)}: ${count(end - start)}`, shortId(id))}
            </i>
          );
        })}
        {cached > 0 && (
          <i class="charged" style={width(cached)} title="This scheduler charges cached tokens too">
            {fitting(cached, `${count(cached)} cached`, count(cached))}
          </i>
        )}
        {unused > 0 && (
          <i class={isCut ? "unused cut" : "unused"} title={isCut ? "not to scale" : undefined}>
            {fitting(1 / scale - used, `${count(unused)} unused`, count(unused))}
          </i>
        )}
      </div>
      <p class="legend one-line">
        {plural(decodes, "decode")}
        {numSteps > 1 && ` × ${numSteps} steps`}
        {drafts.length > 0 && ` · ${plural(drafted - drafts.length, "draft")} of ${plural(drafts.length, "request")}`}
        {" · "}{plural(chunks.length, "prompt chunk")} {chunks.length > 0 && `(${chunkText(now!)})`}
        {cached > 0 && ` · ${count(cached)} cached tokens, charged too`}
        {" · "}{count(unused)} unused{isCut && ", not to scale"}
      </p>
    </section>
  );
}

/** About the width of the bar in pixels; half of the page if two schedulers are shown. */
function widthOfBar(isHalf: boolean): number {
  const all = window.innerWidth;
  return all < NARROW ? all - 50 : (all - ASIDE) / (isHalf ? 2 : 1) - 40;
}

function chunkText(view: View): string {
  const parts = view.work.chunks.slice(0, 6).map(
    ({ r, start, end }) => `${shortId(view.recording.entries[r].id)}: ${count(end - start)}`,
  );
  const more = view.work.chunks.length - parts.length;
  return parts.join(", ") + (more > 0 ? `, ${more} more` : "");
}
