"""The table of families in docs/models.md is computed from the tests that run each family.

A cell that says yes stands for models in the parameters of a test; one that says no, or names what
is excepted, stands for models that the device refuses. So a family has no cell without a test.
`python -m tests.project.test_models_table` writes the table again.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import wrap

from headway.model.config import ModelConfig, from_hf
from headway.model.families import FAMILIES
from tests.end_to_end import (
    test_real_experts,
    test_real_families,
    test_real_gpt_oss,
)
from tests.end_to_end.test_real_families import Family
from tests.executor import test_gpu

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


PLACE = re.compile(r"^\| family \| GGUF .*?\n(?=\n)", re.M | re.S)


def test_every_cell_of_the_page_has_its_test() -> None:
    found = PLACE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None and found[0] == table(), "python -m tests.project.test_models_table"


if __name__ == "__main__":
    PAGE.write_text(
        PLACE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8"
    )
