// The whole page.

import { useSignal } from "@preact/signals";
import { exportFile } from "../hash";
import { reset, toggleTheme } from "../keys";
import {
  a, b, banner, canEdit, catalog, isComparing, isHelpOpen, isLive, viewA, viewB, whyNoEdit,
} from "../store";
import { hasOtherRequests, type Spec } from "../spec";
import { Blocks } from "./blocks";
import { Budget } from "./budget";
import { Charts } from "./charts";
import { Dialogs, isAdding, isForking } from "./dialogs";
import { Lanes } from "./lanes";
import { Log, Why } from "./log";
import { Machine } from "./machine";
import { Prose } from "./prose";
import { Requests } from "./requests";
import { Setup } from "./setup";
import { StoryPanel } from "./story";
import { Summary } from "./summary";
import { Transport } from "./transport";

export function App() {
  const isSetupOpen = useSignal(matchMedia("(min-width: 60rem)").matches);
  return (
    <>
      <Header />
      <Banner />
      <div class="page">
        <aside id="setup">
          <StoryPanel />
          <details
            class="card" open={isSetupOpen.value}
            onToggle={(event) => (isSetupOpen.value = event.currentTarget.open)}
          >
            <summary>Setup</summary>
            <Setup />
          </details>
          {!isLive.value && <Summary />}
        </aside>
        <main>
          <Transport />
          {isComparing.value ? <Two /> : <One />}
          <Charts />
        </main>
      </div>
      <Dialogs />
    </>
  );
}

function One() {
  return (
    <div class="panes one">
      <Budget view={viewA} name="" />
      <Requests view={viewA} name="" />
      <Blocks view={viewA} name="" />
      <Log view={viewA} name="" />
      <Why view={viewA} name="" />
      <Lanes view={viewA} name="" />
      <Machine view={viewA} name="" />
    </div>
  );
}

function Two() {
  const sides = [[viewA, a, ", first scheduler"], [viewB, b, ", second scheduler"]] as const;
  return (
    <div class="two">
      {sides.map(([view, side, name], i) => (
        <div class="panes half" key={name} data-side={i ? "b" : "a"}>
          <h2 class="side">
            {i ? "Second" : "First"}: {nameOf(side.spec.value, (i ? a : b).spec.value, i > 0)}
            <small>{view.value ? `step ${view.value.step}` : "loading"}</small>
          </h2>
          <Budget view={view} name={name} />
          <Requests view={view} name={name} />
          <Log view={view} name={name} />
          <Blocks view={view} name={name} />
          <Lanes view={view} name={name} />
          <Why view={view} name={name} />
          <Machine view={view} name={name} />
        </div>
      ))}
    </div>
  );
}

/** The scheduler of a spec in words; beside another one, only what differs. */
function nameOf(spec: Spec | null, other: Spec | null = null, isSecond = false): string {
  if (!spec) return "";
  const sets = Object.entries(spec.set ?? {}).filter(([key, value]) => other?.set?.[key] !== value);
  const changes = sets.map(([key, value]) => `${key} ${value}`);
  for (const { step, set } of spec.edits ?? []) {
    const values = Object.entries(set ?? {}).map((each) => each.join(" "));
    if (set) changes.push(`from step ${step} ${values.join(", ")}`);
  }
  if (isSecond && other && hasOtherRequests(spec, other)) changes.push("other requests");
  const preset = spec.trace ? `${spec.trace} as recorded` : (spec.preset ?? "headway");
  return [preset, ...changes.slice(-3)].join(", ");
}

function Header() {
  const header = a.recording.value?.header;
  const live = isLive.value ? "live server" : "";
  const title = header?.title ?? (isComparing.value ? "" : live || nameOf(a.spec.value));
  return (
    <header>
      <h1>Headway lab</h1>
      <span class="title">{catalog.value?.mode === "lab" || header || live ? title : ""}</span>
      <nav aria-label="Actions">
        <Action text="Add" hint="Add a request before the next step (a)" on={() => (isAdding.value = true)} />
        <Action
          text="Fork" hint="Change a policy from here on, and see both futures (f)"
          on={() => (isForking.value = true)}
        />
        <Action text="Reset" hint="Remove all changes and go to the first step (r)" on={reset} />
        <Action text="Export" hint="Save what is shown as one HTML file (e)" on={() => void exportFile()} />
        <button type="button" onClick={toggleTheme} aria-label="Light or dark" title="Light or dark (t)">
          ◐
        </button>
        <button type="button" onClick={() => (isHelpOpen.value = true)} aria-label="Keys" title="Keys (?)">
          ?
        </button>
      </nav>
    </header>
  );
}

function Action({ text, hint, on }: { text: string; hint: string; on: () => void }) {
  const isOff = !canEdit.value;
  return (
    <button type="button" disabled={isOff} title={isOff ? whyNoEdit.value : hint} onClick={on}>{text}</button>
  );
}

function Banner() {
  if (banner.value === null) return null;
  return (
    <div class="banner" role="alert">
      <Prose text={banner.value} />
      <button type="button" onClick={() => (banner.value = null)} aria-label="Dismiss">×</button>
    </div>
  );
}
