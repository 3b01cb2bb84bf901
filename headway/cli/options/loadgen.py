"""The options of `headway bench serve`, and the loads that they describe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from headway.checks import whole_number
from headway.cli.options.common import panel
from headway.errors import ConfigError
from headway.lab.loadgen.http_client import Address
from headway.lab.loadgen.load import find_model
from headway.lab.loadgen.requests import (
    PATHS,
    RequestFormat,
    parse_length_range,
    random_requests,
    truncate,
    with_poisson_arrivals,
)
from headway.lab.workload.files import load_workload
from headway.lab.workload.request import WorkloadRequest

_load, _request, _trace = panel("Load"), panel("Requests"), panel("Trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """One load: requests at their arrival times, or in a closed loop of some concurrency."""

    requests: list[WorkloadRequest]
    rate: float | None = None
    concurrency: int | None = None

    @property
    def title(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return "trace" if self.rate is None else f"rate {self.rate:g}"


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The server, and the form of the requests."""

    base_url: Annotated[
        str, typer.Option(help="URL of the server; any server with the OpenAI API.")
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None,
        typer.Option(help="Model name.", show_default="the first model of the server"),
    ] = None
    api_key: Annotated[
        str | None, typer.Option(help="API key, sent as bearer token.", envvar="HEADWAY_API_KEY")
    ] = None
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a request counts as failed.", min=0.001)
    ] = 600.0
    prompts: Annotated[
        str,
        _request(
            f"Kind of prompts: {', '.join(PATHS)}. ids and text use completions, chat uses chat "
            "completions."
        ),
    ] = "ids"
    vocab_size: Annotated[int, _request("Upper limit of token ids.", min=257)] = 32_000
    temperature: Annotated[float, _request("Sampling temperature; 0 is greedy.", min=0.0)] = 0.0
    seed: Annotated[int, _request("Random seed of prompts and arrivals.", min=0)] = 0

    @property
    def address(self) -> Address:
        return Address.parse(self.base_url)

    def request_format(self) -> RequestFormat:
        """The form of the requests; queries the server for its model if none is given."""
        chosen = RequestFormat(
            model=self.model or "", kind=self.prompts, vocab_size=self.vocab_size,
            temperature=self.temperature, seed=self.seed,
        )  # fmt: skip
        model = self.model or find_model(self.address, self.api_key)
        return replace(chosen, model=model)


@dataclass(frozen=True, kw_only=True)
class LoadgenOptions:
    """Number, lengths and arrivals of the requests."""

    num_prompts: Annotated[
        int | None,
        _load("Number of requests of each load.", min=1, show_default="100; with --trace all"),
    ] = None
    request_rate: Annotated[
        str | None,
        _load(
            "Requests per second, with Poisson arrivals; inf sends all at once. Several rates, e.g. "
            "1,2,4, are measured one after the other.",
            show_default="inf",
        ),
    ] = None
    max_concurrency: Annotated[
        str | None,
        _load(
            "Closed loop instead of a rate: keep this number of requests open. Several numbers, "
            "e.g. 1,4,16, are measured one after the other."
        ),
    ] = None
    trace: Annotated[
        str | None,
        _load(
            "Arrivals and lengths from a workload file (Azure .csv, Mooncake or Headway .jsonl, "
            "decision trace) or a synthetic workload, e.g. 'arrivals=poisson(5),prompt=uniform(100,1024)'."
        ),
    ] = None
    input_len: Annotated[str, _load("Prompt tokens: 128, or a range such as 100-1024.")] = "128"
    output_len: Annotated[str, _load("Output tokens: 64, or a range such as 16-256.")] = "64"
    speed: Annotated[float, _trace("Divide arrival times by this factor.")] = 1.0
    max_input_len: Annotated[
        int | None, _trace("Truncate prompts to this number of tokens.", min=1)
    ] = None
    max_output_len: Annotated[
        int | None, _trace("Truncate outputs to this number of tokens.", min=1)
    ] = None

    def loads(self, seed: int) -> list[LoadSpec]:
        """One load for a trace, or one for each rate or concurrency."""
        names = ("request_rate", "max_concurrency", "trace")
        chosen = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} cannot be combined; give one of them")
        if self.trace is not None:
            requests = load_workload(self.trace, self.num_prompts, self.speed, None)
            limits = self.max_input_len, self.max_output_len
            return [LoadSpec(requests=[truncate(request, *limits) for request in requests])]
        return list(self._loads(seed))

    def _loads(self, seed: int) -> Iterator[LoadSpec]:
        lengths = (
            parse_length_range("input-len", self.input_len),
            parse_length_range("output-len", self.output_len),
        )

        def requests(place: int) -> list[WorkloadRequest]:
            return random_requests(self.num_prompts or 100, *lengths, seed + place)

        if self.max_concurrency is not None:
            name = "max-concurrency"
            for place, value in enumerate(_numbers(name, self.max_concurrency)):
                whole = int(value) if value.is_integer() else value
                yield LoadSpec(requests=requests(place), concurrency=whole_number(name, whole, 1))
        else:
            for place, rate in enumerate(_numbers("request-rate", self.request_rate or "inf")):
                arriving = with_poisson_arrivals(requests(place), rate, seed + place)
                yield LoadSpec(requests=arriving, rate=rate)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{name} must be a number or a list such as 1,4,16, not {text!r}"
        ) from None
