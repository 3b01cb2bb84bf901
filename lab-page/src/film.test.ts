// Unit tests of the film reader, on films that Python wrote. FILMS names their folder.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import test from "node:test";
import { Film, whereTheyPart } from "./film";
import { PREFILL } from "./state";
import { makeView } from "./view";

const folder = process.env.FILMS ?? "";
const names = readdirSync(folder).filter((name) => name.endsWith(".film"));

function read(name: string, size = Infinity): Film {
  const film = new Film(), bytes = new Uint8Array(readFileSync(`${folder}/${name}`));
  for (let place = 0; place < bytes.length; place += size) {
    film.read(bytes.slice(place, Math.min(bytes.length, place + size)));
  }
  return film;
}

test("there are films to read", () => assert.ok(names.length >= 3));

for (const name of names) {
  test(`${name}: the end of every chunk is the keyframe of the next`, () => {
    const film = read(name);
    assert.ok(film.end?.summary && film.numFrames > 40);
    assert.equal(film.check(), -1);
  });

  test(`${name}: a seek shows the same state as playing`, () => {
    const played = read(name), sought = read(name);
    const states = Array.from({ length: played.numFrames }, (_, f) => played.state(f).keyframe());
    for (let i = 0, f = 7; i < 300; i++, f = (f * 31 + 17) % states.length) {
      assert.deepEqual(sought.state(f).keyframe(), states[f]);
    }
  });

  test(`${name}: columns agree with the states`, () => {
    const film = read(name);
    for (let frame = 0; frame < film.numFrames; frame++) {
      const state = film.state(frame);
      const running = [...state.requests.values()].filter((r) => r.status === 1 || r.status === 2);
      assert.equal(running.length, film.column("running", frame));
      assert.equal(state.requests.size - running.length, film.column("waiting", frame));
      const held = state.refs.reduce((sum, refs) => sum + +(refs > 0), 0);
      assert.equal(film.numBlocks - held, film.column("free", frame));
    }
  });

  test(`${name}: pieces of any size give the same film`, () => {
    const whole = read(name), last = whole.numFrames - 1;
    for (const size of [5, 1000]) {
      const pieces = read(name, size);
      assert.equal(whereTheyPart(whole, pieces), -1);
      assert.equal(pieces.numFrames, whole.numFrames);
      assert.deepEqual(pieces.state(last).keyframe(), whole.state(last).keyframe());
    }
  });

  test(`${name}: sentences and marks can be found`, () => {
    const film = read(name), last = film.numFrames - 1;
    const numTexts = film.numTexts(last);
    assert.ok(numTexts > 0);
    const [latest] = film.latestTexts(last, 1);
    assert.equal(latest, numTexts - 1);
    for (let i = 0; i < numTexts; i++) assert.equal(film.text(i).frame, film.textFrames.at(i));
    const end = film.header!.marks.END;
    const first = film.nextMark(-1, end, 1);
    assert.ok(film.column("finished", first) > 0);
    assert.equal(film.nextMark(first, end, -1), -1);
    assert.equal(film.timeline.finished.length, film.entries.length);
  });

  test(`${name}: a request whose prompt is computed is shown as prefill`, () => {
    const film = read(name);
    const [chunk] = film.work(0).chunks, life = film.timeline.lives.get(chunk.r)!;
    assert.equal(life.states[0], PREFILL);
    assert.ok(life.frames.every((frame, i) => i === 0 || frame > life.frames[i - 1]));
  });
}

test("films of different runs part", () => {
  const [a, b] = [read(names[0]), read(names[1])];
  assert.ok(whereTheyPart(a, b) >= 0);
});

test("a film of another version is refused", () => {
  const header = new TextEncoder().encode(JSON.stringify({ film: 99, columns: [] }));
  const bytes = new Uint8Array(8 + header.length + (-header.length & 7));
  new DataView(bytes.buffer).setUint32(0, 1, true);
  new DataView(bytes.buffer).setUint32(4, header.length, true);
  bytes.set(header, 8);
  assert.throws(() => new Film().read(bytes), /version 99/);
});

test("a film that drops its first frames shows the same states", () => {
  const whole = read("prefix.film"), film = read("prefix.film", 100_000), last = whole.numFrames - 1;
  const numFrames = whole.numFrames - 40; // the first chunk has 32 frames
  assert.equal(film.keepLatest(whole.numFrames, 1 << 30), 0);
  const count = film.keepLatest(numFrames, 1 << 30);
  assert.equal(count, 32);
  assert.equal(film.numFrames, whole.numFrames - count);
  for (let frame = 0; frame < film.numFrames; frame += 7) {
    assert.deepEqual(film.state(frame).keyframe(), whole.state(frame + count).keyframe());
    assert.equal(film.column("step", frame), whole.column("step", frame + count));
    assert.equal(film.planned.at(frame), whole.planned.at(frame + count));
    const [ours, theirs] = [makeView(film, frame), makeView(whole, frame + count)];
    assert.equal(ours.numFinished, theirs.numFinished);
    assert.deepEqual(ours.groups.running, theirs.groups.running);
  }
  const [latest] = film.latestTexts(last - count, 1), [same] = whole.latestTexts(last, 1);
  assert.deepEqual(film.text(latest), { ...whole.text(same), frame: whole.text(same).frame - count });
  assert.equal(film.nextMark(-1, film.header!.marks.END, 1), whole.nextMark(count - 1, film.header!.marks.END, 1) - count);
  for (const [r, life] of film.timeline.lives) {
    const before = whole.timeline.lives.get(r)!;
    assert.equal(life.finish!.frame + count, before.finish!.frame);
    assert.ok(life.frames[0] >= 0 && life.frames.length === life.states.length);
  }
  assert.ok(film.timeline.lives.size < whole.timeline.lives.size);
});

test("a film keeps at least its latest chunk", () => {
  const film = read("prefix.film");
  film.keepLatest(0, 0);
  assert.ok(film.numFrames > 0);
});
