// Numbers that arrive in pieces: arrays that grow, joined bytes, binary search.

/** An array of numbers that grows at its end. */
export class Growing<T extends Int32Array | Float64Array> {
  length = 0;
  constructor(private array: T) {}

  push(values: ArrayLike<number>): void {
    const length = this.length + values.length;
    if (length > this.array.length) {
      const make = this.array.constructor as new (n: number) => T;
      const larger = new make(Math.max(length, 2 * this.array.length));
      larger.set(this.values);
      this.array = larger;
    }
    this.array.set(values, this.length);
    this.length = length;
  }

  /** Remove the first values. */
  shift(count: number): void {
    this.array.copyWithin(0, count, this.length);
    this.length -= count;
  }

  at(i: number): number {
    return this.array[i];
  }

  /** Subtract a number from all values. */
  lower(by: number): void {
    for (let i = 0; i < this.length; i++) this.array[i] -= by;
  }

  get values(): T {
    return this.array.subarray(0, this.length) as T;
  }
}

/** The last index of an ascending list whose value is at most `value`; -1 if there is none. */
export function lastAtMost(length: number, value: number, at: (i: number) => number): number {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(middle) <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Pieces of bytes as one. */
export function join(parts: Uint8Array[], length: number): Uint8Array {
  if (parts.length === 1) return parts[0];
  const all = new Uint8Array(length);
  let place = 0;
  for (const part of parts) {
    all.set(part, place);
    place += part.length;
  }
  return all;
}
