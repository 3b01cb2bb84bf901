"""Shared fixtures, the marker `slow`, and the environment: one thread, kernels without a GPU."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from headway.engine.gc_freeze import gc_freeze
from headway.model.registry import resolve
from tests.support.forked_workers import ForkedRun
from tests.support.hypothesis_cache import fill_cache

if TYPE_CHECKING:
    from headway.model.backends.base import Backend
    from headway.model.decoder import Decoder
    from headway.model.devices import Device
    from headway.model.sharding import Shard
    from headway.model.weights.checkpoint import Checkpoint
    from headway.text.tokenizer import Tokenizer

# Settings of the user's shell that change what commands print, or where they connect to.
for name in ("HEADWAY_API_KEY", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("OTEL_")]:
    del os.environ[name]
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel; set before torch is imported
HAS_CUDA = shutil.which("nvidia-smi") is not None  # without torch, and before triton is imported
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell without job control ran `pytest &`
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis tries the same examples in every run of `make test`, and others in every run of `make
# soak`. Neither limits the time of an example, which depends on the machine.
TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", TIMELESS, derandomize=False, print_blob=True)
settings.register_profile("test", TIMELESS, derandomize=True)
settings.load_profile("test")

# `make test-fast` leaves these out: they load the model, start processes or simulate long runs.
SLOW = (
    "fleet/test_ray.py",
    "lab/recording/test_recording_state.py",
    "lab/recording/test_recording_truth.py",
    "lab/planner/test_capacity.py",
    "lab/planner/test_evaluator.py",
    "lab/planner/test_tune.py",
    "lab/profiling/test_fit.py",
    "lab/test_loadgen.py",
    "lab/test_stories.py",
    "lab/web/test_browser_controls.py",
    "lab/web/test_browser_live.py",
    "lab/web/test_browser_runs.py",
    "lab/web/test_browser_stories.py",
    "observe/test_live.py",
    "observe/test_observe.py",
    "observe/test_prometheus.py",
    "observe/test_spans.py",
    "record/test_replayed_runs.py",
    "record/test_sentences.py",
    "scheduler/test_fairness.py",
    "model/test_batch_invariance.py",
    "scheduler/test_listings.py",
    "scheduler/policies/test_output_lengths.py",
    "text/test_tokenizer.py",
)
HANDLED = (signal.SIGINT, signal.SIGTERM)
# Files of long tests that mostly wait for other processes: four minutes, half of them with Ray.
WAITING = (
    "fleet/test_ray.py",
    "fleet/test_fleet_kills.py",
    "fleet/test_fleet_processes.py",
    "fleet/test_keeper.py",
    "parallel/test_processes.py",
    "parallel/test_remote.py",
)
# Files that need the weights of the bundled model or transformers, which a process loads once.
LOADING = (
    "end_to_end/test_real_equality.py",
    "end_to_end/test_real_experts.py",
    "end_to_end/test_real_families.py",
    "end_to_end/test_real_run.py",
    "end_to_end/test_real_windows.py",
    "grammar/test_grammar.py",
    "model/test_batch_invariance.py",
    "model/test_model_config.py",
    "server/test_clients.py",
    "text/test_chat_template.py",
    "text/test_tokenizer.py",
)
DECODERS: dict[tuple[Path, str], Decoder] = {}  # see shared_weights
TOKENIZERS: dict[Path, Tokenizer | None] = {}
FROZEN = ExitStack()  # see pytest_collection


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect without garbage collection, which takes a fifth of the time; then freeze what is kept.

    Afterwards a full collection does not visit the tests and the imported modules. Collections are
    rarer than by default: in simulated runs they take a twentieth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(100_000, 10, 10)
        FROZEN.enter_context(gc_freeze())
        _let_loggers_propagate()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks of this process, if `--forks` asks for it and there is no CUDA."""
    count, options = session.config.getoption("forks"), session.config.option
    if count and not (HAS_CUDA or session.testsfailed or options.collectonly):
        ForkedRun(session, count, _fork_servers).run()
        return True
    _fork_servers()
    return None


def _fork_servers() -> None:
    """Fork the process whose forks are servers of tests, before there are threads."""
    if "tests.support.processes" in sys.modules and not HAS_CUDA:
        from tests.support.processes import start_forks

        start_forks()


def _let_loggers_propagate() -> None:
    """Pytest adds its handlers to every other logger three times per test; torch has 40 of them."""
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, metavar="COUNT", help="run the tests in forks")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in random order")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped for which reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason}")


def pytest_unconfigure() -> None:
    FROZEN.close()  # libraries report objects that are not collected at exit


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("forks"):
        fill_cache()
    for item in items:
        if item.path.as_posix().endswith(SLOW):
            item.add_marker("slow")
    if (seed := config.getoption("shuffle")) is not None:
        _shuffle(items, random.Random(seed))
        return
    _gather(items, LOADING)
    _move_waiting(items)


def _shuffle(items: list[pytest.Item], chance: random.Random) -> None:
    """Order files and the tests of each file at random; a file's tests share fixtures."""
    files = sorted({item.path for item in items})
    chance.shuffle(files)
    chance.shuffle(items)
    places = {path: place for place, path in enumerate(files)}
    items.sort(key=lambda item: places[item.path])


def _gather(items: list[pytest.Item], files: tuple[str, ...]) -> None:
    """Put the tests of these files one after the other, where the first of them is."""
    found = [item for item in items if item.path.as_posix().endswith(files)]
    if found:
        place, moved = items.index(found[0]), set(found)
        items[place:] = [*found, *(item for item in items[place:] if item not in moved)]


def _move_waiting(items: list[pytest.Item]) -> None:
    """Let the tests that wait begin early and one after the other, between two files.

    Processes start with equal parts of the list, and then take tests from the ends of other parts.
    A long test that begins last is waited for by all. While one process waits, the other two of
    `make test` keep two cores busy; if two wait, a core is idle.
    """
    waiting = [item for item in items if item.path.as_posix().endswith(WAITING)]
    waiting.sort(key=lambda item: not item.path.as_posix().endswith(WAITING[0]))
    moved = set(waiting)
    others = [item for item in items if item not in moved]
    # in the part of the second of three processes, after its first tests
    place = len(others) * 2 // 5
    while 0 < place < len(others) and others[place].path == others[place - 1].path:
        place += 1
    items[:] = [*others[:place], *waiting, *others[place:]]


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """A test that leaves a signal handler behind fails: later tests would not be interrupted."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    after = {number: signal.getsignal(number) for number in HANDLED}
    if after != before:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert after == before


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the default model."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with random weights and a tokenizer."""
    from tests.support.real import write_tiny  # imports torch

    return str(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def shared_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load weights and tokenizer of a model file once per process, for all LLMs on a CPU."""
    from headway import loading

    load_decoder, find_tokenizer = loading.load_decoder, loading.find_tokenizer

    def shared_tokenizer(path: Path) -> Tokenizer | None:
        if path.is_dir():  # a test may change it
            return find_tokenizer(path)
        if path not in TOKENIZERS:
            TOKENIZERS[path] = find_tokenizer(path)
        return TOKENIZERS[path]

    def shared(
        checkpoint: Checkpoint,
        backend: Backend,
        device: Device,
        progress: Any = None,
        shard: Shard | None = None,
    ) -> Decoder:
        if checkpoint.path is None or device.type != "cpu" or shard is not None:
            return load_decoder(checkpoint, backend, device, progress, shard)
        key = checkpoint.path, backend.name
        if key not in DECODERS:
            DECODERS[key] = load_decoder(checkpoint, backend, device, progress)
        return DECODERS[key]

    monkeypatch.setattr(loading, "load_decoder", shared)
    monkeypatch.setattr(loading, "find_tokenizer", shared_tokenizer)


@pytest.fixture
def small_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad passes less: padding rows are cheap on a GPU but slow in the interpreter."""
    if os.environ.get("TRITON_INTERPRET"):
        monkeypatch.setattr("headway.executor.gpu.mixed_pass.MIN_DECODES", 4)
        monkeypatch.setattr("headway.executor.gpu.mixed_pass.MIN_TOKENS", 8)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Make interpreted kernels faster."""
    if os.environ.get("TRITON_INTERPRET") and "triton.runtime.interpreter" in sys.modules:
        from tests.support.interpreter import speed_up  # imports torch

        speed_up()


@pytest.fixture(scope="session", autouse=True)
def shared_certificates() -> None:
    """Read the certificates of authorities once, and not for every client of httpx."""
    if (transports := sys.modules.get("httpx._transports.default")) is not None:
        transports.create_ssl_context = cache(transports.create_ssl_context)  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def tensors_without_meshes() -> None:
    """Let torch.testing compare without an import of distributed tensors, which takes a second."""
    if (comparison := sys.modules.get("torch.testing._comparison")) is not None:
        comparison._HAS_DTENSOR = False  # type: ignore[attr-defined]
