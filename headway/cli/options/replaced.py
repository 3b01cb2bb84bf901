"""Flags that have other names now. Using one ends the command with a sentence that names the new flag."""

from __future__ import annotations

# A command that has the old name itself, such as --max-tokens of `headway generate`, accepts it.
REPLACED = {
    "--max-requests": ("--max-num-seqs",),
    "--max-tokens": ("--max-num-batched-tokens",),
    "--max-length": ("--max-model-len",),
    "--max-new-tokens": ("--max-tokens",),
    "--decode-steps": ("--num-scheduler-steps",),
    "--depth": ("--async-scheduling", "--no-async-scheduling"),
    "--precision": ("--dtype", "--quantization"),
    "--samples": ("-n",),
    "--api-workers": ("--api-server-count",),
    "--cors-origin": ("--allowed-origins",),
    "--url": ("--base-url",),
    "--rate": ("--request-rate",),
    "--concurrency": ("--max-concurrency",),
    "--dataset": ("--dataset-name", "--dataset-path"),
}
