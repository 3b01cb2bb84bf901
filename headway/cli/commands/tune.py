"""`headway tune`: the best settings of a scheduler for a profile, a workload and targets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headway.cli.options import common as options
from headway.cli.options import planner as planner_options
from headway.cli.options.packages import check_extras
from headway.cli.workload_run import FITTING, run_workload
from headway.lab.cost import load_profile
from headway.lab.planner import advice
from headway.lab.planner.evaluate import Evaluator, make_config
from headway.lab.planner.search import TuneQuestion
from headway.lab.planner.space import check, default_space, parse_knobs, text_of
from headway.lab.planner.targets import redundant
from headway.lab.planner.tune import Answer, Change, Verified, compare, complete, tune
from headway.lab.simulate import with_profile
from headway.lab.summary import summarize
from headway.lab.svg import Curve, Plot

Budget = Annotated[
    int,
    typer.Option(help="How much to simulate, in runs of the whole workload.", min=1, max=100_000),
]
KnobValues = Annotated[
    list[str] | None,
    typer.Option("--knob", help="Search only these knobs: name=value,value. May be repeated."),
]
Verify = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Run the best settings on a real model, in real time, and compare with the prediction. "
        "The profile must be that of the model on this machine.",
    ),
]


@options.spread
def tune_command(
    workload: options.Workload = options.DEFAULT_WORKLOAD,
    preset: options.Preset = "headway",
    profile: options.ProfileName = "llama3.1-8b-a100-80gb",
    knob: KnobValues = None,
    budget: Budget = 60,
    seed: Annotated[int, typer.Option(help="Of the search and the fresh seeds.", min=0)] = 0,
    verify: Verify = None,
    plot: planner_options.PlotFile = None,
    json_: options.Json = False,
    async_scheduling: options.AsyncScheduling = False,
    *,
    targets: planner_options.TargetOptions,
    selection: options.WorkloadOptions,
    runs: planner_options.RunOptions,
    scheduler: options.SchedulerOptions,
) -> None:
    """Find the best settings for a workload subject to latency targets, and say why.

    Scheduler options are fixed; all other settings are searched.
    """
    planner_options.check_plot(plot)
    if verify:
        check_extras("--verify", "torch")
    with runs.evaluator() as evaluator:
        base = planner_options.base_settings(preset, scheduler)
        chosen = load_profile(profile)
        space = parse_knobs(knob or ()) or default_space(make_config(base, chosen))
        free = {name: values for name, values in space.items() if name not in scheduler.changes()}
        question = TuneQuestion(
            profile=chosen, workload=planner_options.workload_of(workload, selection), base=base,
            targets=targets.targets(), space=check(free, base, chosen),
            async_scheduling=async_scheduling,
        )  # fmt: skip
        with options.progress_bar("simulating", budget) as evaluator.advance:
            answer = tune(question, evaluator, budget=budget, seed=seed)
        verified = _verified(question, answer, evaluator, verify) if verify else []
    drawn, commands = pareto_plot(answer), _commands(question, answer, profile)
    if json_:
        print(json.dumps(_described(question, answer, verified, commands), indent=2))
    else:
        _print(question, answer)
        _print_commands(Console(highlight=False), commands)
        _print_verified(Console(highlight=False), verified)
        planner_options.print_end(drawn, chosen)
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
    with LLM(model, **sizes) as llm, options.progress_bar("measuring", len(requests)) as progress:
        stats = run_workload(
            llm, requests, config, async_scheduling=job.async_scheduling, progress=progress
        )
    return compare(predicted.summary, summarize(stats))


def pareto_plot(answer: Answer) -> Plot:
    """Throughput of the device against the speed that a user sees."""
    at = tuple((p.tokens_per_second_per_user, p.tokens_per_second) for p in answer.pareto)
    curve = Curve(name="settings that no others beat in both", points=at)
    return Plot(title="Pareto front", x="tokens/s per user", y="tok/s", curves=(curve,))


def _commands(question: TuneQuestion, answer: Answer, profile: str) -> dict[str, Any]:
    settings = {**question.base, **answer.settings}
    vllm = advice.vllm_command(complete(question, answer.settings),
                               async_scheduling=question.async_scheduling)  # fmt: skip
    text = question.workload.text
    return {
        "headway": advice.serve_command(settings), "vllm": vllm.command,
        "without_vllm_counterpart": vllm.without_counterpart,
        "lab": advice.lab_command(question.base, answer.settings, text, profile),
    }  # fmt: skip


def _described(
    question: TuneQuestion,
    answer: Answer,
    verified: Sequence[Verified],
    commands: dict[str, Any],
) -> dict[str, Any]:
    values = asdict(answer)
    for name in ("before", "after"):
        values[name] = [finding._asdict() for finding in getattr(answer, name)]
    values["objective"] = answer.objective.text
    return {
        **planner_options.described(question.profile), "base": question.base,
        "targets": {target.name: target.seconds for target in question.targets}, **values,
        "commands": commands,
        **({"verified": [each._asdict() for each in verified]} if verified else {}),
    }  # fmt: skip


def _print(question: TuneQuestion, answer: Answer) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]Best settings on {question.profile.name}[/]")
    console.print(f"  {text_of(answer.settings)}", markup=False)
    console.print(f"\n{answer.objective.text}")
    console.print(f"Simulated: {answer.num_settings} settings, {answer.cost:.0f} full runs.")
    for note in redundant(question.targets):
        console.print(f"Note: {note}.")
    _print_gain(console, question, answer)
    _print_why(console, answer)
    console.print("\n[bold]Pareto front[/]")
    console.print(_table(("tok/s", "tok/s per user", "settings"), [
        (f"{p.tokens_per_second:,.0f}", f"{p.tokens_per_second_per_user:.1f}", text_of(p.settings))
        for p in answer.pareto
    ]))  # fmt: skip


def _print_verified(console: Console, verified: Sequence[Verified]) -> None:
    if verified:
        console.print("\n[bold]Predicted and measured[/]")
        console.print(_table(("", "predicted", "measured", "error"), [
            (v.name, f"{v.predicted:.4g}", f"{v.measured:.4g}", f"{v.error:+.1%}") for v in verified
        ]))  # fmt: skip


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
    console.print(_table(("", "defaults", "best", "difference", "95 % interval"), [
        (c.name, f"{c.default:,.4g}", f"{c.best:,.4g}", f"{c.difference.mean:+,.3g}",
         f"{c.difference.low:+,.3g} to {c.difference.high:+,.3g}")
        for c in answer.compared
    ]))  # fmt: skip


def _print_why(console: Console, answer: Answer) -> None:
    if answer.changes:
        console.print("\n[bold]Why[/]: what each change buys, by a run without it")
        console.print(_table(("change", "instead of", "without it"), [
            (f"{c.knob}={c.value}", str(c.default).partition("(")[0], _loss(c))
            for c in answer.changes
        ]))  # fmt: skip
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


def _print_commands(console: Console, commands: dict[str, Any]) -> None:
    console.print("\n[bold]Commands[/]")
    for name in ("headway", "vllm", "lab"):
        if commands[name]:
            console.print(advice.wrapped(commands[name]), markup=False, soft_wrap=True)
    if rest := commands["without_vllm_counterpart"]:
        console.print(f"vllm serve has no counterpart of {', '.join(rest)}.", markup=False)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for place, name in enumerate(header):
        is_text = not place or name in ("settings", "instead of")
        table.add_column(name, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row)
    return table
