// Builds the page into headway/lab/web/static/ (or the folder given as argument). The same sources
// give the same bytes. SOURCES.sha256 has the hash of the sources; a test compares it.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "../headway/lab/web/static");
const PACKAGES = ["preact", "@preact/signals", "@preact/signals-core", "uplot"];

function sources(folder, prefix = "") {
  const found = [];
  for (const entry of readdirSync(folder, { withFileTypes: true })) {
    const name = prefix + entry.name;
    if (entry.isDirectory() && entry.name !== "node_modules") {
      found.push(...sources(join(folder, entry.name), `${name}/`));
    } else if (entry.isFile()) found.push(name);
  }
  return found.sort();
}

function hashOfSources() {
  const hash = createHash("sha256");
  for (const name of sources(here)) {
    hash.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
  }
  return hash.digest("hex");
}

function licenses() {
  const texts = PACKAGES.map((name) => {
    const text = readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim();
    return `${name}\n\n${text}\n`;
  });
  return `app.js contains these packages.\n\n${texts.join("\n---\n\n")}`;
}

mkdirSync(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome111", "firefox115", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
});
writeFileSync(join(out, "index.html"), readFileSync(join(here, "src/index.html")));
writeFileSync(join(out, "licenses.txt"), licenses());
writeFileSync(join(out, "SOURCES.sha256"), `${hashOfSources()}\n`);
