"""How a model is divided among ranks, and that each rank reads its own part of the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headway.errors import ConfigError, ModelError
from headway.model.config import ModelConfig
from headway.model.loader import open_checkpoint
from headway.model.sharding import EVERYTHING, Shard, check_size, divided
from headway.model.weights.checkpoint import ShardedCheckpoint
from tests.model.test_checkpoint import (
    config_of,
    encoded,
    expand,
    weights_of,
    write_gguf,
    write_safetensors,
)
from tests.support.rank_threads import Meeting, ThreadGroup

Kind = gguf.GGMLQuantizationType


def shards(config: ModelConfig, size: int, *, is_exact: bool) -> list[Shard]:
    meeting = Meeting(size)
    return [Shard(config, ThreadGroup(meeting, rank), is_exact) for rank in range(size)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (9, 3), (12, 2), (6, 1), (32, 8)])
def test_every_rank_has_the_key_value_heads_of_its_query_heads(heads: int, kv_heads: int) -> None:
    config = replace(config_of(), num_heads=heads, num_kv_heads=kv_heads, intermediate_size=1024)
    for size in range(1, heads + 1):
        try:
            check_size(config, size)
        except ConfigError:
            assert size > kv_heads and size % kv_heads
            continue
        each = shards(config, size, is_exact=True)
        assert [head for own in each[0].heads for head in own] == list(range(heads))
        for shard in each:
            own, kv = shard.heads[shard.rank], shard.kv_heads[shard.rank]
            assert own and {head * kv_heads // heads for head in own} == set(kv)
            assert shard.config.num_heads % shard.config.num_kv_heads == 0
        lengths = list(map(len, each[0].kv_heads))
        assert max(lengths) - min(lengths) <= 1 and lengths[0] == each[0].max_kv_heads


def test_ranges_are_whole_units_and_cover_everything() -> None:
    for count, size, unit in ((1536, 2, 32), (49152, 3, 32), (61, 4, 32), (576, 5, 32), (7, 7, 1)):
        ranges = divided(count, size, unit)
        assert [number for own in ranges for number in own] == list(range(count))
        if count % unit == 0:
            assert all(own.start % unit == 0 for own in ranges)


def test_a_size_that_does_not_fit_the_heads_is_refused_with_those_that_do() -> None:
    config = replace(config_of(), num_heads=9, num_kv_heads=3, intermediate_size=1024)
    with pytest.raises(ConfigError, match=r"is 4.* 9 query .* 3 key-value .* 1, 2, 3, 6, 9 ranks"):
        check_size(config, 4)
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        check_size(config, 18)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", Kind.Q4_0, Kind.Q8_0, Kind.F16])
def test_the_parts_of_all_ranks_are_the_whole_tensor(
    kind: str | Kind, is_exact: bool, tmp_path: Path
) -> None:
    config = config_of()
    if isinstance(kind, str):
        values = {
            "architectures": ["Qwen2ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64,
        }  # fmt: skip
        write_safetensors(tmp_path / "m", values)
        whole = open_checkpoint(tmp_path / "m")
    else:
        file = write_gguf(tmp_path / "m.gguf", config, weights_of(config), encoded(kind))
        whole = open_checkpoint(file)
    each = shards(whole.config, 2, is_exact=is_exact)
    parts = [ShardedCheckpoint(whole, shard) for shard in each]
    for name, shape in whole.config.shapes().items():
        if not whole.has(name):
            continue
        read = [part.read(name) for part in parts]
        assert [tuple(own.shape) for own in read] == [part.shape(name) for part in parts]
        cut = each[0].part(name)
        if cut == EVERYTHING:
            assert all(torch.equal(own, whole.read(name)) for own in read)
            continue
        axis = 0 if cut.rows != slice(None) else 1
        assert torch.equal(torch.cat(read, axis), whole.read(name)), name
        groups = [part.read_groups(name) for part in parts]
        if len(shape) == 2 and groups[0] is not None and groups[1] is not None:
            pair = [expand(own) for own in groups if own is not None]
            torch.testing.assert_close(
                torch.cat(pair, axis), whole.read(name), rtol=1e-6, atol=1e-6
            )


def test_a_rank_does_not_read_the_rows_of_others(tmp_path: Path) -> None:
    """Rows of the second rank are damaged, which only a rank that reads them notices."""
    config = config_of()
    weights = weights_of(config)
    weights["model.layers.0.mlp.up_proj.weight"][-1] = np.nan
    file = write_gguf(tmp_path / "m.gguf", config, weights, encoded(Kind.F16))
    whole = open_checkpoint(file)
    first, second = (ShardedCheckpoint(whole, own) for own in shards(config, 2, is_exact=True))
    assert torch.isfinite(first.read("model.layers.0.mlp.up_proj.weight")).all()
    for checkpoint in (second, whole):
        with pytest.raises(ModelError, match="up_proj"):
            checkpoint.read("model.layers.0.mlp.up_proj.weight")


def test_with_fast_sums_one_rank_adds_a_bias(tmp_path: Path) -> None:
    config = replace(config_of(), output_bias=True)
    name = "model.layers.0.self_attn.o_proj.bias"
    assert [own.has(name) for own in shards(config, 2, is_exact=False)] == [True, False]
    assert [own.has(name) for own in shards(config, 2, is_exact=True)] == [True, True]
