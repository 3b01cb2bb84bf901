"""The forms in which the kernels can store a quantized matrix, and which is fastest on this CPU.

Forms round differently, and the result of a row must not depend on the rows beside it. So a matrix
has one form for all numbers of rows; within a form, the kernels choose a tile by the number of
rows. A form is chosen for its times with 1 row, a few rows and a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.model.backends.native import weights as packing
from headway.model.backends.native.weights import GROUP, Arena, NativeWeight, layout
from headway.model.config import ModelConfig
from headway.model.experts import matrix_kind
from headway.model.sharding import Part
from headway.model.weights.checkpoint import Checkpoint, QuantizedMatrix

ROWS = (1, 4, 8, 32, 128)
# The matrices of a model by the last parts of their tensors' names.
MATRICES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "head": ("embed_tokens", "lm_head"),
}
MARGIN = 1.05  # another form replaces the default if the default takes this many times as long
MAX_WEIGHTS = 1 << 21  # of a matrix that is measured
COLD_BYTES = 48_000_000  # that are read in turn, so that no cache holds the next matrix
TRIES = 3


class Form(NamedTuple):
    """Weights of some bits in groups of inputs that share a scale."""

    bits: int
    group: int

    def __str__(self) -> str:
        return f"{self.bits}-bit/{self.group}"


Forms = Mapping[str, Form]  # by matrix
Multiply = Callable[[Tensor, NativeWeight], Tensor]


@dataclass(frozen=True, slots=True)
class FormTimes:
    """Seconds of a product with a matrix in one form, by the number of rows (ROWS)."""

    form: Form
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MatrixProbe:
    """The measured forms of a matrix, the default first."""

    matrix: str
    shape: tuple[int, int]  # outputs, inputs
    times: list[FormTimes]

    def slowdown(self, times: FormTimes) -> float:
        """How many times as long as the best form of each number of rows, on average."""
        best: list[float] = [
            min(each) for each in zip(*(t.seconds for t in self.times), strict=True)
        ]
        return sum(s / b for s, b in zip(times.seconds, best, strict=True)) / len(best)

    @property
    def default(self) -> Form:
        return self.times[0].form

    @property
    def chosen(self) -> Form:
        """The form with the smallest slowdown; the default if it is about as good."""
        best = min(self.times, key=self.slowdown)
        default = self.times[0]
        return (default if self.slowdown(default) <= MARGIN * self.slowdown(best) else best).form

    def summary(self) -> dict[str, object]:
        """The shape, the times and slowdown of each form, and the choice with its reason."""
        forms = {
            str(times.form): {
                "us_by_rows": {
                    str(rows): round(1e6 * seconds, 1)
                    for rows, seconds in zip(ROWS, times.seconds, strict=True)
                },
                "slowdown": round(self.slowdown(times), 3),
            }
            for times in self.times
        }
        return {"shape": self.shape, "forms": forms, "chosen": str(self.chosen), "why": self.why}

    @property
    def why(self) -> str:
        if len(self.times) == 1:
            return f"{self.chosen}: the only form that this CPU and this number of inputs allow"
        others = [
            f"{self.slowdown(t):.2f} for {t.form}" for t in self.times if t.form != self.chosen
        ]
        own = next(self.slowdown(t) for t in self.times if t.form == self.chosen)
        return (
            f"{self.chosen} takes {own:.2f} times as long as the best form of each number of rows, "
            f"on average; {', '.join(others)}"
        )


def matrix_of(name: str) -> str:
    """The matrix that a tensor is part of, by the tensor's name; empty if it is none of them."""
    kind = matrix_kind(name)
    return next((matrix for matrix, parts in MATRICES.items() if kind in parts), "")


def can_be_wide(num_inputs: int) -> bool:
    """Whether a matrix can have the wide 8-bit groups for Arm."""
    return layout().wide_group > 0 and num_inputs % layout().wide_group == 0


def forms_of(num_inputs: int, file_bits: int | None) -> list[Form]:
    """Possible forms of a matrix, the default first; none if it must stay in floats.

    `file_bits` are those of the file's groups of 32, if it has such groups.
    """
    found = [Form(8, layout().wide_group)] if can_be_wide(num_inputs) else []
    if num_inputs % GROUP == 0:
        found += [Form(4, GROUP)] if file_bits == 4 else []
        found.append(Form(8, GROUP))
    return found


def probe(checkpoint: Checkpoint, multiply: Multiply) -> list[MatrixProbe]:
    """Measure products with random weights in the shapes of a model's first layer and head.

    Takes about two seconds. `multiply` computes the product of rows and a weight.
    """
    config, found = checkpoint.config, []
    for matrix in MATRICES:
        names = [f"{name}.weight" for name in _names(config, matrix)]
        shapes = [checkpoint.shape(name) for name in names]
        shape = sum(rows for rows, _ in shapes), shapes[0][1]
        forms = forms_of(shape[1], file_bits(checkpoint, names))
        if forms:
            found.append(MatrixProbe(matrix, shape, _measure(forms, shape, multiply)))
    return found


def _names(config: ModelConfig, matrix: str) -> list[str]:
    if matrix == "head":
        return ["model.embed_tokens" if config.tie_embeddings else "lm_head"]
    if matrix in ("qkv", "output"):
        return [f"model.layers.0.self_attn.{name}" for name in MATRICES[matrix]]
    names = config.mlp_names(0)
    if config.experts is not None and 0 in config.experts.layers:
        names = [f"model.layers.0.{name}" for name in config.experts.names(0)]
    return names[:2] if matrix == "gate_up" else names[2:]


def file_bits(checkpoint: Checkpoint, names: Sequence[str]) -> int | None:
    """The bits of the file's groups; None if it has none or they differ between the tensors."""
    first = Part(rows=slice(checkpoint.config.head_dim))
    groups = [checkpoint.read_groups(name, first) for name in names]
    found = {None if each is None else each.bits for each in groups}
    return found.pop() if len(found) == 1 else None


def _measure(forms: Sequence[Form], shape: tuple[int, int], multiply: Multiply) -> list[FormTimes]:
    """Measure all forms in turns, so that a slow moment of the machine does not affect only one."""
    outputs, inputs = shape
    num_rows = min(outputs, max(1, MAX_WEIGHTS // inputs))
    copies = [_copies(_random_weight(form, (num_rows, inputs))) for form in forms]
    best = {(form, rows): float("inf") for form in forms for rows in ROWS}
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        for _ in range(TRIES):  # other load only adds time
            for form, weights in zip(forms, copies, strict=True):
                used = weights[: 2 + len(weights) * 4 // (4 + rows)]
                begun = time.perf_counter()
                for each in used:
                    multiply(x, each)
                took = (time.perf_counter() - begun) / len(used) * outputs / num_rows
                best[form, rows] = min(best[form, rows], took)
    return [FormTimes(form, tuple(best[form, rows] for rows in ROWS)) for form in forms]


def _copies(weight: NativeWeight) -> list[NativeWeight]:
    """Copies of a matrix, enough that no cache holds the next one when it is needed."""
    arena = Arena()
    return [weight.placed(arena) for _ in range(2 + COLD_BYTES // weight.num_bytes)]


def _random_weight(form: Form, shape: tuple[int, int]) -> NativeWeight:
    if form.group != GROUP:
        return packing.pack_wide(torch.randn(shape), None)
    scale = torch.rand(shape[0], shape[1] // GROUP)
    q = torch.randint(0, 1 << form.bits, shape, dtype=torch.uint8)
    return packing.pack_groups(
        QuantizedMatrix(q=q, scale=scale, minimum=-scale, bits=form.bits), None
    )
