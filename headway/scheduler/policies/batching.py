"""Batching rules: the actions of a step, in order."""

from __future__ import annotations

from headway.config import StepActions


def mixed(step: StepActions) -> None:
    """Decodes first, then partially prefilled prompts, then waiting requests, in one batch."""
    step.decode()
    step.prefill()
    step.admit()


def swapped_first(step: StepActions) -> None:
    """As mixed, but swapped requests are admitted before anything else."""
    step.admit_swapped()
    step.decode()
    step.prefill()
    step.admit()


MAX_PREFILL_STEPS = 16  # consecutive, while decodes wait


def prefill_first(step: StepActions, *, charge_cached: bool = False) -> None:
    """Only prompts or only decodes in a step, prompts first; decodes run after 16 prompt steps."""
    if not (step.num_decoding and step.prefill_streak >= MAX_PREFILL_STEPS):
        step.prefill()
        step.admit(charge_cached=charge_cached)
    if step.is_idle:
        step.decode()


def prefill_first_charge_cached(step: StepActions) -> None:
    """As prefill_first, but cached tokens use up budget too."""
    prefill_first(step, charge_cached=True)


def static(step: StepActions) -> None:
    """Static batching: fill a batch, finish all of it, fill the next."""
    step.prefill()
    if not step.num_decoding or step.prefill_streak:
        step.admit()
    if step.is_idle:
        step.decode()
