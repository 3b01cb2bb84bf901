"""The experts of a model: their number and sizes, which layers have them, and their tensors.

In a sparse layer, a router chooses some experts for each token. Each expert is an MLP of its own;
there may be one more that all tokens use. Names are those of published files, which have a tensor
for each expert; transformers 5 stacks them in memory and writes them in this form. The files of
gpt-oss have stacks (weights/stacked_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from headway.model.families.fields import Fields

MATRICES = ("gate_proj", "up_proj", "down_proj")
# Names of Mixtral's matrices, as those of other models.
ALIASES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

GGUF_KEYS = {  # by those of config.json
    "num_hidden_layers": "block_count", "num_local_experts": "expert_count",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Experts:
    num_experts: int
    num_chosen: int  # for each token
    width: int  # inner size of an expert
    layers: frozenset[int]  # the sparse ones; the others have an MLP
    normalizes: bool = False  # the chosen experts' factors are divided by their sum
    shared_width: int = 0  # of the expert that all tokens use; 0: there is none
    has_shared_gate: bool = False  # its output has a factor that depends on the token
    block: str = "mlp"  # in the names of the tensors
    matrices: tuple[str, str, str] = MATRICES
    gate: str = "gate"  # the router's name
    has_biases: bool = False  # the experts and the router
    is_stacked: bool = False  # in files, one tensor holds all experts of a layer

    @property
    def router(self) -> list[str]:
        """Names within a layer of the matrices whose outputs decide: one row for each expert."""
        gates = [self.gate, "shared_expert_gate"] if self.has_shared_gate else [self.gate]
        return [f"{self.block}.{gate}" for gate in gates]

    def names(self, number: int) -> list[str]:
        """Names within a layer of an expert's matrices: gate, up, down."""
        return [f"{self.block}.experts.{number}.{matrix}" for matrix in self.matrices]

    @property
    def shared_names(self) -> list[str]:
        return [f"{self.block}.shared_expert.{matrix}" for matrix in MATRICES]

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a sparse layer's matrices and biases by name within the layer."""
        every = [(self.names(number), self.width) for number in range(self.num_experts)]
        if self.shared_width:
            every.append((self.shared_names, self.shared_width))
        rows = (self.num_experts, 1)
        shapes: dict[str, tuple[int, ...]] = {
            name: (size, hidden_size) for name, size in zip(self.router, rows, strict=False)
        }
        for (gate, up, down), width in every:
            shapes |= {gate: (width, hidden_size), up: (width, hidden_size)}
            shapes[down] = hidden_size, width
        biases = {f"{name}.bias": shape[:1] for name, shape in shapes.items() if self.has_biases}
        return {f"{name}.weight": shape for name, shape in shapes.items()} | biases


def matrix_kind(name: str) -> str:
    """The last part of a matrix's name, the same for all models: `down_proj`."""
    last = name.rpartition(".")[2]
    return ALIASES.get(last, last)


def hf_fields(fields: Fields, tensors: Collection[str], *, is_normalized: bool) -> Fields:
    """The fields of a GGUF file's experts, named as in a config.json.

    The file does not say whether a model of Qwen's normalizes the factors of the chosen experts.
    """
    layers = range(fields.count("block_count"))
    values = {name: fields.get(key) for name, key in GGUF_KEYS.items()}
    dense = [n for n in layers if f"blk.{n}.ffn_gate_inp.weight" not in tensors]
    values |= {"mlp_only_layers": dense, "norm_topk_prob": is_normalized}
    values["num_experts_per_tok"] = fields.count("expert_used_count")
    return Fields(values, fields.where)


def mixtral_experts(fields: Fields) -> Experts:
    num_layers, gate_up_down = fields.count("num_hidden_layers"), ("w1", "w3", "w2")
    experts = Experts(
        num_experts=fields.count("num_local_experts"),
        num_chosen=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
        layers=frozenset(range(num_layers)),
        normalizes=True,
        block="block_sparse_moe",
        matrices=gate_up_down,
    )
    return _checked(experts, fields)


def gpt_oss_experts(fields: Fields) -> Experts:
    fields.read.add("experts_per_token")  # num_experts_per_tok a second time
    experts = Experts(
        num_experts=fields.count("num_local_experts"),
        num_chosen=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
        layers=frozenset(range(fields.count("num_hidden_layers"))),
        normalizes=True,
        gate="router",
        has_biases=True,
        is_stacked=True,
    )
    return _checked(experts, fields)


def qwen_experts(
    *, default_count: int, has_shared: bool = False
) -> Callable[[Fields], Experts | None]:
    """The experts of Qwen models; None if no layer is sparse."""

    def read(fields: Fields) -> Experts | None:
        fields.read.add("max_window_layers")  # windows are refused
        layers = _sparse_layers(fields)
        stated = fields.count("num_local_experts", default_count)  # transformers 5 writes this name
        experts = Experts(
            num_experts=fields.count("num_experts", stated),
            num_chosen=fields.count("num_experts_per_tok"),
            width=fields.count("moe_intermediate_size"),
            layers=layers,
            normalizes=fields.flag("norm_topk_prob"),
            shared_width=fields.count("shared_expert_intermediate_size") if has_shared else 0,
            has_shared_gate=has_shared,
        )
        return _checked(experts, fields) if layers else None

    return read


def _sparse_layers(fields: Fields) -> frozenset[int]:
    num_layers, step = fields.count("num_hidden_layers"), fields.count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.error(f"mlp_only_layers is {dense!r}; it must be a list of layer numbers")
    return frozenset(range(step - 1, num_layers, step)) - set(dense)


def _checked(experts: Experts, fields: Fields) -> Experts:
    if experts.num_chosen > experts.num_experts:
        raise fields.error(
            f"num_experts_per_tok is {experts.num_chosen}, but the model has only "
            f"{experts.num_experts} experts"
        )
    return experts
