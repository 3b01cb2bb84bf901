// Colours for canvases: those of the style sheet, and one for each request.

import { signal } from "@preact/signals";

export const paint = signal(0); // grows when the theme changes
let values: CSSStyleDeclaration | null = null, isDark = false;

export function refreshColors(): void {
  values = getComputedStyle(document.documentElement);
  isDark = values.getPropertyValue("--is-dark").trim() === "1";
  paint.value = paint.peek() + 1;
}

/** A colour of the style sheet by its name, without the dashes. */
export function color(name: string): string {
  values ??= getComputedStyle(document.documentElement);
  return values.getPropertyValue(`--${name}`).trim();
}

/** The colour of a request. Neighbours differ by the golden angle. */
export function ownerColor(r: number): string {
  const hue = (210 + r * 137.508) % 360;
  return isDark ? `hsl(${hue} 58% 62%)` : `hsl(${hue} 60% 47%)`;
}
