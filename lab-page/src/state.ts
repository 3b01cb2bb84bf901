// The state of a recorded run at one frame, and the operations that change it.
// The same interpreter as headway/lab/recording/state.py; numbers only, no texts.

export const OP = {
  ADD: 1, ADMIT: 2, CHUNK: 3, DECODING: 4, JOIN: 5, LEAVE: 6, DECODE: 7, COMPUTED: 8, RESULT: 9,
  GENERATED: 10, BLOCK: 11, PREEMPT: 12, FINISH: 13, WAIT: 14, REST: 15, DEFER: 16, COPY: 17,
  FORGET: 18, CUT: 19, DRAFT: 20,
} as const;

// Number of arguments by operation. The last argument of ADMIT and PREEMPT is the length of a list.
export const NUM_ARGUMENTS = [0, 1, 6, 3, 1, 1, 1, 1, 2, 1, 2, 2, 4, 4, 4, 2, 1, 2, 1, 2, 3];

export const WAITING = 0, PREFILL = 1, DECODING = 2, SWAPPED = 3, FINISHED = 4;
export const STATES = ["waiting", "prefill", "decoding", "swapped", "finished"] as const;
export type StateName = (typeof STATES)[number];

export interface Blocked {
  reason: number;
  need: number;
  have: number;
}

export interface RecordedRequest {
  status: number;
  computed: number; // less the decode counter, once it has joined
  generated: number; // less the result counter, once it has joined
  cached: number; // tokens that its latest admission did not compute
  numPreemptions: number;
  blocks: number[];
  host: number[];
  blocked: Blocked | null;
  isJoined: boolean; // decode steps advance it
}

/** The place after the operation at `place`. */
export function nextOp(ops: Int32Array, place: number): number {
  const op = ops[place];
  const last = place + 1 + NUM_ARGUMENTS[op];
  return op === OP.ADMIT || op === OP.PREEMPT ? last + ops[last - 1] : last;
}

/** All requests that have not finished, and the content of the KV blocks. */
export class RecordedState {
  requests = new Map<number, RecordedRequest>();
  refs: Int32Array; // holders of each block
  published: Uint8Array; // 1: the content of the block can be matched
  rest: { reason: number; count: number } | null = null; // requests that were not considered
  numFinished = 0;
  private decoded = 0;
  private results = 0;

  constructor(readonly blockSize: number, numBlocks = 64) {
    this.refs = new Int32Array(numBlocks);
    this.published = new Uint8Array(numBlocks);
  }

  computed(r: number): number {
    const request = this.get(r);
    return request.computed + (request.isJoined ? this.decoded : 0);
  }

  generated(r: number): number {
    const request = this.get(r);
    return request.generated + (request.isJoined ? this.results : 0);
  }

  /** Apply the operations in [start, end). */
  applyAll(ops: Int32Array, start: number, end: number): void {
    for (let place = start; place < end; place = nextOp(ops, place)) this.apply(ops, place);
  }

  /** Apply the operation at `place`. */
  apply(ops: Int32Array, place: number): void {
    const r = ops[place + 1], a = ops[place + 2], b = ops[place + 3], c = ops[place + 4];
    switch (ops[place]) {
      case OP.ADD: this.requests.set(r, newRequest()); break;
      case OP.ADMIT: this.admit(r, ops, place); break;
      case OP.CHUNK: {
        const request = this.get(r), size = this.blockSize;
        request.computed = b;
        this.publish(request.blocks, Math.floor(a / size), Math.floor(b / size));
        break;
      }
      case OP.DECODING: this.get(r).status = DECODING; break;
      case OP.JOIN: this.join(this.get(r)); break;
      case OP.LEAVE: this.leave(this.get(r)); break;
      case OP.DECODE: this.decoded += r; break;
      case OP.COMPUTED: {
        const request = this.get(r);
        request.computed = a - (request.isJoined ? this.decoded : 0);
        break;
      }
      case OP.RESULT: this.results += r; break;
      case OP.GENERATED: {
        const request = this.get(r);
        request.generated = a - (request.isJoined ? this.results : 0);
        break;
      }
      case OP.BLOCK: this.get(r).blocks.push(a); this.take(a); break;
      case OP.PREEMPT: {
        const request = this.get(r);
        this.release(request, b);
        request.status = a ? SWAPPED : WAITING;
        request.computed = 0;
        request.host = Array.from(ops.subarray(place + 5, place + 5 + c));
        request.numPreemptions += 1;
        break;
      }
      case OP.FINISH:
        this.release(this.get(r), c);
        this.requests.delete(r);
        this.numFinished += 1;
        break;
      case OP.WAIT: this.get(r).blocked = a >= 0 ? { reason: a, need: b, have: c } : null; break;
      case OP.REST: this.rest = a ? { reason: r, count: a } : null; break;
      case OP.FORGET:
        this.published.fill(0);
        if (r) for (const request of this.requests.values()) {
          request.host = [];
          if (request.status === SWAPPED) request.status = WAITING;
        }
        break;
      case OP.CUT: {
        const request = this.get(r);
        request.computed = a - (request.isJoined ? this.decoded : 0);
        for (const block of request.blocks.splice(Math.ceil(a / this.blockSize))) this.refs[block] -= 1;
        break;
      }
      case OP.DEFER: case OP.COPY: case OP.DRAFT: break; // they concern one step only
      default: throw new Error(`unknown operation ${ops[place]}`);
    }
  }

  private admit(r: number, ops: Int32Array, place: number): void {
    const request = this.get(r);
    const numHits = ops[place + 4], published = ops[place + 5], length = ops[place + 6];
    request.status = PREFILL;
    request.computed = ops[place + 2];
    request.cached = ops[place + 3];
    request.blocked = null;
    request.host = [];
    request.blocks = Array.from(ops.subarray(place + 7, place + 7 + length));
    request.blocks.forEach((block, i) => {
      this.reach(block);
      if (i < numHits) this.refs[block] += 1;
      else this.take(block);
    });
    this.publish(request.blocks, numHits, published);
  }

  private join(request: RecordedRequest): void {
    request.isJoined = true;
    request.computed -= this.decoded;
    request.generated -= this.results;
  }

  private leave(request: RecordedRequest): void {
    request.isJoined = false;
    request.computed += this.decoded;
    request.generated += this.results;
  }

  private release(request: RecordedRequest, published: number): void {
    if (request.isJoined) this.leave(request);
    this.publish(request.blocks, 0, published);
    for (const block of request.blocks) this.refs[block] -= 1;
    request.blocks = [];
  }

  private publish(blocks: number[], start: number, end: number): void {
    for (let i = start; i < Math.min(end, blocks.length); i++) this.published[blocks[i]] = 1;
  }

  private take(block: number): void {
    this.reach(block);
    this.refs[block] = 1;
    this.published[block] = 0;
  }

  private reach(block: number): void {
    if (block < this.refs.length) return;
    const refs = new Int32Array(2 * block + 1), published = new Uint8Array(2 * block + 1);
    refs.set(this.refs);
    published.set(this.published);
    this.refs = refs;
    this.published = published;
  }

  private get(r: number): RecordedRequest {
    const request = this.requests.get(r);
    if (!request) throw new Error(`the recording has no open request ${r} here`);
    return request;
  }

  /** The whole state as integers, equal to the keyframe that Python writes. */
  keyframe(): number[] {
    const out = [this.numFinished, this.rest?.reason ?? 0, this.rest?.count ?? 0, this.requests.size];
    for (const [r, request] of this.requests) {
      const b = request.blocked;
      out.push(
        r, request.status, this.computed(r), this.generated(r), request.cached,
        request.numPreemptions, b ? b.reason : -1, b?.need ?? 0, b?.have ?? 0, +request.isJoined,
      );
      for (const blocks of [request.blocks, request.host]) {
        out.push(blocks.length);
        for (const block of blocks) out.push(block);
      }
    }
    const runs: number[] = [];
    for (let i = 0; i < this.published.length; i++) {
      if (!this.published[i]) continue;
      if (i > 0 && this.published[i - 1]) runs[runs.length - 1] += 1;
      else runs.push(i, 1);
    }
    out.push(runs.length / 2, ...runs);
    return out;
  }

  /** The state of a keyframe. */
  static restore(numbers: Int32Array, blockSize: number, numBlocks?: number): RecordedState {
    const state = new RecordedState(blockSize, numBlocks);
    let i = 0;
    state.numFinished = numbers[i++];
    const reason = numbers[i++], count = numbers[i++];
    state.rest = count ? { reason, count } : null;
    for (let left = numbers[i++]; left > 0; left--) {
      const r = numbers[i++], request = newRequest();
      request.status = numbers[i++];
      request.computed = numbers[i++];
      request.generated = numbers[i++];
      request.cached = numbers[i++];
      request.numPreemptions = numbers[i++];
      const why = numbers[i++], need = numbers[i++], have = numbers[i++];
      request.blocked = why >= 0 ? { reason: why, need, have } : null;
      request.isJoined = numbers[i++] > 0;
      const numHeld = numbers[i++];
      request.blocks = Array.from(numbers.subarray(i, i += numHeld));
      const numHost = numbers[i++];
      request.host = Array.from(numbers.subarray(i, i += numHost));
      for (const block of request.blocks) {
        state.reach(block);
        state.refs[block] += 1;
      }
      state.requests.set(r, request);
    }
    for (let left = numbers[i++]; left > 0; left--) {
      const start = numbers[i++], end = start + numbers[i++];
      state.reach(end - 1);
      state.published.fill(1, start, end);
    }
    return state;
  }
}

function newRequest(): RecordedRequest {
  return {
    status: WAITING, computed: 0, generated: 0, cached: 0, numPreemptions: 0, blocks: [], host: [],
    blocked: null, isJoined: false,
  };
}
