// When each request was in which state, over a whole recording. Lanes, the list of finished requests and
// the state machine read it; it is made once, while the chunks arrive.

import { lastAtMost } from "./growing";
import { DECODING, FINISHED, RecordedState, OP, PREFILL, SWAPPED, WAITING, nextOp } from "./state";

/** One request: the frames at which its state changes. */
export interface Life {
  frames: number[]; // ascending; the state from this frame on
  states: number[];
  finish: { frame: number; reason: number; numOutput: number } | null;
  preemptions: number[]; // frames
}

export class Timeline {
  lives = new Map<number, Life>();
  finished: number[] = []; // numbers of requests, in the order in which they finished
  finishedAt: number[] = []; // their frames
  numGone = 0; // requests that finished before the first frame that is kept
  maxBlock = 0; // the highest block that any request has held

  /** The state before the first frame; not empty in a recording of a live server. */
  start(state: RecordedState): void {
    for (const [r, request] of state.requests) {
      this.change(r, 0, request.status);
      for (const block of request.blocks) this.maxBlock = Math.max(this.maxBlock, block);
    }
  }

  /** The operations of one chunk. */
  add(first: number, offsets: Int32Array, ops: Int32Array): void {
    let frame = 0;
    for (let p = 0; p < ops.length; p = nextOp(ops, p)) {
      while (p >= offsets[frame + 1]) frame++;
      const at = first + frame, r = ops[p + 1];
      switch (ops[p]) {
        case OP.ADD: this.change(r, at, WAITING); break;
        case OP.ADMIT:
          this.change(r, at, PREFILL);
          for (let i = 0; i < ops[p + 6]; i++) this.maxBlock = Math.max(this.maxBlock, ops[p + 7 + i]);
          break;
        case OP.BLOCK: this.maxBlock = Math.max(this.maxBlock, ops[p + 2]); break;
        case OP.CHUNK: this.change(r, at, PREFILL); break;
        case OP.DECODING: this.change(r, at + 1, DECODING); break; // this step computes its prompt
        case OP.PREEMPT:
          this.change(r, at, ops[p + 2] ? SWAPPED : WAITING);
          this.lives.get(r)?.preemptions.push(at);
          break;
        case OP.FINISH: this.finish(r, at, ops[p + 2], ops[p + 3]); break;
      }
    }
  }

  /** Forget the first frames; returns the requests that ended before the first one that is kept. */
  drop(count: number): number[] {
    const gone: number[] = [];
    for (const [r, life] of this.lives) {
      if (life.finish && life.finish.frame < count) gone.push(r);
      else lower(life, count);
    }
    for (const r of gone) this.lives.delete(r);
    const numGone = this.finishedAt.findIndex((frame) => frame >= count);
    const first = numGone < 0 ? this.finished.length : numGone;
    this.numGone += first;
    this.finished = this.finished.slice(first);
    this.finishedAt = this.finishedAt.slice(first).map((frame) => frame - count);
    return gone;
  }

  private change(r: number, frame: number, state: number): void {
    let life = this.lives.get(r);
    if (!life) this.lives.set(r, (life = { frames: [], states: [], finish: null, preemptions: [] }));
    const last = life.frames.length - 1;
    while (life.frames.length && life.frames[life.frames.length - 1] >= frame) {
      life.frames.pop();
      life.states.pop();
    }
    if (last < 0 || life.states[life.states.length - 1] !== state) {
      life.frames.push(frame);
      life.states.push(state);
    }
  }

  private finish(r: number, frame: number, reason: number, numOutput: number): void {
    this.change(r, frame, FINISHED);
    this.lives.get(r)!.finish = { frame, reason, numOutput };
    this.finished.push(r);
    this.finishedAt.push(frame);
  }
}

/** Count the frames of a life from a later one. */
function lower(life: Life, count: number): void {
  const first = Math.max(0, lastAtMost(life.frames.length, count, (i) => life.frames[i]));
  life.states = life.states.slice(first);
  life.frames = life.frames.slice(first).map((frame) => Math.max(0, frame - count));
  life.preemptions = life.preemptions.filter((frame) => frame >= count).map((frame) => frame - count);
  if (life.finish) life.finish.frame -= count;
}
