// A canvas that follows the size of its place and is drawn again when signals change.

import { useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { paint } from "../colors";

export type Draw = (context: CanvasRenderingContext2D, width: number, height: number) => void;

interface Props {
  draw: Draw; // reads signals; runs again when one of them changes
  label: string;
  class?: string;
  onPoint?: (x: number, y: number, kind: "move" | "click") => void;
  onLeave?: () => void;
  onWheel?: (event: WheelEvent, x: number) => void;
}

export function Canvas({ draw, label, class: name, onPoint, onLeave, onWheel }: Props) {
  const ref = useRef<HTMLCanvasElement>(null);
  const size = useSignal<[number, number]>([0, 0]);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => {
      const { width, height } = entry.contentRect;
      size.value = [Math.round(width), Math.round(height)];
    });
    watcher.observe(ref.current!.parentElement!);
    return () => watcher.disconnect();
  }, []);
  useSignalEffect(() => {
    paint.value;
    const [width, height] = size.value, canvas = ref.current;
    if (!canvas || !width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    const context = canvas.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(context, width, height);
  });
  const point = (kind: "move" | "click") => (event: MouseEvent) =>
    onPoint?.(event.offsetX, event.offsetY, kind);
  return (
    <div class={`canvas ${name ?? ""}`}>
      <canvas
        ref={ref} role="img" aria-label={label} onMouseMove={point("move")} onClick={point("click")}
        onMouseLeave={onLeave} onWheel={onWheel && ((event) => onWheel(event, event.offsetX))}
      />
    </div>
  );
}
