// The keyboard: every control has a key.

import {
  a, canRun, canEdit, chosenState, edit, isComparing, isHelpOpen, open, partsAt, play, runAgain, seek,
  seekEnd, seekMark, seekTime, select, selected, speed, stepBy, sync, theme, viewA,
} from "./store";
import { exportFile } from "./hash";
import { isAdding, isForking } from "./ui/dialogs";
import { toggleSecond } from "./ui/scheduler";
import { currentStory, openStory } from "./ui/story";

export const KEYS: [string, string][] = [
  ["→ n", "run one step"], ["← b", "back one step"], ["shift+→ shift+←", "ten steps"],
  ["] [", "next, previous decision that matters"], ["space", "play or pause"], ["+ -", "faster, slower"],
  ["Home End", "first, last step"], ["j", "jump to a step"], ["↓ ↑", "select the next, previous request"],
  ["w", "why? Go to the selected request"], ["a", "add a request here"], ["x", "abort the selected request"],
  ["c", "compare with a second scheduler"], ["f", "fork: change a policy here"],
  ["p", "jump to where the two part"], ["s", "show both by step or by time"], ["r", "reset"],
  ["g", "run again"], ["m", "go to the setup"], ["e", "export as one file"], ["t", "light or dark"],
  ["Esc", "clear the selection"],
  ["?", "this list"],
];

const SPEEDS = [1, 2, 5, 10, 20, 60, 200, 1000];

function faster(way: 1 | -1): void {
  const at = SPEEDS.findIndex((each) => each >= speed.value);
  speed.value = SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, at + way))];
}

/** Select the next or previous open request. */
function nextRequest(way: 1 | -1): void {
  const view = viewA.value;
  if (!view) return;
  const { running, waiting, swapped, finished } = view.groups;
  const ids = [running, waiting, swapped, finished].flat().map((r) => view.recording.entries[r].id);
  const at = selected.value === null ? -1 : ids.indexOf(selected.value);
  const next = at < 0 ? (way > 0 ? 0 : ids.length - 1) : (at + way + ids.length) % ids.length;
  if (ids.length) selected.value = ids[next];
}

export function reset(): void {
  const story = currentStory();
  if (story && canRun.value) openStory(story);
  else if (a.spec.value && canRun.value) open({ ...a.spec.value, edits: [] }, null, 0);
  seek(0);
}

export function toggleTheme(): void {
  const isDark = getComputedStyle(document.documentElement).getPropertyValue("--is-dark").trim() === "1";
  theme.value = isDark ? "light" : "dark";
}

function toggleSync(): void {
  if (!isComparing.value) return;
  sync.value = sync.value === "step" ? "time" : "step";
  if (sync.value === "time" && viewA.value) seekTime(viewA.value.time);
}

function focus(id: string): void {
  const element = document.getElementById(id);
  element?.scrollIntoView({ block: "nearest" });
  const inner = element?.querySelector<HTMLElement>("select, input, button");
  (element?.matches("input, select, summary") ? element : inner)?.focus();
}

const ACTIONS: Record<string, () => void> = {
  ArrowRight: () => stepBy(1), n: () => stepBy(1), ".": () => stepBy(1),
  ArrowLeft: () => stepBy(-1), b: () => stepBy(-1), ",": () => stepBy(-1),
  "shift+ArrowRight": () => stepBy(10), "shift+ArrowLeft": () => stepBy(-10),
  "]": () => seekMark(1), "[": () => seekMark(-1), " ": () => play(),
  "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1), Home: () => seek(0), End: seekEnd,
  j: () => focus("jump"), ArrowDown: () => nextRequest(1), ArrowUp: () => nextRequest(-1),
  w: () => { if (selected.value === null) nextRequest(1); focus("why"); },
  a: () => { if (canEdit.value) isAdding.value = true; },
  x: () => { if (canEdit.value && selected.value !== null) edit({ abort: selected.value }); },
  c: toggleSecond, f: () => { if (canEdit.value) isForking.value = true; },
  p: () => { if (partsAt.value >= 0) seek(partsAt.value); }, s: toggleSync, r: reset,
  g: () => { if (canEdit.value) runAgain(); }, m: () => focus("setup"),
  e: () => { if (canEdit.value) void exportFile(); }, t: toggleTheme,
  Escape: () => { select(null); chosenState.value = null; },
  "?": () => (isHelpOpen.value = !isHelpOpen.value),
};

export function listen(): void {
  releasePointer();
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const target = event.target as HTMLElement, isEscape = event.key === "Escape";
    if (document.querySelector("dialog[open]")) {
      if (event.key === "?" && isHelpOpen.value) isHelpOpen.value = false;
      return;
    }
    if (isEscape) target.blur();
    else if (target.matches("input, textarea, select") && !isStep(target, event.key)) return;
    else if (target.matches("button, summary, [role=button]") && [" ", "Enter"].includes(event.key)) return;
    const isArrow = event.key.startsWith("Arrow") && event.shiftKey;
    const action = ACTIONS[isArrow ? `shift+${event.key}` : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

/** After a choice with the mouse, keys move through the run again, and not through the list. */
function releasePointer(): void {
  let isPointer = false;
  addEventListener("pointerdown", () => (isPointer = true), true);
  addEventListener("keydown", () => (isPointer = false), true);
  addEventListener("change", ({ target }) => {
    if (isPointer && (target as HTMLElement).matches("select, [type=radio], [type=range]")) {
      (target as HTMLElement).blur();
    }
  });
}

/** On a checkbox, a radio button or the scrubber, keys that the control does not use still work. */
function isStep(target: HTMLElement, key: string): boolean {
  const kind = target.getAttribute("type");
  if (kind === "checkbox") return key !== " ";
  if (kind === "radio") return key !== " " && !key.startsWith("Arrow");
  return kind === "range" && !key.startsWith("Arrow") && !["Home", "End"].includes(key);
}
