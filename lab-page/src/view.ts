// What the panes show of one frame: rows of requests, the step's work, and numbers.

import { Recording, StepWork } from "./recording";
import { lastAtMost } from "./growing";
import { Blocked, DECODING, RecordedState, FINISHED, PREFILL, SWAPPED } from "./state";

export interface Row {
  r: number;
  id: string;
  status: number; // PREFILL while the step computes a part of the known tokens
  numPrompt: number;
  limit: number;
  cached: number;
  computed: number;
  generated: number;
  preemptions: number;
  numBlocks: number;
  numHost: number;
  blocked: Blocked | null;
  chunk: [number, number] | null; // tokens that the step computes
  drafts: [number, number] | null; // drafts that the step verifies, and those that were right
  finish: string | null;
}

/** Numbers of requests. Rows are made of those that are shown: a queue may be long. */
export interface Groups {
  waiting: number[]; // those that were considered first
  running: number[];
  swapped: number[];
  finished: number[]; // the latest first, at most MAX_FINISHED
}

export interface View {
  recording: Recording;
  frame: number;
  step: number;
  isAfter: boolean; // after that step: the run has ended, or the step failed
  time: number;
  state: RecordedState;
  work: StepWork;
  chunks: Map<number, [number, number]>; // tokens that the step computes, by request
  drafts: Map<number, [number, number]>; // drafts and those that were right, by request
  groups: Groups;
  counts: number[]; // of requests by state
  numFinished: number;
}

const MAX_FINISHED = 12;
const MAX_STILL = 8; // running requests that fit on the screen; of more, prefills come first

export function makeView(recording: Recording, frame: number): View {
  const state = recording.state(frame), work = recording.work(frame);
  const chunks = new Map(work.chunks.map(({ r, start, end }) => [r, [start, end] as [number, number]]));
  const drafts = new Map(work.drafts.map(({ r, count, right }) => [r, [count, right] as [number, number]]));
  const groups: Groups = { waiting: [], running: [], swapped: [], finished: [] };
  const counts = [0, 0, 0, 0, 0], rest: number[] = [], prefills: number[] = [];
  for (const [r, request] of state.requests) { // in the order of arrival
    const status = chunks.has(r) ? PREFILL : request.status;
    counts[status] += 1;
    if (status === PREFILL) prefills.push(r);
    if (status === PREFILL || status === DECODING) groups.running.push(r);
    else if (status === SWAPPED) groups.swapped.push(r);
    else (request.blocked ? groups.waiting : rest).push(r);
  }
  groups.waiting = groups.waiting.concat(rest);
  if (groups.running.length > MAX_STILL && prefills.length) {
    const first = new Set(prefills);
    groups.running = prefills.concat(groups.running.filter((r) => !first.has(r)));
  }
  const { finished, finishedAt } = recording.timeline;
  const numFinished = lastAtMost(finishedAt.length, frame, (i) => finishedAt[i]) + 1;
  for (let i = numFinished - 1; i >= Math.max(0, numFinished - MAX_FINISHED); i--) {
    groups.finished.push(finished[i]);
  }
  counts[FINISHED] = Math.max(numFinished + recording.timeline.numGone, state.numFinished);
  return {
    recording, frame, step: stepOf(recording, frame), isAfter: recording.column("step", frame) < 0,
    time: recording.planned.at(frame), state, work, chunks, drafts,
    groups, counts, numFinished: counts[FINISHED],
  };
}

/** The step of a frame; of a frame without a plan, the step before. */
export function stepOf(recording: Recording, frame: number): number {
  let at = frame;
  while (at > 0 && recording.column("step", at) < 0) at--;
  return recording.column("step", at);
}

/** The requests [from, to) of a group, as rows. */
export function rowsOf(view: View, group: keyof Groups, from: number, to: number): Row[] {
  const shown = view.groups[group].slice(from, to);
  return shown.map((r) => (group === "finished" ? finishedRow(view.recording, r) : openRow(view, r)));
}

function openRow({ recording, state, chunks, drafts }: View, r: number): Row {
  const request = state.requests.get(r)!, entry = recording.entries[r], chunk = chunks.get(r) ?? null;
  return {
    r, id: entry?.id ?? String(r), status: chunk ? PREFILL : request.status,
    numPrompt: entry?.numPrompt ?? 0, limit: entry?.limit ?? 0, cached: request.cached,
    computed: state.computed(r), generated: state.generated(r),
    preemptions: request.numPreemptions, numBlocks: request.blocks.length,
    numHost: request.host.length, blocked: request.blocked, chunk,
    drafts: drafts.get(r) ?? null, finish: null,
  };
}

function finishedRow(recording: Recording, r: number): Row {
  const entry = recording.entries[r], life = recording.timeline.lives.get(r)!, finish = life.finish!;
  const numPrompt = entry?.numPrompt ?? 0, length = numPrompt + finish.numOutput;
  return {
    r, id: entry?.id ?? String(r), status: FINISHED, numPrompt, limit: entry?.limit ?? length,
    cached: 0, computed: finish.numOutput ? length : 0, generated: finish.numOutput,
    preemptions: life.preemptions.length,
    numBlocks: 0, numHost: 0, blocked: null, chunk: null, drafts: null,
    finish: recording.header!.finish_reasons[finish.reason] ?? "",
  };
}

/** The row of a request by its id, in any group; null if it has not arrived or is long finished. */
export function rowOf(view: View, id: string | null): Row | null {
  if (id === null) return null;
  const r = view.recording.numbers.get(id);
  if (r === undefined) return null;
  if (view.state.requests.has(r)) return openRow(view, r);
  const life = view.recording.timeline.lives.get(r);
  return life?.finish && life.finish.frame <= view.frame ? finishedRow(view.recording, r) : null;
}
