// Unit tests of what the panes show, on films that Python wrote.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { Film } from "./film";
import { FINISHED, PREFILL, SWAPPED } from "./state";
import { makeView, rowOf, rowsOf, stepOf } from "./view";

function read(name: string): Film {
  const film = new Film();
  film.read(new Uint8Array(readFileSync(`${process.env.FILMS}/${name}.film`)));
  return film;
}

test("every request is in one group, and the groups agree with the columns", () => {
  const film = read("swap");
  let numSwapped = 0;
  for (let frame = 0; frame < film.numFrames; frame++) {
    const view = makeView(film, frame), { groups, counts, numFinished, state } = view;
    assert.equal(groups.running.length, film.column("running", frame));
    assert.equal(groups.waiting.length + groups.swapped.length, film.column("waiting", frame));
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
  const film = read("prefix");
  for (let frame = 0; frame < film.numFrames; frame++) {
    const view = makeView(film, frame);
    for (const { r, start, end } of view.work.chunks) {
      const row = rowOf(view, film.entries[r].id)!;
      assert.equal(row.status, PREFILL);
      assert.deepEqual(row.chunk, [start, end]);
    }
  }
});

test("an aborted request finishes, and one that has not arrived has no row", () => {
  const film = read("edits");
  assert.equal(rowOf(makeView(film, film.frameOfStep(4)), "new"), null);
  assert.ok(rowOf(makeView(film, film.frameOfStep(5)), "new"));
  assert.ok(rowOf(makeView(film, film.frameOfStep(8)), "3")!.status !== FINISHED);
  const last = makeView(film, film.numFrames - 1);
  assert.equal(rowOf(last, "3")!.finish, "abort");
  assert.equal(last.numFinished, film.entries.length);
});

test("the frame after the last plan belongs to the last step", () => {
  const film = read("blocks"), last = film.numFrames - 1;
  assert.ok(film.column("step", last) < 0);
  assert.equal(stepOf(film, last), film.column("step", last - 1));
  assert.ok(makeView(film, last).isAfter);
  assert.equal(film.column("free", last), film.numBlocks);
});

test("of many running requests, those that the step prefills come first", () => {
  const film = read("prefix");
  let numMixed = 0;
  for (let frame = 0; frame < film.numFrames; frame++) {
    const { groups, work } = makeView(film, frame), { running } = groups;
    if (running.length <= 8 || !work.chunks.length) continue;
    const prefills = new Set(work.chunks.map(({ r }) => r));
    const numFirst = running.findIndex((r) => !prefills.has(r));
    if (numFirst >= 0) assert.ok(running.slice(numFirst).every((r) => !prefills.has(r)));
    numMixed += +(numFirst > 0);
  }
  assert.ok(numMixed > 0);
});
