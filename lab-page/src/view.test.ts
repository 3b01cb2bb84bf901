// Unit tests of what the panes show, on recordings that Python wrote.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { Recording } from "./recording";
import { FINISHED, PREFILL, SWAPPED } from "./state";
import { makeView, rowOf, rowsOf, stepOf } from "./view";

function read(name: string): Recording {
  const recording = new Recording();
  recording.read(new Uint8Array(readFileSync(`${process.env.RECORDINGS}/${name}.recording`)));
  return recording;
}

test("every request is in one group, and the groups agree with the columns", () => {
  const recording = read("swap");
  let numSwapped = 0;
  for (let frame = 0; frame < recording.numFrames; frame++) {
    const view = makeView(recording, frame), { groups, counts, numFinished, state } = view;
    assert.equal(groups.running.length, recording.column("running", frame));
    assert.equal(groups.waiting.length + groups.swapped.length, recording.column("waiting", frame));
    assert.equal(counts.reduce((sum, n) => sum + n), state.requests.size + numFinished);
    assert.equal(numFinished, state.numFinished);
    numSwapped += groups.swapped.length;
    assert.ok(rowsOf(view, "swapped", 0, 99).every((row) => row.status === SWAPPED));
    const order = rowsOf(view, "waiting", 0, 99).map((row) => [+!row.blocked, row.r]);
    assert.deepEqual(order, [...order].sort((x, y) => x[0] - y[0] || x[1] - y[1]));
  }
  assert.ok(numSwapped > 0);
});

test("a request whose tokens the step computes is shown as prefill, with its chunk", () => {
  const recording = read("prefix");
  for (let frame = 0; frame < recording.numFrames; frame++) {
    const view = makeView(recording, frame);
    for (const { r, start, end } of view.work.chunks) {
      const row = rowOf(view, recording.entries[r].id)!;
      assert.equal(row.status, PREFILL);
      assert.deepEqual(row.chunk, [start, end]);
    }
  }
});

test("an aborted request finishes, and one that has not arrived has no row", () => {
  const recording = read("edits");
  assert.equal(rowOf(makeView(recording, recording.frameOfStep(4)), "new"), null);
  assert.ok(rowOf(makeView(recording, recording.frameOfStep(5)), "new"));
  assert.ok(rowOf(makeView(recording, recording.frameOfStep(8)), "3")!.status !== FINISHED);
  const last = makeView(recording, recording.numFrames - 1);
  assert.equal(rowOf(last, "3")!.finish, "abort");
  assert.equal(last.numFinished, recording.entries.length);
});

test("the frame after the last plan belongs to the last step", () => {
  const recording = read("blocks"), last = recording.numFrames - 1;
  assert.ok(recording.column("step", last) < 0);
  assert.equal(stepOf(recording, last), recording.column("step", last - 1));
  assert.ok(makeView(recording, last).isAfter);
  assert.equal(recording.column("free", last), recording.numBlocks);
});

test("of many running requests, those that the step prefills come first", () => {
  const recording = read("prefix");
  let numMixed = 0;
  for (let frame = 0; frame < recording.numFrames; frame++) {
    const { groups, work } = makeView(recording, frame), { running } = groups;
    if (running.length <= 8 || !work.chunks.length) continue;
    const prefills = new Set(work.chunks.map(({ r }) => r));
    const numFirst = running.findIndex((r) => !prefills.has(r));
    if (numFirst >= 0) assert.ok(running.slice(numFirst).every((r) => !prefills.has(r)));
    numMixed += +(numFirst > 0);
  }
  assert.ok(numMixed > 0);
});
