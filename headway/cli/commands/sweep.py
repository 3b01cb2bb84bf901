"""`headway plan sweep` and `breakeven`: simulations over knobs, and swap against recompute."""

from __future__ import annotations

from dataclasses import MISSING, asdict
from pathlib import Path

from rich.console import Console

from headway.cli.options import planner as planner_options
from headway.cli.options.common import JSON, argument, option, progress_bar
from headway.cli.options.planner import PLOT
from headway.cli.options.simulation import DEFAULT_WORKLOAD, PROFILE, SimulationFlags
from headway.cli.view import render
from headway.lab.cost import load_profile
from headway.lab.film.spec import DEFAULT_PROFILE
from headway.lab.planner import breakeven, sweep
from headway.lab.planner.space import KNOBS, WORKLOAD_KNOBS, check, parse_knobs, points, text_of

BREAKEVEN_TERMS = (
    "swap: the copies out and in. recompute: the time that the tokens add to steps that run anyway. "
    "recompute alone: in a step of their own."
)


def sweep_command(
    knobs: list[str] = argument(
        MISSING,
        "name=value,value: a number, a slot such as chunk=at_most(512),split_any, preset, speed or "
        "seed. All combinations are run.",
    ),
    workload: str = option(
        DEFAULT_WORKLOAD, "Workload file or text, as for `headway simulate`.", "--workload", "-w"
    ),
    metric: str = option(
        "output_tokens_per_second", "What is plotted: a number of the JSON report, e.g. ttft.p99."
    ),
    plot: Path | None = PLOT,
    json_: bool = JSON,
    *,
    runs: planner_options.RunOptions,
    simulation: SimulationFlags,
) -> None:
    """Simulate every combination of settings on one workload, as a table and a plot."""
    planner_options.check_plot(plot)
    machine, base = simulation.machine, simulation.settings
    work = simulation.workload(workload)
    with runs.evaluator() as evaluator:
        space = check(parse_knobs(knobs, (*KNOBS, *WORKLOAD_KNOBS)), base, machine)
        sweep.check_metric(metric, base, machine)
        with progress_bar("simulating", len(points(space))) as evaluator.advance:
            results = sweep.run_sweep(
                space, base, machine, work, evaluator, simulation.async_scheduling
            )
    num_seeds = len(space.get("seed", ()))
    shown = sweep.over_seeds(results) if num_seeds > 1 and len(space) > 1 else results
    drawn = sweep.plot_of(shown, metric)
    if json_:
        reports = [{"knobs": each.knobs, **each.outcome.summary} for each in results]
        render.print_json({**planner_options.described(machine), "runs": reports})
    else:
        means = f", means over {num_seeds} seeds" if shown is not results else ""
        _print_sweep(f"{len(results)} runs on {machine.name}{means}", shown, metric)
        planner_options.print_end(drawn, machine)
    planner_options.save_plot(drawn, plot)


def _print_sweep(title: str, results: list[sweep.SweepPoint], metric: str) -> None:
    rows = {", ".join(map(str, each.knobs.values())): each.outcome.summary for each in results}
    Console().print(render.comparison(title, rows, header=", ".join(results[0].knobs)))
    if metric != "output_tokens_per_second":
        return
    best = max(results, key=lambda each: sweep.metric_of(each.outcome.summary, metric))
    Console().print(f"\nmost output tokens per second: {text_of(best.knobs)}", highlight=False)


def breakeven_command(
    profile: str = option(DEFAULT_PROFILE, PROFILE, "--profile"),
    plot: Path | None = PLOT,
    json_: bool = JSON,
) -> None:
    """Compare swapping with recomputing a preempted request, by its length."""
    planner_options.check_plot(plot)
    machine = load_profile(profile)
    rows, at, drawn = breakeven.table(machine), breakeven.crossing(machine), breakeven.plot(machine)
    if json_:
        lines = [{**asdict(row), "cheaper": row.cheaper} for row in rows]
        render.print_json({**planner_options.described(machine), "crossing": at, "rows": lines})
    else:
        columns = ("tokens", "swap", "recompute", "recompute alone", "cheaper")
        times = [map(render.seconds, (r.swap, r.recompute, r.recompute_alone)) for r in rows]
        cells = [(f"{r.tokens:,}", *t, r.cheaper) for r, t in zip(rows, times, strict=True)]
        Console().print(render.table(columns, cells, None))
        found = f"a swap is cheaper from {at:,} tokens up" if at else "a swap is never cheaper"
        Console().print(f"\nOn {machine.name} {found}. {BREAKEVEN_TERMS}", highlight=False)
        planner_options.print_end(drawn, machine)
    planner_options.save_plot(drawn, plot)
