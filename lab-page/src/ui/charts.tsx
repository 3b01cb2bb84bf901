// Charts over all frames, with a cursor at the present frame. Click to go there, drag to zoom.

import { type ReadonlySignal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { color, paint } from "../colors";
import type { Recording } from "../recording";
import { a, b, frameOf, isComparing, numFrames, seek, span, version, viewA } from "../store";
import type { View } from "../view";
import { shownSpan } from "./lanes";
import { useShown } from "./shown";
import { count } from "./words";

interface Line { label: string; color: string; values: (recording: Recording) => ArrayLike<number> }
interface Chart { title: string; lines: Line[] }
interface PlotProps { chart: Chart; view: ReadonlySignal<View | null> }
type Data = (ArrayLike<number> | (number | null)[])[];

const HEIGHT = 96; // pixels
let places = new Float64Array(0); // 0, 1, 2, ...
const column = (name: string) => (recording: Recording) => recording.columns[name]!.values;
const CHARTS: Chart[] = [
  {
    title: "Requests",
    lines: [
      { label: "running", color: "decoding", values: column("running") },
      { label: "waiting", color: "waiting", values: column("waiting") },
    ],
  },
  { title: "Free blocks", lines: [{ label: "free", color: "green", values: column("free") }] },
  {
    title: "Tokens per step",
    lines: [
      { label: "all", color: "decoding", values: kept(tokens) },
      { label: "prefill", color: "prefill", values: column("prefill") },
    ],
  },
  { title: "Time of a step (ms)", lines: [{ label: "ms", color: "ink", values: kept(milliseconds) }] },
  { title: "Preemptions so far", lines: [{ label: "preemptions", color: "red", values: kept(preemptions) }] },
];

/** Milliseconds until a chart shows frames that have arrived; a long recording is drawn less often. */
const redrawDelay = (numFrames: number): number => Math.min(1000, 30 + numFrames / 50);

/** Compute a line once for each length of a recording. */
function kept(values: (recording: Recording) => Int32Array): (recording: Recording) => Int32Array {
  const known = new WeakMap<Recording, { end: number; line: Int32Array }>();
  return (recording) => {
    const end = recording.numDropped + recording.numFrames;
    let found = known.get(recording);
    if (found?.end !== end) known.set(recording, (found = { end, line: values(recording) }));
    return found!.line;
  };
}

function tokens(recording: Recording): Int32Array {
  const decodes = recording.columns.decodes.values, prefill = recording.columns.prefill.values;
  const steps = recording.columns.num_steps.values;
  return decodes.map((n, i) => n * Math.max(1, steps[i]) + prefill[i]);
}

function milliseconds(recording: Recording): Int32Array {
  const { started, ended } = recording;
  return Int32Array.from(ended.values, (end, i) => Math.max(0, Math.round(1000 * (end - started.at(i)))));
}

function preemptions(recording: Recording): Int32Array {
  let sum = 0;
  return recording.columns.preempted.values.map((n) => (sum += n));
}

export function Charts() {
  const { shown, ref } = useShown(viewA);
  return (
    <section class="card charts" ref={ref} aria-label="Charts">
      <h2>
        Over the whole run
        {isComparing.value && <small>second scheduler dashed</small>}
      </h2>
      <div class="chart-grid">
        {CHARTS.map((chart) => <Plot key={chart.title} chart={chart} view={shown} />)}
      </div>
    </section>
  );
}

function Plot({ chart, view }: PlotProps) {
  const place = useRef<HTMLDivElement>(null), cursor = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null), timer = useRef(0);
  const move = () => {
    const u = plot.current, line = cursor.current;
    if (!u || !line || !numFrames.peek()) return;
    const x = u.valToPos(Math.max(0, frameOf(a)), "x");
    const { left, width } = u.bbox, ratio = devicePixelRatio || 1; // reading the document is slow
    const isOutside = x < 0 || x > width / ratio;
    line.style.transform = `translateX(${left / ratio + x}px)`;
    line.style.visibility = isOutside ? "hidden" : "visible";
  };
  const refresh = () => {
    timer.current = 0;
    const u = plot.current;
    if (!u) return;
    u.setData(dataOf(chart) as unknown as uPlot.AlignedData);
    move();
  };
  useSignalEffect(() => {
    paint.value;
    isComparing.value;
    plot.current?.destroy();
    plot.current = make(chart, place.current!, move);
    refresh();
  });
  useSignalEffect(() => {
    version.value; span.value; a.recording.value; b.recording.value;
    timer.current ||= window.setTimeout(refresh, redrawDelay(numFrames.value));
  });
  useSignalEffect(() => {
    frameOf(a);
    move();
  });
  useEffect(() => {
    const watcher = new ResizeObserver(() => {
      const width = place.current!.clientWidth;
      if (plot.current && width && plot.current.width !== width) {
        plot.current.setSize({ width, height: HEIGHT });
        move();
      }
    });
    watcher.observe(place.current!);
    return () => { watcher.disconnect(); plot.current?.destroy(); };
  }, []);
  return (
    <figure>
      <figcaption>{chart.title}<Values chart={chart} view={view} /></figcaption>
      <div class="plot" ref={place}><div class="cursor" ref={cursor} /></div>
    </figure>
  );
}

function Values({ chart, view }: PlotProps) {
  const now = view.value;
  if (!now) return null;
  return (
    <span class="values">
      {chart.lines.map((line) => (
        <span key={line.label}>
          {chart.lines.length > 1 && <i class={`swatch ${line.color}`} />}
          {chart.lines.length > 1 ? `${line.label} ` : "now "}
          <b>{count(line.values(now.recording)[now.frame])}</b>
        </span>
      ))}
    </span>
  );
}

function dataOf(chart: Chart): Data {
  const recordings = [a.recording.peek(), b.recording.peek()], length = numFrames.peek();
  if (places.length < length) places = Float64Array.from({ length: 2 * length }, (_, i) => i);
  const x = places.subarray(0, length);
  const lines: Data = [x];
  for (const [i, recording] of recordings.entries()) {
    if (i && !isComparing.peek()) continue;
    for (const line of chart.lines) {
      const values = recording?.header ? line.values(recording) : new Int32Array(0);
      const isFull = values.length === length;
      lines.push(isFull ? values : Array.from(x, (_, f) => (f < values.length ? values[f] : null)));
    }
  }
  return lines;
}

function make(chart: Chart, place: HTMLElement, onReady: () => void): uPlot {
  const quiet = color("quiet"), grid = { stroke: color("line"), width: 1 };
  const axis = { stroke: quiet, grid, ticks: { show: false }, font: "10px system-ui, sans-serif" };
  const series: uPlot.Series[] = [{}];
  for (const isSecond of isComparing.peek() ? [false, true] : [false]) {
    for (const line of chart.lines) {
      series.push({
        label: line.label, stroke: color(line.color), width: 1.5, points: { show: false },
        dash: isSecond ? [4, 3] : undefined,
      });
    }
  }
  const options: uPlot.Options = {
    width: place.clientWidth || 300, height: HEIGHT, series, legend: { show: false },
    padding: [6, 14, 0, 0],
    scales: {
      x: { time: false, range: () => shownSpan(numFrames.peek()) },
      y: { range: (_, __, max) => [0, Math.max(1, max * 1.05)] },
    },
    axes: [
      { ...axis, size: 18, gap: 2 },
      {
        ...axis, size: 44, gap: 3, space: 22,
        values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? count(tick) : "")),
      },
    ],
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
    hooks: {
      draw: [onReady], // scales are set right before
      setSelect: [(u) => {
        if (u.select.width < 8) return;
        const from = u.posToVal(u.select.left, "x"), to = u.posToVal(u.select.left + u.select.width, "x");
        span.value = [Math.max(0, Math.floor(from)), Math.ceil(Math.max(to, from + 20))];
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  };
  const plot = new uPlot(options, [[], []] as unknown as uPlot.AlignedData, place);
  let downAt = 0;
  plot.over.addEventListener("mousedown", (event) => (downAt = event.clientX));
  plot.over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - downAt) < 8) seek(Math.round(plot.posToVal(event.offsetX, "x")));
  });
  return plot;
}
