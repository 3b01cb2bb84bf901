// Starts the page: reads the catalog, then the run that the URL names.

import { effect } from "@preact/signals";
import { render } from "preact";
import { embeddedCatalog, embeddedHash, fetchCatalog, hasEmbedded } from "./api";
import { refreshColors } from "./colors";
import { followHash, fromHash, type Link } from "./hash";
import { listen } from "./keys";
import type { Catalog } from "./spec";
import { a, b, banner, catalog, isFollowing, isLive, load, open, theme, want } from "./store";
import { App } from "./ui/app";
import "./app.css";

const EMPTY: Catalog = {
  mode: "export", presets: {}, slots: {}, numbers: {}, profiles: [], stories: [], traces: [], default: {},
  states: {}, version: "",
};

function openLink({ spec, other, frame, isDamaged }: Link): void {
  const known = catalog.value;
  const usual = known?.traces.length ? { trace: known.traces[0].name } : known?.default;
  if (known?.mode === "lab") open(spec ?? usual!, spec ? other : null, frame ?? 0);
  else if (frame !== null) want(frame);
  if (isDamaged) banner.value = "The link is damaged, so the default run is shown. Ask for the link again.";
}

async function openEmbedded(link: Link): Promise<void> {
  catalog.value = { ...EMPTY, ...embeddedCatalog(), mode: "export" };
  a.spec.value = link.spec;
  want(link.frame ?? 0);
  await load(a, { kind: "embedded", id: "recording0" });
  if (!hasEmbedded("recording1")) return;
  b.spec.value = link.other ?? {};
  await load(b, { kind: "embedded", id: "recording1" });
}

async function openLive(link: Link): Promise<void> {
  isLive.value = true;
  isFollowing.value = link.frame === null;
  if (link.frame !== null) want(link.frame);
  await load(a, { kind: "live" });
}

async function start(): Promise<void> {
  const isExported = hasEmbedded("recording0");
  if (!isExported) {
    try {
      catalog.value = await fetchCatalog();
    } catch {
      banner.value = "The lab's server cannot be reached. Start `headway lab` again and reload the page.";
      return;
    }
  }
  const link = fromHash(location.hash || embeddedHash());
  if (isExported) void openEmbedded(link);
  else if (catalog.value?.mode === "lab") openLink(link);
  else void openLive(link);
  followHash(openLink); // only now: the hash is the link until it is opened
}

effect(() => {
  const root = document.documentElement;
  if (theme.value === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme.value;
  refreshColors();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refreshColors);
listen();
const place = document.getElementById("app")!;
place.replaceChildren();
render(<App />, place);
void start();
