"""The options of `headway bench serve`, and the loads that they describe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from headway.checks import whole_number
from headway.cli.options.common import option
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

_load, _request, _trace = (partial(option, panel=name) for name in ("Load", "Requests", "Trace"))
INPUT_LEN = "Prompt tokens: 128, or a range such as 100-1024."
OUTPUT_LEN = "Output tokens: 64, or a range such as 16-256."


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

    base_url: str = option(
        "http://127.0.0.1:8000", "URL of the server; any server with the OpenAI API."
    )
    model: str | None = option(None, "Model name.", show_default="the first model of the server")
    api_key: str | None = option(None, "API key, sent as bearer token.", envvar="HEADWAY_API_KEY")
    timeout: float = option(600.0, "Seconds after which a request counts as failed.", min=0.001)
    prompts: str = _request(
        "ids",
        f"Kind of prompts: {', '.join(PATHS)}. ids and text use completions, chat uses chat "
        "completions.",
    )
    vocab_size: int = _request(32_000, "Upper limit of token ids.", min=257)
    temperature: float = _request(0.0, "Sampling temperature; 0 is greedy.", min=0.0)
    seed: int = _request(0, "Random seed of prompts and arrivals.", min=0)

    @property
    def address(self) -> Address:
        return Address.parse(self.base_url)

    def request_format(self) -> RequestFormat:
        """The form of the requests; queries the server for its model if none is given."""
        chosen = RequestFormat(
            model=self.model or "", kind=self.prompts, vocab_size=self.vocab_size,
            temperature=self.temperature, seed=self.seed,
        )  # fmt: skip
        return replace(chosen, model=self.model or find_model(self.address, self.api_key))


@dataclass(frozen=True, kw_only=True)
class LoadgenOptions:
    """Number, lengths and arrivals of the requests."""

    num_prompts: int | None = _load(
        None, "Number of requests of each load.", min=1, show_default="100; with --trace all"
    )
    request_rate: str | None = _load(
        None,
        "Requests per second, with Poisson arrivals; inf sends all at once. Several rates, e.g. "
        "1,2,4, are measured one after the other.",
        show_default="inf",
    )
    max_concurrency: str | None = _load(
        None,
        "Closed loop instead of a rate: keep this number of requests open. Several numbers, "
        "e.g. 1,4,16, are measured one after the other.",
    )
    trace: str | None = _load(
        None,
        "Arrivals and lengths from a workload file (Azure .csv, Mooncake or Headway .jsonl, "
        "decision trace) or a synthetic workload, e.g. 'arrivals=poisson(5),prompt=uniform(100,1024)'.",
    )
    input_len: str = _load("128", INPUT_LEN)
    output_len: str = _load("64", OUTPUT_LEN)
    speed: float = _trace(1.0, "Divide arrival times by this factor.")
    max_input_len: int | None = _trace(None, "Truncate prompts to this number of tokens.", min=1)
    max_output_len: int | None = _trace(None, "Truncate outputs to this number of tokens.", min=1)

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
            return
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
