// Colours for canvases: those of the style sheet, and one for each request.

import { signal } from "@preact/signals";

export const paint = signal(0); // grows when the theme changes
const known = new Map<string, string>(); // reading a style is slow
const owners = new Map<number, string>();
let isDark = false;

export function refreshColors(): void {
  known.clear();
  owners.clear();
  isDark = color("is-dark") === "1";
  paint.value = paint.peek() + 1;
}

/** A colour of the style sheet by its name, without the dashes. */
export function color(name: string): string {
  let value = known.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    known.set(name, value);
  }
  return value;
}

/** The colour of a request, as light as all others. Neighbours differ by the golden angle. */
export function ownerColor(r: number): string {
  let value = owners.get(r);
  if (value === undefined) {
    const hue = Math.round(250 + r * 137.508) % 360;
    value = isDark ? `oklch(0.75 0.12 ${hue})` : `oklch(0.57 0.14 ${hue})`;
    owners.set(r, value);
  }
  return value;
}
