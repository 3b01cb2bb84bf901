// The KV block pool as a grid: free, held, shared, cached and host blocks, coloured by owner.

import type { ReadonlySignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { color, ownerColor } from "../colors";
import { hovered, lit, select } from "../store";
import { rowOf, View } from "../view";
import { Canvas } from "./canvas";
import { Legend } from "./legend";
import { count, plural } from "./words";

interface Grid {
  size: number; // of a cell, in pixels
  columns: number;
  numDevice: number;
  hostFrom: number; // first row of host blocks
}

interface Drawn { grid: Grid; owners: Map<number, number[]>; hosts: [number, number][] }

const GAP_ROWS = 1, MAX_SHOWN = 400;
const LEGEND: [string, string][] = [
  ["held", "held"], ["shared", "shared"], ["free-cached", "cached, free"], ["free", "free"],
  ["host", "on the host"],
];

export function Blocks({ view, name }: { view: ReadonlySignal<View | null>; name: string }) {
  const now = view.value;
  const drawn = useRef<Drawn | null>(null); // by the latest draw, for the pointer
  const draw = (context: CanvasRenderingContext2D, width: number, height: number) => {
    const at = view.value, id = lit.value;
    context.clearRect(0, 0, width, height);
    if (!at) return;
    const owners = ownersOf(at), hosts = hostsOf(at);
    const grid = layout(numShown(at), hosts.length, width, height);
    drawn.current = { grid, owners, hosts };
    drawGrid(context, at, grid, owners, hosts, id === null ? -1 : (at.recording.numbers.get(id) ?? -1));
  };
  const onPoint = (x: number, y: number, kind: "move" | "click") => {
    const at = view.peek();
    if (!drawn.current || !at) return;
    const { grid, owners, hosts } = drawn.current;
    const column = Math.floor(x / grid.size), row = Math.floor(y / grid.size);
    const place = row * grid.columns + column;
    const host = (row - grid.hostFrom) * grid.columns + column;
    const holders = place < grid.numDevice ? owners.get(place) : undefined;
    const r = holders?.[0] ?? (row >= grid.hostFrom ? hosts[host]?.[1] : undefined);
    const id = r === undefined || column >= grid.columns ? null : at.recording.entries[r].id;
    if (kind === "click" && id !== null) select(id);
    else if (kind === "move") hovered.value = id;
  };
  const hasBlocks = now?.recording.header?.has_blocks !== false;
  const numbers = now && blockCounts(now);
  return (
    <section class="card blocks" aria-label={`KV blocks${name}`}>
      <h2>
        KV blocks
        <small>
          {numbers && `${count(numbers.free)} of ${count(now.recording.numBlocks)} not held`}
          {now && numShown(now) < now.recording.numBlocks && `, the first ${count(numShown(now))} shown`}
        </small>
      </h2>
      {!now ? <p class="none tall">The blocks appear with the first step.</p> : hasBlocks ? (
        <Canvas
          draw={draw} label={numbers ? describe(numbers) : "No blocks"} class="grid" onPoint={onPoint}
          onLeave={() => (hovered.value = null)}
        />
      ) : (
        <p class="none tall">
          This run was recorded without block numbers. Record with --trace-blocks to see the grid.
        </p>
      )}
      <Legend items={LEGEND} />
      <Table view={now} />
    </section>
  );
}

function Table({ view }: { view: View | null }) {
  const id = lit.value, row = view && rowOf(view, id);
  const request = row && view.state.requests.get(row.r);
  const tables: [string, number[]][] = [];
  if (request?.blocks.length) tables.push([`Blocks of ${id}`, request.blocks]);
  if (request?.host.length) tables.push([`Host blocks of ${id}`, request.host]);
  return (
    <p class="table" aria-live="off">
      {tables.length
        ? tables.map(([title, blocks]) => `${title}: ${blocks.join(" ")}`).join(". ")
        : id === null ? "Select a request to see its block table." : `${id} holds no blocks.`}
    </p>
  );
}

/** In a large pool, only blocks up to the highest one that the run uses. */
function numShown(view: View): number {
  const { numBlocks, timeline } = view.recording;
  return numBlocks <= MAX_SHOWN ? numBlocks : Math.min(numBlocks, Math.max(MAX_SHOWN, timeline.maxBlock + 1));
}

function ownersOf(view: View): Map<number, number[]> {
  const owners = new Map<number, number[]>();
  for (const [r, request] of view.state.requests) {
    for (const block of request.blocks) {
      const list = owners.get(block);
      if (list) list.push(r);
      else owners.set(block, [r]);
    }
  }
  return owners;
}

function hostsOf(view: View): [number, number][] {
  const hosts: [number, number][] = [];
  for (const [r, request] of view.state.requests) for (const block of request.host) hosts.push([block, r]);
  return hosts.sort((x, y) => x[0] - y[0]);
}

function layout(numDevice: number, numHost: number, width: number, height: number): Grid {
  for (let size = 40; size > 1; size--) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(numDevice / columns), hostFrom = rows + GAP_ROWS;
    const all = numHost ? hostFrom + Math.ceil(numHost / columns) : rows;
    if (all * size <= height) return { size, columns, numDevice, hostFrom };
  }
  const columns = Math.max(1, width);
  return { size: 1, columns, numDevice, hostFrom: Math.ceil(numDevice / columns) + GAP_ROWS };
}

function drawGrid(
  context: CanvasRenderingContext2D, view: View, grid: Grid, owners: Map<number, number[]>,
  hosts: [number, number][], chosen: number,
): void {
  const { size, columns } = grid, gap = size > 5 ? 2 : size > 2 ? 1 : 0, side = size - gap;
  const empty = color("cell"), stored = color("cached"), ink = color("ink");
  const number = (block: number, x: number, y: number, shade: string) => {
    if (size < 24) return;
    context.fillStyle = color(shade);
    context.font = "9px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText(String(block), x + 3, y + 3);
  };
  for (let block = 0; block < grid.numDevice; block++) {
    const x = (block % columns) * size, y = Math.floor(block / columns) * size;
    const holders = owners.get(block);
    const isOther = chosen >= 0 && !holders?.includes(chosen);
    context.globalAlpha = isOther && holders ? 0.3 : 1;
    if (!holders) {
      const isCached = view.state.published[block] > 0;
      context.fillStyle = isCached && size <= 8 ? stored : empty;
      context.fillRect(x, y, side, side);
      if (isCached && size > 8) drawCached(context, x, y, side, stored);
      number(block, x, y, "quiet");
      continue;
    }
    context.fillStyle = ownerColor(chosen >= 0 && !isOther ? chosen : holders[0]);
    context.fillRect(x, y, side, side);
    if (holders.length > 1) drawShared(context, x, y, side, holders);
    else if (chosen < 0 || !isOther) number(block, x, y, "on-owner");
    if (chosen >= 0 && !isOther && size > 4) {
      context.strokeStyle = ink;
      context.lineWidth = size > 10 ? 2 : 1;
      context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    }
  }
  hosts.forEach(([, r], i) => {
    const x = (i % columns) * size, y = (grid.hostFrom + Math.floor(i / columns)) * size;
    context.globalAlpha = chosen >= 0 && r !== chosen ? 0.3 : 1;
    context.strokeStyle = ownerColor(r);
    context.lineWidth = size > 5 ? 2 : 1;
    context.strokeRect(x + 1, y + 1, Math.max(1, side - 2), Math.max(1, side - 2));
  });
  context.globalAlpha = 1;
}

/** A free block with cached content: striped, as its colour says nothing about an owner. */
function drawCached(
  context: CanvasRenderingContext2D, x: number, y: number, side: number, shade: string,
): void {
  context.fillStyle = shade;
  context.beginPath();
  context.moveTo(x, y + side);
  context.lineTo(x + side, y + side);
  context.lineTo(x + side, y);
  context.fill();
}

/** A block of several requests: one half in the colour of the second, and the number of them. */
function drawShared(
  context: CanvasRenderingContext2D, x: number, y: number, side: number, holders: number[],
): void {
  context.fillStyle = ownerColor(holders[1]);
  context.beginPath();
  context.moveTo(x + side, y);
  context.lineTo(x + side, y + side);
  context.lineTo(x, y + side);
  context.fill();
  if (side < 14) return;
  context.fillStyle = color("card");
  context.font = "600 10px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(String(holders.length), x + side / 2, y + side / 2 + 0.5);
}

interface Counts { free: number; held: number; shared: number; cached: number; host: number }

function blockCounts(view: View): Counts {
  const counts: Counts = { free: view.recording.numBlocks, held: 0, shared: 0, cached: 0, host: 0 };
  const { refs, published } = view.state;
  for (let block = 0; block < view.recording.numBlocks; block++) {
    if (refs[block] > 0) counts.held++;
    if (refs[block] > 1) counts.shared++;
    if (!refs[block] && published[block]) counts.cached++;
  }
  for (const request of view.state.requests.values()) counts.host += request.host.length;
  counts.free -= counts.held;
  return counts;
}

const describe = (n: Counts): string =>
  `${plural(n.held, "block")} held, ${n.shared} of them shared; ${n.free} free, ` +
  `${n.cached} of them with cached content; ${n.host} on the host`;
