"""A film shows the state of the scheduler: after every plan, in every scenario, by seek and by play."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from headway.lab.film.builder import FilmBuilder
from headway.lab.film.format import FilmWriter, header_record
from headway.lab.film.live import LiveLines
from headway.lab.film.reader import Film
from headway.lab.film.state import FilmState, split
from headway.observe.trace import Line, describe_step, header
from headway.plan import StepReport
from headway.scheduler.policies.presets import describe
from tests.scheduler import decisions
from tests.support.film_states import note_states, shown


class Recorded:
    """A run with its trace and, for every line, the state of the scheduler after its plan."""

    def __init__(self, seed: int, watch_from: int = -1, **changes: Any) -> None:
        self.engine = decisions.engine_of(seed, **changes)
        self.live = LiveLines(self.engine)
        self.watched: dict[str, Any] | None = None
        self.lines: list[Line] = []
        self.states = note_states(self.engine.scheduler)
        self.engine.observers.append(
            lambda report: self.lines.append(describe_step(report, has_blocks=True))
        )
        scheduler = self.engine.scheduler
        step = self.engine.step

        def stepping() -> StepReport | None:
            report = step()
            if self.watched is None and 0 <= watch_from <= scheduler.num_steps:
                self.watched = self.live.start()
            elif self.watched:  # a viewer that calls is not dropped
                self.live._viewers[self.watched["viewer"]].seen = self.engine.clock.now()
            return report

        self.engine.step = stepping  # type: ignore[method-assign]
        decisions.run(self.engine, seed)


@cache
def recorded(seed: int) -> Recorded:
    """A run to its end, for tests that only read it."""
    return Recorded(seed)


def film_of(run: Recorded) -> Film:
    """The film of a run, written and read again in pieces."""
    config = run.engine.scheduler.config
    writer, film = FilmWriter(describe(config)), Film()
    data = header_record(header(config, run.engine.async_scheduling))
    for line in run.lines:
        data += writer.add(json.loads(json.dumps(line)))
        data = data[film.read(data) :]
    data += writer.finish(steps=len(run.lines))
    assert film.read(data) == len(data) and film.end == {"steps": len(run.lines)}
    return film


@pytest.mark.parametrize("seed", range(0, decisions.NUM_RUNS, 47))
def test_a_film_shows_the_state_of_the_scheduler_after_every_plan(seed: int) -> None:
    """By playing from start to end, and by seeking any frame."""
    check_film(recorded(seed), seed)


def check_film(run: Recorded, seed: int) -> None:
    film = film_of(run)
    ids = [request[0] for request in film.requests]
    played = FilmState(run.engine.scheduler.config.block_size)
    rng = random.Random(seed)
    for frame in range(film.num_frames):
        for op, args in split(film.ops(frame)):
            played.apply(op, args)
        step = film.column("step", frame)
        if step >= 0:
            assert shown(played, ids) == run.states[step], f"step {step}"
            assert film.column("running", frame) == run.lines[frame]["running"]
        if rng.random() < 0.1:
            assert shown(film.state(frame), ids) == shown(played, ids), f"frame {frame}"
    assert not played.requests and not played.refs
    assert played.num_finished == len(film.requests)


@pytest.mark.parametrize("seed", range(2, decisions.NUM_RUNS, 29))
def test_a_film_that_starts_in_the_middle_shows_the_same_states(seed: int) -> None:
    run = Recorded(seed, watch_from=random.Random(seed).randrange(2, 40))
    if run.watched is None:  # a short run
        return
    builder = FilmBuilder(run.engine.scheduler.config.block_size)
    builder.load(json.loads(json.dumps(run.watched["state"])))
    (lines, _), num_checked = run.live.take(run.watched["viewer"]), 0
    for line in lines:
        builder.add(line)
        if line["step"] in run.states and line["step"] not in run.watched["state"]["in_flight"]:
            ids = [entry.id for entry in builder.entries]
            found, expected = shown(builder.state, ids), run.states[line["step"]]
            assert found == expected, f"step {line['step']}"
            num_checked += 1
    assert num_checked > 0 or len(lines) < 3
    run.live.stop(run.watched["viewer"])
    assert not run.engine.observers[1:]


def test_a_film_of_an_idle_engine_has_no_requests_and_goes_on_later() -> None:
    run = recorded(0)
    config = run.engine.scheduler.config
    writer, film = FilmWriter(describe(config)), Film()
    film.read(header_record(header(config, run.engine.async_scheduling)))
    for line in run.lines:
        film.read(writer.add(line))
    film.read(writer.flush())
    writer.settle()
    writer.settle()  # has nothing to add
    film.read(writer.flush())
    frame = film.num_frames - 1
    assert frame == len(run.lines) and film.column("step", frame) == -1
    assert not film.state(frame).requests
    assert film.chunks[-1].times[-1].tolist() == [run.lines[-1]["end"]] * 3
    later = {**run.lines[0], "t": 1e3, "start": 1e3, "end": 1e3}
    film.read(writer.add(later) + writer.flush())
    assert film.state(frame + 1).requests
