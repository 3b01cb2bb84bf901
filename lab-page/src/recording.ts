// Reads a recording: the numbers of every frame, and the state at any of them.
// The same as headway/lab/recording/reader.py. Frames are kept as the bytes that arrived; numbers that
// charts and searches need are also in columns that grow. Sentences are parsed when they are shown.

import { Growing, join, lastAtMost } from "./growing";
import { RecordedState, nextOp, OP } from "./state";
import { Timeline } from "./timeline";

const HEADER = 1, CHUNK = 2, END = 3, IDLE = 4;
const VERSION = 2;
const NUM_PARSED = 12; // chunks whose sentences stay parsed

export interface Header {
  recording: number;
  config: Record<string, string | number | null>;
  columns: string[];
  reasons: string[];
  finish_reasons: string[];
  marks: Record<string, number>;
  async_scheduling?: boolean;
  profile?: string;
  title?: string;
  source?: string;
  has_blocks?: boolean;
  is_redacted?: boolean;
  notice?: string; // why a recorded run is shown from its lines alone
  own?: string[]; // policies of other modules, because of which it is
}

export interface End {
  summary?: Record<string, unknown>;
  rejected?: [string, string][];
  numbers?: Record<string, number | null>; // of the story that the run belongs to, by label
  error?: string;
}

export interface Entry {
  id: string;
  numPrompt: number;
  limit: number; // length at which it ends
  arrival: number;
  maxTokens: number | null;
  priority: number;
  client: string;
  parent: string | null;
}

export interface Text {
  frame: number;
  kind: string;
  request: number; // -1: of no single request
  text: string;
}

/** What one step does, besides the state that it leaves. */
export interface StepWork {
  chunks: { r: number; start: number; end: number }[];
  drafts: { r: number; count: number; right: number }[]; // right -1: the request or the step failed
  admitted: number[];
  preempted: number[];
  added: number[];
  finished: number[];
  deferred: number[];
  joined: Set<number> | null;
  copiedOut: number;
  copiedIn: number;
}

interface Chunk {
  first: number;
  length: number;
  size: number; // bytes
  offsets: Int32Array;
  ops: Int32Array;
  keyframe: Int32Array;
  names: Uint8Array; // JSON with the sentences
  firstText: number;
}

const ints = () => new Growing(new Int32Array(64));
const floats = () => new Growing(new Float64Array(64));

export class Recording {
  header: Header | null = null;
  end: End | null = null;
  entries: Entry[] = [];
  numbers = new Map<string, number>(); // of requests, by id
  columns: Record<string, Growing<Int32Array>> = {};
  planned = floats();
  started = floats();
  ended = floats();
  textFrames = ints();
  textRequests = ints();
  timeline = new Timeline();
  numDropped = 0; // frames before the first one that is kept
  private size = 0; // bytes of all chunks
  private chunks: Chunk[] = [];
  private rest: Uint8Array[] = []; // bytes of records that are not complete
  private restLength = 0;
  private parsed = new Map<Chunk, Text[]>();
  private at: { frame: number; chunk: Chunk; state: RecordedState } | null = null;

  get numFrames(): number {
    return this.planned.length;
  }

  get numBlocks(): number {
    return Number(this.header?.config.num_blocks ?? 0);
  }

  get blockSize(): number {
    return Number(this.header?.config.block_size ?? 16);
  }

  column(name: string, frame: number): number {
    return this.columns[name]?.at(frame) ?? 0;
  }

  /** Read the next bytes; returns whether a record became complete. */
  read(bytes: Uint8Array): boolean {
    this.rest.push(bytes);
    this.restLength += bytes.length;
    if (this.restLength < 8 || this.restLength < this.wanted()) return false;
    const data = join(this.rest, this.restLength);
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    let place = 0;
    while (place + 8 <= data.length) {
      const kind = view.getUint32(place, true), length = view.getUint32(place + 4, true);
      const end = place + 8 + length + (-length & 7);
      if (end > data.length) break;
      this.readRecord(kind, data.slice(place + 8, place + 8 + length));
      place = end;
    }
    this.rest = place < data.length ? [data.slice(place)] : [];
    this.restLength = data.length - place;
    return place > 0;
  }

  /** Bytes that are needed before the next record is complete. */
  private wanted(): number {
    if (this.rest[0].length < 8) this.rest = [join(this.rest, this.restLength)];
    const head = this.rest[0];
    const length = new DataView(head.buffer, head.byteOffset).getUint32(4, true);
    return 8 + length + (-length & 7);
  }

  private readRecord(kind: number, payload: Uint8Array): void {
    if (kind === CHUNK) this.addChunk(payload);
    else if (kind === HEADER) this.readHeader(JSON.parse(decode(payload)) as Header);
    else if (kind === END) this.end = JSON.parse(decode(payload)) as End;
    else if (kind !== IDLE) throw new Error(`the recording has a record of unknown kind ${kind}`);
  }

  private readHeader(header: Header): void {
    if (header.recording !== VERSION) {
      throw new Error(`recording version ${header.recording} cannot be read; this page reads ${VERSION}`);
    }
    this.header = header;
    for (const name of header.columns) this.columns[name] = ints();
  }

  private addChunk(payload: Uint8Array): void {
    const { buffer } = payload, columns = this.header!.columns;
    const [length, numOps, numKey] = new Int32Array(buffer, 0, 3);
    const times = new Float64Array(buffer, 16, 3 * length);
    let place = 16 + times.byteLength;
    const take = (count: number): Int32Array => {
      const part = new Int32Array(buffer, place, count);
      place += 4 * count;
      return part;
    };
    for (const name of columns) this.columns[name].push(take(length));
    const offsets = take(length + 1), ops = take(numOps), keyframe = take(numKey);
    const names = payload.subarray(place);
    const { first, requests, texts } = JSON.parse(decode(names)) as {
      first: number; requests: unknown[][]; texts: [number, string, number, string][];
    };
    const split = (i: number) => Float64Array.from({ length }, (_, f) => times[3 * f + i]);
    this.planned.push(split(0));
    this.started.push(split(1));
    this.ended.push(split(2));
    for (const request of requests) {
      this.numbers.set(request[0] as string, this.entries.length);
      this.entries.push(asEntry(request));
    }
    const firstText = this.textFrames.length;
    this.textFrames.push(texts.map((text) => text[0] - this.numDropped));
    this.textRequests.push(texts.map((text) => text[2]));
    const from = first - this.numDropped, size = payload.byteLength;
    const chunk = { first: from, length, size, offsets, ops, keyframe, names, firstText };
    this.size += size;
    if (!this.chunks.length) this.timeline.start(RecordedState.restore(keyframe, this.blockSize));
    this.timeline.add(from, offsets, ops);
    this.chunks.push(chunk);
  }

  /** Whether the recording is longer than one of these limits. */
  isOver(maxFrames: number, maxBytes: number): boolean {
    return this.numFrames > maxFrames || this.size > maxBytes;
  }

  /** Keep the latest chunks within these limits; returns the number of frames that were dropped.
   *  Frames are counted from the first one that is kept. */
  keepLatest(maxFrames: number, maxBytes: number): number {
    let count = 0, size = this.size;
    const isOver = ({ first, length }: Chunk) => size > maxBytes || this.numFrames - first - length >= maxFrames;
    while (count < this.chunks.length - 1 && isOver(this.chunks[count])) size -= this.chunks[count++].size;
    if (!count) return 0;
    const gone = this.chunks.splice(0, count), { first, firstText } = this.chunks[0];
    for (const chunk of this.chunks) {
      chunk.first -= first;
      chunk.firstText -= firstText;
    }
    for (const each of [...Object.values(this.columns), this.planned, this.started, this.ended]) each.shift(first);
    this.textFrames.shift(firstText);
    this.textFrames.lower(first);
    this.textRequests.shift(firstText);
    for (const r of this.timeline.drop(first)) {
      if (this.numbers.get(this.entries[r].id) === r) this.numbers.delete(this.entries[r].id);
      this.entries[r] = GONE;
    }
    this.parsed.clear();
    this.at = null;
    this.numDropped += first;
    this.size -= gone.reduce((sum, chunk) => sum + chunk.size, 0);
    return first;
  }

  private chunkOf(frame: number): Chunk {
    return this.chunks[lastAtMost(this.chunks.length, frame, (i) => this.chunks[i].first)];
  }

  /** The state right after the plan of a frame. Valid until the next call. */
  state(frame: number): RecordedState {
    const chunk = this.chunkOf(frame), here = frame - chunk.first;
    if (this.at && this.at.chunk === chunk && this.at.frame <= frame) {
      const from = chunk.offsets[this.at.frame - chunk.first + 1];
      this.at.state.applyAll(chunk.ops, from, chunk.offsets[here + 1]);
      this.at.frame = frame;
    } else {
      const state = RecordedState.restore(chunk.keyframe, this.blockSize, this.numBlocks);
      state.applyAll(chunk.ops, 0, chunk.offsets[here + 1]);
      this.at = { frame, chunk, state };
    }
    return this.at.state;
  }

  /** The operations of a frame, as a view of the chunk. */
  ops(frame: number): Int32Array {
    const chunk = this.chunkOf(frame), here = frame - chunk.first;
    return chunk.ops.subarray(chunk.offsets[here], chunk.offsets[here + 1]);
  }

  /** What the step of a frame does. */
  work(frame: number): StepWork {
    const work: StepWork = {
      chunks: [], drafts: [], admitted: [], preempted: [], added: [], finished: [], deferred: [], joined: null,
      copiedOut: 0, copiedIn: 0,
    };
    const ops = this.ops(frame);
    for (let p = 0; p < ops.length; p = nextOp(ops, p)) {
      const r = ops[p + 1];
      switch (ops[p]) {
        case OP.CHUNK: work.chunks.push({ r, start: ops[p + 2], end: ops[p + 3] }); break;
        case OP.DRAFT: work.drafts.push({ r, count: ops[p + 2], right: ops[p + 3] }); break;
        case OP.ADMIT: work.admitted.push(r); break;
        case OP.PREEMPT: work.preempted.push(r); break;
        case OP.ADD: work.added.push(r); break;
        case OP.FINISH: work.finished.push(r); break;
        case OP.DEFER: work.deferred.push(r); break;
        case OP.COPY: work.copiedOut += r; work.copiedIn += ops[p + 2]; break;
      }
    }
    return work;
  }

  /** The sentence with this number. */
  text(i: number): Text {
    const at = lastAtMost(this.chunks.length, i, (c) => this.chunks[c].firstText);
    const chunk = this.chunks[at];
    let texts = this.parsed.get(chunk);
    if (!texts) {
      const names = JSON.parse(decode(chunk.names)) as { texts: [number, string, number, string][] };
      const by = this.numDropped;
      texts = names.texts.map(([frame, kind, request, text]) => ({ frame: frame - by, kind, request, text }));
      this.parsed.set(chunk, texts);
      if (this.parsed.size > NUM_PARSED) this.parsed.delete(this.parsed.keys().next().value!);
    }
    return texts[i - chunk.firstText];
  }

  /** The number of sentences up to and with this frame. */
  numTexts(frame: number): number {
    return lastAtMost(this.textFrames.length, frame, (i) => this.textFrames.at(i)) + 1;
  }

  /** Numbers of the latest sentences up to a frame, newest first; of one request if r >= 0. */
  latestTexts(frame: number, limit: number, r = -1): number[] {
    const found: number[] = [];
    for (let i = this.numTexts(frame) - 1; i >= 0 && found.length < limit; i--) {
      if (r < 0 || this.textRequests.at(i) === r) found.push(i);
    }
    return found;
  }

  /** The next frame after `frame` (before it, if `way` is -1) with one of the marks; or -1. */
  nextMark(frame: number, mask: number, way: 1 | -1): number {
    const marks = this.columns.marks.values;
    for (let f = frame + way; f >= 0 && f < marks.length; f += way) if (marks[f] & mask) return f;
    return -1;
  }

  /** The last frame that was planned at this time or before; 0 if there is none. */
  frameAt(time: number): number {
    return Math.max(0, lastAtMost(this.numFrames, time, (i) => this.planned.at(i)));
  }

  frameOfStep(step: number): number {
    const steps = this.columns.step.values, at = steps.indexOf(step);
    return at >= 0 ? at : Math.min(step, this.numFrames - 1);
  }

  /** Whether the end of every chunk is the keyframe of the next; the first frame that differs. */
  check(): number {
    for (let c = 0; c + 1 < this.chunks.length; c++) {
      const next = this.chunks[c + 1], mine = this.state(next.first - 1).keyframe();
      const same = mine.length === next.keyframe.length && next.keyframe.every((n, i) => n === mine[i]);
      if (!same) return next.first;
    }
    return -1;
  }
}

/** The operations of a frame, without those that only say why requests wait. */
function decided(recording: Recording, frame: number): number[] {
  const ops = recording.ops(frame), found: number[] = [];
  for (let p = 0; p < ops.length; ) {
    const next = nextOp(ops, p);
    if (ops[p] !== OP.WAIT && ops[p] !== OP.REST) found.push(...ops.subarray(p, next));
    p = next;
  }
  return found;
}

/** The first frame from `from` on in which two recordings decide differently; -1 if none does so far. */
export function whereTheyPart(a: Recording, b: Recording, from = 0): number {
  const shared = Math.min(a.numFrames, b.numFrames);
  const names = Object.keys(a.columns).filter((name) => name !== "blocked" && name !== "marks");
  for (let frame = from; frame < shared; frame++) {
    if (names.some((name) => a.column(name, frame) !== b.column(name, frame))) return frame;
    const ours = decided(a, frame), theirs = decided(b, frame);
    if (ours.length !== theirs.length || ours.some((n, i) => n !== theirs[i])) return frame;
  }
  return a.end && b.end && a.numFrames !== b.numFrames ? shared : -1;
}

function asEntry(row: unknown[]): Entry {
  const [id, numPrompt, limit, arrival, maxTokens, priority, client, parent] = row as [
    string, number, number, number, number | null, number, string, string | null,
  ];
  return { id, numPrompt, limit, arrival, maxTokens, priority, client, parent };
}

const GONE = asEntry(["", 0, 0, 0, null, 0, "", null]); // a request that ended before the first frame
const decoder = new TextDecoder();
const decode = (bytes: Uint8Array): string => decoder.decode(bytes);
