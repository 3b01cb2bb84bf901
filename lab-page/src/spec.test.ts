// Unit tests of specs in the URL and of the numbers in a workload's text.
import assert from "node:assert/strict";
import test from "node:test";
import { dials, pack, seedOf, tidy, turn, unpack, withSeed } from "./spec";

const WORKLOAD =
  "requests=60,prompt=uniform(20,200),output=0.9*fixed(10)+0.1*fixed(500),arrivals=poisson(2.5),seed=7";

test("a packed spec can be put into a URL and read back", () => {
  const edits = [{ step: 3, abort: "r/1" }];
  const spec = { workload: "prompt=uniform(1,9)", set: { victim: "größe ✓" }, edits };
  const text = pack(spec);
  assert.match(text, /^[A-Za-z0-9_-]+$/);
  assert.deepEqual(unpack(text), spec);
  assert.equal(unpack("%%%"), null);
});

test("every number of a workload has a slider, except the seed", () => {
  const found = dials(WORKLOAD);
  assert.deepEqual(found.map(({ value }) => value), [60, 20, 200, 0.9, 10, 0.1, 500, 2.5]);
  assert.deepEqual(found.slice(0, 3).map(({ label }) => label), ["requests", "prompt from", "prompt to"]);
  assert.ok(found.every(({ value, max }) => value <= max));
});

test("a slider changes its own number only", () => {
  const [, , to] = dials(WORKLOAD);
  assert.equal(turn(WORKLOAD, to, 150), WORKLOAD.replace("200", "150"));
  const rate = dials(WORKLOAD).at(-1)!;
  assert.equal(turn(WORKLOAD, rate, 3), WORKLOAD.replace("2.5", "3.00"));
});

test("the seed is a part of the workload", () => {
  assert.equal(seedOf(WORKLOAD), 7);
  assert.equal(seedOf("requests=3"), 0);
  assert.equal(withSeed("requests=3", 5), "requests=3,seed=5");
  assert.equal(withSeed("seed=4,requests=3", 0), "requests=3");
});

test("equal runs have equal URLs", () => {
  assert.deepEqual(tidy({ workload: "x", set: {}, edits: [], async_scheduling: false }), { workload: "x" });
});

test("the shares of a mixture have a name", () => {
  const found = dials("requests=8,output=0.875*fixed(10)+0.125*fixed(500)").map(({ label }) => label);
  assert.deepEqual(found, ["requests", "output share", "output", "output share", "output"]);
});
