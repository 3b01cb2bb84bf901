// Unit tests of the film reader, on films that Python wrote. FILMS names their folder.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import test from "node:test";
import { Film, whereTheyPart } from "./film";
import { PREFILL } from "./state";

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
