"""The forms of quantized matrices: which are possible, which is chosen, and what they hold."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from headway.cli.commands.models import _print_products
from headway.executor.factory import count_blocks
from headway.loading import load
from headway.model.backends.native import forms
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.native.forms import Form, FormTimes, MatrixProbe
from headway.model.backends.native.weights import layout
from headway.model.decoder import Decoder
from headway.model.precision import probe_products, why_not_native
from headway.options import EngineOptions
from tests.model.test_batch_invariance import ScaledCheckpoint, sizes
from tests.support import real

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
EIGHT, FOUR = Form(8, 64), Form(4, 32)


def probed(default: list[float], other: list[float]) -> MatrixProbe:
    times = [FormTimes(EIGHT, tuple(default)), FormTimes(FOUR, tuple(other))]
    return MatrixProbe("down", (576, 1536), times)


@pytest.mark.parametrize(
    ("default", "other", "chosen"),
    [
        ([1, 1, 1, 1, 1], [0.5, 1, 1, 1, 1], FOUR),  # wins at 1 row, loses nowhere
        ([1, 1, 1, 1, 1], [0.97, 1, 1, 1, 1], EIGHT),  # too close to leave the default
        ([1, 1, 1, 1, 1], [0.5, 2, 2, 2, 2], EIGHT),
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], FOUR),
    ],
)
def test_the_form_with_the_smallest_slowdown_is_chosen(
    default: list[float], other: list[float], chosen: Form
) -> None:
    assert probed(default, other).chosen == chosen


def test_the_choice_is_shown_with_its_reason() -> None:
    probe = probed([1e-4] * 5, [1e-4, 2e-4, 2e-4, 2e-4, 2e-4])
    summary = probe.summary()
    assert summary["chosen"] == "8-bit/64" and summary["shape"] == (576, 1536)
    assert "1.00" in summary["why"] and "1.80 for 4-bit" in summary["why"]
    out = io.StringIO()
    _print_products(Console(file=out, width=120), {"down": summary})
    shown = out.getvalue()
    assert "down 576 x 1,536" in shown and "8-bit/64 (chosen)" in shown
    assert "1.80 for 4-bit" in " ".join(shown.split())


def test_only_files_with_4_bit_groups_have_a_4_bit_form() -> None:
    narrow = Form(8, 32)
    assert forms.forms_of(96, 4) == [FOUR, narrow] and forms.forms_of(96, None) == [narrow]
    assert forms.forms_of(100, 4) == []
    wide = [EIGHT] if layout().wide_group else []
    assert forms.forms_of(128, 8) == [*wide, narrow]


CONFIG = sizes(4, 2, 32, hidden_size=128, intermediate_size=192)


def test_all_matrices_of_a_model_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "COLD_BYTES", 100_000)
    found = {
        each.matrix: each for each in probe_products(ScaledCheckpoint(CONFIG, has_groups=True))
    }
    assert list(found) == list(forms.MATRICES)
    assert found["gate_up"].shape == (384, 128) and found["head"].shape == (131, 128)
    for each in found.values():
        assert [times.form for times in each.times] == forms.forms_of(each.shape[1], 4)
        assert all(min(times.seconds) > 0 for times in each.times)


def test_a_matrix_is_stored_in_the_chosen_form() -> None:
    checkpoint = ScaledCheckpoint(CONFIG, has_groups=True)
    kept, expanded = (
        Decoder(
            checkpoint, NativeBackend(is_quantized=True, forms=dict.fromkeys(forms.MATRICES, form))
        )
        for form in (FOUR, Form(8, 32))
    )
    for model, bits in ((kept, 4), (expanded, 8)):
        layer = model.layers[0]
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down, model.head):
            assert (weight.struct.bits, weight.struct.group) == (bits, 32)
    ids, tokens = torch.arange(131), [5, 6, 7, 8]
    assert torch.equal(kept.embedding.rows(ids), expanded.embedding.rows(ids))  # the file's numbers
    one, other = (real.logits_of(model, tokens) for model in (kept, expanded))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [FOUR, None])
def test_the_measured_precision_and_forms_are_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Form | None
) -> None:
    """Where `auto` finds int8 fastest; the name has the matrices that are not in their default."""
    times = [FormTimes(EIGHT, (2.0,) * 5)] + [FormTimes(other, (1.0,) * 5)] * (other is not None)
    monkeypatch.setattr("headway.loading.measured_precision", lambda *_: "int8")
    found = [MatrixProbe("down", (128, 192), times)]
    monkeypatch.setattr("headway.model.precision.probe_products", lambda _: found)
    options = EngineOptions(model=str(real.write_tiny(tmp_path)), device="cpu", quantization="auto")
    loaded = load(options, progress=None, measure=count_blocks)
    name = "int8" if other is None else "int8 (down 4-bit/32)"
    assert loaded.precision == name and loaded.execution == f"{name} on cpu"
    checkpoint = ScaledCheckpoint(CONFIG, has_groups=True)
    weight = loaded.decoder.backend.weight(checkpoint, ["model.layers.0.mlp.down_proj"])
    default_bits = 8 if layout().wide_group else 4
    assert weight.struct.bits == (4 if other else default_bits)  # type: ignore[attr-defined]
