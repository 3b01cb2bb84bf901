// Unit tests of the recording reader, on recordings that Python wrote. RECORDINGS names their folder.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import test from "node:test";
import { Recording, whereTheyPart } from "./recording";
import { PREFILL } from "./state";
import { makeView } from "./view";

const folder = process.env.RECORDINGS ?? "";
const names = readdirSync(folder).filter((name) => name.endsWith(".recording"));

function read(name: string, size = Infinity): Recording {
  const recording = new Recording(), bytes = new Uint8Array(readFileSync(`${folder}/${name}`));
  for (let place = 0; place < bytes.length; place += size) {
    recording.read(bytes.slice(place, Math.min(bytes.length, place + size)));
  }
  return recording;
}

test("there are recordings to read", () => assert.ok(names.length >= 3));

for (const name of names) {
  test(`${name}: the end of every chunk is the keyframe of the next`, () => {
    const recording = read(name);
    assert.ok(recording.end?.summary && recording.numFrames > 40);
    assert.equal(recording.check(), -1);
  });

  test(`${name}: a seek shows the same state as playing`, () => {
    const played = read(name), sought = read(name);
    const states = Array.from({ length: played.numFrames }, (_, f) => played.state(f).keyframe());
    for (let i = 0, f = 7; i < 300; i++, f = (f * 31 + 17) % states.length) {
      assert.deepEqual(sought.state(f).keyframe(), states[f]);
    }
  });

  test(`${name}: columns agree with the states`, () => {
    const recording = read(name);
    for (let frame = 0; frame < recording.numFrames; frame++) {
      const state = recording.state(frame);
      const running = [...state.requests.values()].filter((r) => r.status === 1 || r.status === 2);
      assert.equal(running.length, recording.column("running", frame));
      assert.equal(state.requests.size - running.length, recording.column("waiting", frame));
      const held = state.refs.reduce((sum, refs) => sum + +(refs > 0), 0);
      assert.equal(recording.numBlocks - held, recording.column("free", frame));
    }
  });

  test(`${name}: pieces of any size give the same recording`, () => {
    const whole = read(name), last = whole.numFrames - 1;
    for (const size of [5, 1000]) {
      const pieces = read(name, size);
      assert.equal(whereTheyPart(whole, pieces), -1);
      assert.equal(pieces.numFrames, whole.numFrames);
      assert.deepEqual(pieces.state(last).keyframe(), whole.state(last).keyframe());
    }
  });

  test(`${name}: sentences and marks can be found`, () => {
    const recording = read(name), last = recording.numFrames - 1;
    const numTexts = recording.numTexts(last);
    assert.ok(numTexts > 0);
    const [latest] = recording.latestTexts(last, 1);
    assert.equal(latest, numTexts - 1);
    for (let i = 0; i < numTexts; i++) assert.equal(recording.text(i).frame, recording.textFrames.at(i));
    const end = recording.header!.marks.END;
    const first = recording.nextMark(-1, end, 1);
    assert.ok(recording.column("finished", first) > 0);
    assert.equal(recording.nextMark(first, end, -1), -1);
    assert.equal(recording.timeline.finished.length, recording.entries.length);
  });

  test(`${name}: a request whose prompt is computed is shown as prefill`, () => {
    const recording = read(name);
    const [chunk] = recording.work(0).chunks, life = recording.timeline.lives.get(chunk.r)!;
    assert.equal(life.states[0], PREFILL);
    assert.ok(life.frames.every((frame, i) => i === 0 || frame > life.frames[i - 1]));
  });
}

test("recordings of different runs part", () => {
  const [a, b] = [read(names[0]), read(names[1])];
  assert.ok(whereTheyPart(a, b) >= 0);
});

test("a recording of another version is refused", () => {
  const header = new TextEncoder().encode(JSON.stringify({ recording: 99, columns: [] }));
  const bytes = new Uint8Array(8 + header.length + (-header.length & 7));
  new DataView(bytes.buffer).setUint32(0, 1, true);
  new DataView(bytes.buffer).setUint32(4, header.length, true);
  bytes.set(header, 8);
  assert.throws(() => new Recording().read(bytes), /version 99/);
});

test("a recording that drops its first frames shows the same states", () => {
  const whole = read("prefix.recording"), recording = read("prefix.recording", 100_000), last = whole.numFrames - 1;
  const numFrames = whole.numFrames - 40; // the first chunk has 32 frames
  assert.equal(recording.keepLatest(whole.numFrames, 1 << 30), 0);
  const count = recording.keepLatest(numFrames, 1 << 30);
  assert.equal(count, 32);
  assert.equal(recording.numFrames, whole.numFrames - count);
  for (let frame = 0; frame < recording.numFrames; frame += 7) {
    assert.deepEqual(recording.state(frame).keyframe(), whole.state(frame + count).keyframe());
    assert.equal(recording.column("step", frame), whole.column("step", frame + count));
    assert.equal(recording.planned.at(frame), whole.planned.at(frame + count));
    const [ours, theirs] = [makeView(recording, frame), makeView(whole, frame + count)];
    assert.equal(ours.numFinished, theirs.numFinished);
    assert.deepEqual(ours.groups.running, theirs.groups.running);
  }
  const [latest] = recording.latestTexts(last - count, 1), [same] = whole.latestTexts(last, 1);
  assert.deepEqual(recording.text(latest), { ...whole.text(same), frame: whole.text(same).frame - count });
  const { END } = recording.header!.marks;
  assert.equal(recording.nextMark(-1, END, 1), whole.nextMark(count - 1, END, 1) - count);
  for (const [r, life] of recording.timeline.lives) {
    const before = whole.timeline.lives.get(r)!;
    assert.equal(life.finish!.frame + count, before.finish!.frame);
    assert.ok(life.frames[0] >= 0 && life.frames.length === life.states.length);
  }
  assert.ok(recording.timeline.lives.size < whole.timeline.lives.size);
});

test("a recording keeps at least its latest chunk", () => {
  const recording = read("prefix.recording");
  recording.keepLatest(0, 0);
  assert.ok(recording.numFrames > 0);
});
