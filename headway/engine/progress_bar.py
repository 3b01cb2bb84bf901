"""A progress bar for batches of prompts, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(num_prompts: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr, only if it is a terminal; yields a function to call for each prompt."""
    if not is_shown:  # without the import, which takes longer than many a step
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not (console.is_terminal and num_prompts)) as bar:
        task = bar.add_task("Processed prompts", total=num_prompts)
        yield lambda: bar.advance(task)
