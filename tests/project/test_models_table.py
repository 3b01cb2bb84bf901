"""The tables of families and formats in docs/models.md are computed from the tests that run each.

A cell that says yes stands for models in the parameters of a test; one that says no, or names what
is excepted, stands for models that the device refuses. So a family has no cell without a test.
`python -m tests.project.test_models_table` writes the tables again.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import wrap

from headway.model.config import ModelConfig, from_hf
from headway.model.families.table import FAMILIES
from tests.end_to_end import (
    test_real_experts,
    test_real_families,
    test_real_gpt_oss,
)
from tests.end_to_end.test_real_families import Family
from tests.executor import test_gpu
from tests.model import test_checkpoint
from tests.support.quantized import SCHEMES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LABELS = {
    "llama": "Llama, SmolLM2", "mistral": "Mistral", "qwen2": "Qwen2",
    "qwen3": "Qwen3", "gemma3": "Gemma 3 (text)", "smollm3": "SmolLM3", "phi3": "Phi-3, Phi-4",
    "olmo2": "OLMo 2", "olmo3": "OLMo 3", "granite": "Granite 3",
    "ministral3": "Ministral 3 (text)", "mixtral": "Mixtral", "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE", "gpt_oss": "gpt-oss",
}  # fmt: skip
SIZES = {
    "vocab_size": 64, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": test_real_families.LENGTH,
}  # fmt: skip


def config(model: Family) -> ModelConfig:
    kind = model.kind.removesuffix("Text")
    return from_hf(SIZES | model.numbers | {"architectures": [f"{kind}ForCausalLM"]}, model.kind)


# The models whose tokens equal those of transformers: on a CPU, and of these from GGUF files.
ON_CPU = (
    test_real_families.FAMILIES | test_real_experts.FAMILIES | {"gpt-oss": test_real_gpt_oss.FAMILY}
)
FROM_GGUF = {
    config(model).architecture
    for model in (test_real_families.ON_GGUF | test_real_experts.ON_GGUF).values()
}
# Those whose tokens on the kernels of a GPU, interpreted where there is none, equal those of torch.
ON_GPU = {about.architecture for about in test_gpu.EVERY.values()}


def on_gpu(family: str) -> str:
    configs = {name: config(model) for name, model in ON_CPU.items()}
    own = {name: each for name, each in configs.items() if each.architecture == family}
    refused = [name for name, each in own.items() if each.cpu_only]
    if len(refused) == len(own):
        return "no"
    assert family in ON_GPU, f"no test runs {family} on the kernels of a GPU, which accepts it"
    return f"not {', '.join(refused)}" if refused else "yes"


def table() -> str:
    """Families with equal cells share rows; a CPU runs all of them."""
    assert set(LABELS) == {family.name for family in FAMILIES}
    assert set(LABELS) == {config(model).architecture for model in ON_CPU.values()}
    rows: dict[tuple[str, str], list[str]] = {}
    for family, label in LABELS.items():
        cells = "yes" if family in FROM_GGUF else "no", on_gpu(family)
        rows.setdefault(cells, []).append(label)
    lines = [
        f"| {labels} | {' | '.join(cells)} |"
        for cells, every in rows.items() for labels in wrap(", ".join(every), 83)
    ]  # fmt: skip
    return "\n".join(["| family | GGUF | GPU |", "|---|---|---|", *lines, ""])


# The schemes of a row. test_formats.py runs each of them on a CPU, in floats and, if it has groups
# of 32 inputs, with its integers; test_gpu.py reads each of them for a GPU.
FORMATS = {
    "`fp8`, compressed-tensors `float-quantized` (not in blocks)": ("fp8 with", "compressed fp8"),
    "the same in blocks (mostly 128 x 128)": ("fp8 in blocks", "compressed fp8 in blocks"),
    "4 bits: compressed-tensors W4A16, AWQ (`gemm`), GPTQ": ("w4a16", "awq", "gptq"),
    "8 bits: compressed-tensors W8A16 and W8A8, GPTQ": ("w8a16", "w8a8", "gptq, 8 bits"),
}
GGUF = "GGUF, any type that the `gguf` package reads"
OTHERS = {  # the cells, and the test of each
    GGUF: {
        "float32": test_checkpoint.test_gguf_returns_what_was_written_in_hugging_face_order,
        "its groups, or new ones": test_real_experts.test_experts_of_gguf_files_keep_their_groups,
        "bfloat16": test_gpu.test_weights_of_a_gguf_file_are_dequantized_for_a_gpu,
    },
    "MXFP4 (experts of gpt-oss)": {
        "float32": test_real_gpt_oss.test_weights_in_floats_and_in_mxfp4_are_those_of_transformers,
        "the file's numbers, in 4 bits":
            test_real_gpt_oss.test_quantized_kernels_keep_the_experts_of_a_file,
        "bfloat16": test_real_gpt_oss.test_a_gpu_dequantizes_the_experts,
    },
}  # fmt: skip


def of_format(starts: tuple[str, ...]) -> list[str]:
    """The schemes whose names have one of these beginnings, the longest of all rows."""
    every = {start for row in FORMATS.values() for start in row}
    best = {n: max((s for s in every if n.startswith(s)), key=len, default="") for n in SCHEMES}
    assert all(best.values()), "a scheme belongs to no row"
    return [name for name, start in best.items() if start in starts]


def formats() -> str:
    lines = ["| format | CPU | CPU, `int8` | GPU |", "|---|---|---|---|"]
    for label, starts in FORMATS.items():
        schemes = {name: SCHEMES[name] for name in of_format(starts)}
        whole = {n: s.bits for n, s in schemes.items() if "groups of 16" not in n}
        kept = {"the file's integers" if bits else "new 8-bit groups" for bits in whole.values()}
        gpu = {
            "fp8" if schemes[n].has_fp8 else "int4" if b == 4 else "bfloat16"
            for n, b in whole.items()
        }
        lines.append(f"| {label} | float32 | {' or '.join(kept)} | {' or '.join(gpu)} |")
    lines += [f"| {label} | {' | '.join(cells)} |" for label, cells in OTHERS.items()]
    return "\n".join([*lines, ""])


TABLES = {r"\| family \| GGUF ": table, r"\| format \| CPU ": formats}


def rewritten(page: str) -> str:
    """The page with both tables as the tests are."""
    for start, make in TABLES.items():
        page, count = re.subn(
            rf"^{start}.*?\n(?=\n)", lambda _, m=make: m(), page, flags=re.M | re.S
        )
        assert count == 1, start
    return page


def test_every_cell_of_the_page_has_its_test() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "python -m tests.project.test_models_table writes it again"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
