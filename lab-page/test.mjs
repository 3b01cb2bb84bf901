// Bundles src/*.test.ts and runs them with node's test runner. RECORDINGS names a folder with recordings.
import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const folder = mkdtempSync(join(tmpdir(), "lab-page-"));
await build({
  entryPoints: readdirSync("src").filter((name) => name.endsWith(".test.ts")).map((name) => `src/${name}`),
  bundle: true, platform: "node", format: "esm", outdir: folder, outExtension: { ".js": ".mjs" },
});
const { status } = spawnSync(process.execPath, ["--test", folder], { stdio: "inherit" });
rmSync(folder, { recursive: true });
process.exit(status ?? 1);
