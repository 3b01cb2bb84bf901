"""Flags that have other names now. Using one ends the command with a sentence that names the new flag."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from headway.errors import ConfigError

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
    "--dataset": ("--dataset-path",),
}


class Command(TyperCommand):
    """A command that names the new flag where it is given an old one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption, which Typer does not export
            old = getattr(error, "option_name", "")
            known = {flag for p in self.params for flag in (*p.opts, *p.secondary_opts)}
            new = [flag for flag in REPLACED.get(old, ()) if flag in known - {old}]
            if not new:
                raise
            raise ConfigError(f"there is no option {old}; use {' or '.join(new)}") from None
