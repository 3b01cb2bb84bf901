"""`headway plan tune`: the best settings of a scheduler for a profile, a workload and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from headway.cli.options import planner as planner_options
from headway.cli.options.common import JSON, argument, option, progress_bar
from headway.cli.options.packages import check_extras
from headway.cli.options.planner import PLOT
from headway.cli.options.simulation import DEFAULT_WORKLOAD, WORKLOAD, SimulationFlags
from headway.cli.view import render
from headway.lab.planner import advice
from headway.lab.planner.evaluate import Evaluator, make_config
from headway.lab.planner.search import TuneQuestion
from headway.lab.planner.space import check, default_space, parse_knobs, text_of
from headway.lab.planner.targets import redundant
from headway.lab.planner.tune import Answer, Change, Verified, compare, complete, tune
from headway.lab.real.run import FITTING, run_workload
from headway.lab.simulate import with_profile
from headway.lab.summary import summarize
from headway.lab.svg import Curve, Plot

TEXTS = ("settings", "instead of")  # columns aligned left


class Commands(NamedTuple):
    """The best settings as command lines to paste."""

    headway: str
    vllm: str
    without_vllm_counterpart: list[str]
    lab: str | None


def tune_command(
    workload: str = argument(DEFAULT_WORKLOAD, WORKLOAD),
    knob: list[str] | None = option(
        None, "Search only these knobs: name=value,value. May be repeated.", "--knob"
    ),
    budget: int = option(
        60, "How much to simulate, in runs of the whole workload.", min=1, max=100_000
    ),
    seed: int = option(0, "Of the search and the fresh seeds.", min=0),
    verify: str | None = option(
        None,
        "Run the best settings on a real model, in real time, and compare with the prediction. "
        "The profile must be that of the model on this machine.",
        metavar="MODEL",
    ),
    plot: Path | None = PLOT,
    json_: bool = JSON,
    *,
    targets: planner_options.TargetOptions,
    runs: planner_options.RunOptions,
    simulation: SimulationFlags,
) -> None:
    """Find the best settings for a workload subject to latency targets, and say why.

    Scheduler options are fixed; all other settings are searched.
    """
    planner_options.check_plot(plot)
    if verify:
        check_extras("--verify", "torch")
    with runs.evaluator() as evaluator:
        base, machine = simulation.settings, simulation.machine
        asked = simulation.workload(workload)
        space = parse_knobs(knob or ()) or default_space(
            make_config(base, machine), has_drafts=asked.has_drafts
        )
        free = {name: values for name, values in space.items() if name not in simulation.changes}
        question = TuneQuestion(
            profile=machine, workload=asked, base=base,
            targets=planner_options.read_targets(targets), space=check(free, base, machine),
            async_scheduling=simulation.async_scheduling,
        )  # fmt: skip
        with progress_bar("simulating", budget) as evaluator.advance:
            answer = tune(question, evaluator, budget=budget, seed=seed)
        verified = _verified(question, answer, evaluator, verify) if verify else []
    drawn, commands = _pareto_plot(answer), _commands(question, answer, simulation.profile)
    if json_:
        render.print_json(_described(question, answer, verified, commands))
    else:
        _print(Console(highlight=False), question, answer, verified, commands)
        planner_options.print_end(drawn, machine)
    planner_options.save_plot(drawn, plot)


def _verified(
    question: TuneQuestion, answer: Answer, evaluator: Evaluator, model: str
) -> list[Verified]:
    """The best settings, predicted and measured; the workload runs in real time."""
    from headway.llm import LLM

    job = replace(question.job(answer.settings), targets=())
    (predicted,) = evaluator.run([job])
    config = with_profile(make_config(job.settings, job.profile), job.profile)
    requests = question.workload.requests()
    sizes = {name: getattr(config, name) for name in FITTING}
    with LLM(model, **sizes) as llm, progress_bar("measuring", len(requests)) as progress:
        stats = run_workload(
            llm, requests, config, async_scheduling=job.async_scheduling, progress=progress
        )
    return compare(predicted.summary, summarize(stats))


def _pareto_plot(answer: Answer) -> Plot:
    """Throughput of the device against the speed that a user sees."""
    at = tuple((p.tokens_per_second_per_user, p.tokens_per_second) for p in answer.pareto)
    curve = Curve(name="settings that no others beat in both", points=at)
    return Plot(title="Pareto front", x="tokens/s per user", y="tok/s", curves=(curve,))


def _commands(question: TuneQuestion, answer: Answer, profile: str) -> Commands:
    best = complete(question, answer.settings)
    vllm = advice.vllm_command(best, async_scheduling=question.async_scheduling)
    text = question.workload.text
    return Commands(
        advice.serve_command({**question.base, **answer.settings}), *vllm,
        advice.lab_command(question.base, answer.settings, text, profile),
    )  # fmt: skip


def _described(
    question: TuneQuestion, answer: Answer, verified: Sequence[Verified], commands: Commands
) -> dict[str, object]:
    values = asdict(answer)
    for name in ("before", "after"):
        values[name] = [finding._asdict() for finding in getattr(answer, name)]
    values["objective"] = answer.objective.text
    return {
        **planner_options.described(question.profile), "base": question.base,
        "targets": {target.name: target.seconds for target in question.targets}, **values,
        "commands": commands._asdict(),
        **({"verified": [each._asdict() for each in verified]} if verified else {}),
    }  # fmt: skip


def _print(
    console: Console,
    question: TuneQuestion,
    answer: Answer,
    verified: Sequence[Verified],
    commands: Commands,
) -> None:
    console.print(f"[bold]Best settings on {question.profile.name}[/]")
    console.print(f"  {text_of(answer.settings)}", markup=False)
    console.print(f"\n{answer.objective.text}")
    console.print(f"Simulated: {answer.num_settings} settings, {answer.cost:.0f} full runs.")
    for note in redundant(question.targets):
        console.print(f"Note: {note}.")
    _print_gain(console, question, answer)
    _print_why(console, answer)
    console.print("\n[bold]Pareto front[/]")
    console.print(render.table(("tok/s", "tok/s per user", "settings"), [
        (f"{p.tokens_per_second:,.0f}", f"{p.tokens_per_second_per_user:.1f}", text_of(p.settings))
        for p in answer.pareto
    ], TEXTS))  # fmt: skip
    console.print("\n[bold]Commands[/]")
    for command in filter(None, (commands.headway, commands.vllm, commands.lab)):
        console.print(advice.wrapped(command), markup=False, soft_wrap=True)
    if rest := commands.without_vllm_counterpart:
        console.print(f"vllm serve has no counterpart of {', '.join(rest)}.", markup=False)
    if verified:
        console.print("\n[bold]Predicted and measured[/]")
        console.print(render.table(("", "predicted", "measured", "error"), [
            (v.name, f"{v.predicted:.4g}", f"{v.measured:.4g}", f"{v.error:+.1%}") for v in verified
        ], TEXTS))  # fmt: skip


def _print_gain(console: Console, question: TuneQuestion, answer: Answer) -> None:
    seeds = answer.num_seeds
    if question.targets:
        before, after = answer.seeds_met
        listed = ", ".join(map(str, question.targets))
        console.print(
            f"Fresh seeds that meet {listed}: {after} of {seeds}, with the defaults {before}."
        )
        if not after:
            console.print("No settings that were tried meet the targets; these come closest.")
    if not answer.settings:
        console.print("No settings were better than the defaults on fresh seeds.")
        return
    mean, low, high = answer.gain
    console.print(
        f"Gain over the defaults: [bold]{mean:+.1%}[/] (95 % interval {low:+.1%} to {high:+.1%}), "
        f"means over {seeds} fresh seeds:\n"
    )
    console.print(render.table(("", "defaults", "best", "difference", "95 % interval"), [
        (c.name, f"{c.default:,.4g}", f"{c.best:,.4g}", f"{c.difference.mean:+,.3g}",
         f"{c.difference.low:+,.3g} to {c.difference.high:+,.3g}")
        for c in answer.compared
    ], TEXTS))  # fmt: skip


def _print_why(console: Console, answer: Answer) -> None:
    if answer.changes:
        console.print("\n[bold]Why[/]: what each change buys, by a run without it")
        console.print(render.table(("change", "instead of", "without it"), [
            (f"{c.knob}={c.value}", str(c.default).partition("(")[0], _loss(c))
            for c in answer.changes
        ], TEXTS))  # fmt: skip
    findings = {"with the defaults": answer.before, "with these settings": answer.after}
    for title, found in findings.items():
        console.print(f"\n[bold]The doctor {title}[/]")
        for each in found:
            console.print(f"- {each.symptom}, because {each.cause}", markup=False)
        if not found:
            console.print("- no finding")


def _loss(change: Change) -> str:
    if not change.is_tested:
        return "not tested"
    if change.breaks_targets:
        return "targets are missed"
    return f"{-change.loss / (1 + change.loss):+.1%}"
