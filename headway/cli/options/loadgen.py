"""The options of `headway bench serve`, and how they become loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from headway.cli.options.common import load_workload
from headway.errors import ConfigError
from headway.lab.bench import parse_span
from headway.lab.loadgen.http_client import Address
from headway.lab.loadgen.load import find_model
from headway.lab.loadgen.requests import KINDS, Wording, at_rate, cut, random_jobs
from headway.lab.workload.jobs import Job

LOAD, REQUESTS, TRACE = "Load", "Requests", "Trace"


def _load(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=LOAD, **more)


def _asks(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=REQUESTS, **more)


def _trace(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=TRACE, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load: jobs at their times, or so many at once."""

    jobs: list[Job]
    rate: float | None = None
    concurrency: int | None = None

    @property
    def title(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return "trace" if self.rate is None else f"rate {self.rate:g}"


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """Which server, and what its requests are like."""

    url: Annotated[str, typer.Option(help="The server: any that speaks OpenAI's API.")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[
        str | None, typer.Option(help="Its model.", show_default="the first it names")
    ] = None
    api_key: Annotated[
        str | None, typer.Option(help="Sent as a bearer token.", envvar="HEADWAY_API_KEY")
    ] = None
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a request has failed.", min=0.001)
    ] = 600.0
    prompts: Annotated[
        str, _asks(f"{', '.join(KINDS)}: token ids or text for completions, or chat messages.")
    ] = "ids"
    vocab_size: Annotated[int, _asks("Token ids are below this.", min=257)] = 32_000
    temperature: Annotated[float, _asks("0 is greedy.", min=0.0)] = 0.0
    seed: Annotated[int, _asks("For the same prompts and arrivals again.", min=0)] = 0

    @property
    def address(self) -> Address:
        return Address.parse(self.url)

    def wording(self) -> Wording:
        """How jobs are put to the server; asks it for its model's name if none was given."""
        chosen = Wording(
            model=self.model or "", kind=self.prompts, vocab_size=self.vocab_size,
            temperature=self.temperature, seed=self.seed,
        )  # fmt: skip
        return chosen if self.model else chosen.of_model(find_model(self.address, self.api_key))


@dataclass(frozen=True, kw_only=True)
class LoadgenOptions:
    """How many requests, of which lengths, and when."""

    num_prompts: Annotated[
        int | None, _load("Requests of each load.", min=1, show_default="100; of a trace: all")
    ] = None
    rate: Annotated[
        str | None,
        _load(
            "Requests a second, Poisson arrivals. Several, e.g. 1,2,4, are measured one after the "
            "other; inf sends all at once.",
            show_default="inf",
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        _load("Instead: so many at once, a new one when one ends; one or several, e.g. 1,4,16."),
    ] = None
    trace: Annotated[
        str | None,
        _load(
            "Instead: arrivals and lengths of a file (Azure .csv, Mooncake or Headway .jsonl), or "
            "of a synthetic workload, e.g. 'arrivals=poisson(5),prompt=uniform(100,1024)'."
        ),
    ] = None
    input_len: Annotated[str, _load("Prompt tokens: 128, or a range such as 100-1024.")] = "128"
    output_len: Annotated[str, _load("Output tokens: 64, or a range such as 16-256.")] = "64"
    speed: Annotated[float, _trace("Arrivals so many times as fast.")] = 1.0
    max_input_len: Annotated[int | None, _trace("Cut prompts to this.", min=1)] = None
    max_output_len: Annotated[int | None, _trace("Cut outputs to this.", min=1)] = None

    def runs(self, seed: int) -> list[Run]:
        """One load for a trace, or one for each rate or concurrency."""
        chosen = [name for name in ("rate", "concurrency", "trace") if getattr(self, name)]
        if len(chosen) > 1:
            raise ConfigError(f"give one of --{' and --'.join(chosen)}, not both")
        if self.trace is not None:
            jobs = load_workload(self.trace, self.num_prompts, self.speed, None)
            return [Run(jobs=[cut(job, self.max_input_len, self.max_output_len) for job in jobs])]
        return list(self._runs(seed))

    def _runs(self, seed: int) -> Iterator[Run]:
        spans = parse_span("input-len", self.input_len), parse_span("output-len", self.output_len)

        def jobs(number: int) -> list[Job]:
            return random_jobs(self.num_prompts or 100, *spans, seed + number)

        if self.concurrency is not None:
            for number, many in enumerate(_numbers("concurrency", self.concurrency)):
                yield Run(jobs=jobs(number), concurrency=_whole(many))
        else:
            for number, rate in enumerate(_numbers("rate", self.rate or "inf")):
                yield Run(jobs=at_rate(jobs(number), rate, seed + number), rate=rate)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} must be a number, or several such as 1,4,16: {text!r}") from None


def _whole(number: float) -> int:
    if number < 1 or number != int(number):
        raise ConfigError(f"concurrency must be a whole number of at least 1, not {number:g}")
    return int(number)
