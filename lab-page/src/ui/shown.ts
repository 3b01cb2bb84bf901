// Panes that are off the screen are rendered after the picture, so that they do not delay it.

import { type ReadonlySignal, useComputed, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { lateView } from "../store";
import type { View } from "../view";

/** The view that a pane shows, and the ref of the pane's element. */
export function useShown(view: ReadonlySignal<View | null>) {
  const isOnScreen = useSignal(true), ref = useRef<HTMLElement>(null);
  useEffect(() => {
    const watcher = new IntersectionObserver(([entry]) => (isOnScreen.value = entry.isIntersecting));
    watcher.observe(ref.current!);
    return () => watcher.disconnect();
  }, []);
  const shown = useComputed(() => (isOnScreen.value ? view.value : lateView(view).value));
  return { shown, ref };
}
