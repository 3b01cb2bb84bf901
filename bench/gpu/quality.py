"""Accuracy of our arithmetic against transformers with the same weights: tokens and perplexity.

    python -m bench.gpu.quality --model FILE.gguf      prints one JSON object, progress to stderr
    python -m bench.gpu.quality --only bfloat16 --out bench/results/gpu_quality.json
    python -m bench.gpu.quality --device cpu --tokens 64 --output 2     a smoke test without a GPU

perplexity    of the licence's first --tokens tokens, from prompt logprobs (prefill)
ratio         ours / that of transformers in the same type; the goal is within 1 percent
first_tokens  prompts of tests/support/real.py whose first token equals that of transformers in the
              same type; `as_float32` counts how often each equals transformers in float32
places        the same for the most probable token after each token of the text but the last
decodes       of --output greedy tokens after each prompt, the fraction that transformers also finds
              most probable, given all tokens before; `regret` is how much less probable, in nats,
              our tokens are to transformers in float32
cost_percent  how much 8 bits add to the perplexity of bfloat16: in the KV cache (fp8), in the
              weights and activations (fp8_weights), and in both (fp8_both)
A part that cannot run reports the reason, and the others still run.
"""

from __future__ import annotations

import gc
import math
import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.cpu.compare import NUM_SCORED
from bench.harness import ROOT, Bench, Figures, attempt, log
from headway import LLM, SamplingParams
from headway.loading import find_tokenizer
from headway.model.config import ModelConfig
from headway.model.devices import use_device
from headway.model.loader import open_checkpoint
from headway.model.registry import resolve
from headway.text.chat_template import render_chat
from tests.support.real import PROMPTS

bench = Bench(__doc__)
Prompts = dict[str, list[int]]
PARTS = {  # our dtype, the type of the KV cache, and the quantization of the weights
    "bfloat16": ("bfloat16", "auto", "none"),
    "fp8": ("bfloat16", "fp8", "none"),
    "fp8_weights": ("bfloat16", "auto", "fp8"),
    "fp8_both": ("bfloat16", "fp8", "fp8"),
    "float32": ("float32", "auto", "none"),
}
RAW = {"outputs", "places"}  # compared, not reported
GOAL = 0.01  # maximum distance of the perplexity ratio from 1
MAX_NUM_SEQS = 8  # small, so that few graphs are captured


def prompts_and_text(model: Path, num_scored: int) -> tuple[Prompts, list[int]]:
    """Prompts as tokens, and the text to score."""
    tokenizer = find_tokenizer(model)
    assert tokenizer is not None, "a model for text prompts has a tokenizer"
    asked = {}
    for name, prompt in PROMPTS.items():
        if isinstance(prompt, str):
            asked[name] = tokenizer.encode(prompt)
        elif tokenizer.chat_template:
            template, bos, eos = tokenizer.chat_template, tokenizer.bos, tokenizer.eos
            asked[name] = tokenizer.encode(
                render_chat(template, prompt, bos=bos, eos=eos), special=False
            )
    return asked, tokenizer.encode((ROOT / "LICENSE").read_text())[:num_scored]


class Reference:
    """transformers with the weights of our reader, in one type."""

    def __init__(self, model: Path, dtype: torch.dtype, device: torch.device) -> None:
        import transformers

        checkpoint = open_checkpoint(model)
        about = checkpoint.config
        config = transformers.AutoConfig.for_model(about.architecture, **described(about))
        with torch.device("meta"):  # the weights are loaded from the file below
            self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        inner = self._model.model
        inner.rotary_emb = type(inner.rotary_emb)(config=config)
        weights = {name: checkpoint.read(name).to(dtype) for name in about.shapes()}
        missing, unknown = self._model.load_state_dict(weights, strict=False, assign=True)
        assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
        self._model.tie_weights()
        self._model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[len(tokens), vocabulary], as float32 for any type of the model."""
        found: Tensor = self._model(torch.tensor([tokens], device=self._device)).logits[0].float()
        return found

    def read(self, text: list[int]) -> tuple[float, list[int]]:
        """The text's perplexity, and the most probable token after each token but the last."""
        logprobs = self.logits(text)[:-1].log_softmax(-1)
        targets = torch.tensor(text[1:], device=self._device)
        mean = float(logprobs.gather(1, targets[:, None]).double().mean())
        return math.exp(-mean), logprobs.argmax(-1).tolist()

    def first_tokens(self, prompts: Prompts) -> list[int]:
        return [int(self.logits(tokens)[-1].argmax()) for tokens in prompts.values()]


def described(about: ModelConfig) -> Figures:
    """The config in transformers' format."""
    rope = about.rope
    assert rope.kind == "default" and rope.divisors is None, "scaled rope is not supported here"
    return {
        "vocab_size": about.vocab_size, "hidden_size": about.hidden_size,
        "intermediate_size": about.intermediate_size, "num_hidden_layers": about.num_layers,
        "num_attention_heads": about.num_heads, "num_key_value_heads": about.num_kv_heads,
        "head_dim": about.head_dim, "max_position_embeddings": about.max_model_len,
        "rms_norm_eps": about.norm_eps, "tie_word_embeddings": about.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "attention_bias": about.output_bias, "mlp_bias": about.mlp_bias,
    }  # fmt: skip


def ask(llm: LLM, prompts: Prompts, num_output: int) -> Prompts:
    """Greedy tokens after each prompt."""
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    results = llm.generate(list(prompts.values()), params, use_tqdm=False)
    for result in results:
        if result.outputs[0].finish_reason != "length":
            raise RuntimeError(f"a request failed: {result.outputs[0].error}")
    return {n: r.outputs[0].token_ids for n, r in zip(prompts, results, strict=True)}


def read(llm: LLM, text: list[int]) -> tuple[float, list[int]]:
    """The text's perplexity, and the most probable token after each token but the last."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = llm.generate(text, params)[0].prompt_logprobs
    assert found is not None, "prompt_logprobs were requested"
    scores = [score for score in found if score is not None]
    pairs = zip(text[1:], scores, strict=True)
    mean = statistics.fmean(score[token].logprob for token, score in pairs)
    return math.exp(-mean), [next(iter(score)) for score in scores]  # most probable first


def load_ours(part: str, model: str, device: str) -> LLM:
    dtype, kv_dtype, quantization = PARTS[part]
    return LLM(
        model, device=device, dtype=dtype, kv_cache_dtype=kv_dtype, quantization=quantization,
        max_num_seqs=MAX_NUM_SEQS, kv_memory="1GiB" if device != "cpu" else None,
    )  # fmt: skip


def run_ours(part: str, options: Namespace, prompts: Prompts, text: list[int]) -> Figures:
    with load_ours(part, options.model, options.device) as llm:
        outputs = ask(llm, prompts, options.output)
        perplexity, places = read(llm, text)
        return {"perplexity": perplexity, "outputs": outputs, "places": places}


def compare(
    ours: Figures, theirs: Reference, exact: Reference, prompts: Prompts, text: list[int]
) -> Figures:
    """Our figures, those of transformers in the same type, and the regret in float32."""
    outputs, places = ours.pop("outputs"), ours.pop("places")
    first_tokens = [outputs[name][0] for name in prompts]
    their_first, right_first = theirs.first_tokens(prompts), exact.first_tokens(prompts)
    perplexity, their_places = theirs.read(text)
    num_same, num_tokens, regrets = 0, 0, []
    for name, prompt in prompts.items():
        output = torch.tensor(outputs[name])
        whole, start = [*prompt, *outputs[name][:-1]], len(prompt) - 1
        best = theirs.logits(whole)[start:].argmax(-1).cpu()
        logprobs = exact.logits(whole)[start:].log_softmax(-1).cpu()
        regrets += (logprobs.amax(-1) - logprobs.gather(1, output[:, None])[:, 0]).tolist()
        num_same += int((best == output).sum())
        num_tokens += len(output)
    ratio = ours["perplexity"] / perplexity
    return ours | {
        "transformers_perplexity": perplexity, "ratio": ratio, "reached": abs(ratio - 1) <= GOAL,
        "first_tokens": count_equal(first_tokens, their_first, right_first),
        "places": count_equal(places, their_places, exact.read(text)[1]),
        "decodes": {
            "same": num_same, "of": num_tokens, "share": num_same / num_tokens,
            "mean_regret": sum(regrets) / len(regrets), "worst_regret": max(regrets),
        },
    }  # fmt: skip


def count_equal(ours: list[int], theirs: list[int], right: list[int]) -> Figures:
    """How often the two agree with each other, and each with the float32 tokens."""

    def count(some: list[int], others: list[int]) -> int:
        return sum(one == other for one, other in zip(some, others, strict=True))

    as_float32 = {"ours": count(ours, right), "transformers": count(theirs, right)}
    return {"same": count(ours, theirs), "of": len(right), "as_float32": as_float32}


def figures(options: Namespace) -> Figures:
    """Run all parts; write the report after each."""
    model, device = resolve(options.model), use_device(options.device)
    options.model, options.device = str(model), str(device)
    prompts, text = prompts_and_text(model, options.tokens)
    report = bench.report
    report |= {
        "model": model.name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "scored_tokens": len(text), "prompts": len(prompts), "goal": GOAL,
    }  # fmt: skip
    ours = {}
    for part in options.only:
        log(f"{part}: our engine")
        ours[part] = attempt(run_ours, part, options, prompts, text)
        log(f"{part}: {ours[part].get('skipped') or round(ours[part]['perplexity'], 4)}")
        report[part] = {key: value for key, value in ours[part].items() if key not in RAW}
        bench.save()
        gc.collect()  # free blocks and graphs before the next part
    try:
        for part, beside in with_references(ours, model, device, prompts, text):
            report[part] = beside
            bench.save()
    except Exception as error:  # keep our own figures
        report["transformers"] = {"skipped": f"{type(error).__name__}: {error}"}
    for part in ("fp8", "fp8_weights", "fp8_both"):
        report[f"{part}_cost_percent"] = cost_of_fp8(report, part)
    return {}


def with_references(
    ours: dict[str, Figures], model: Path, device: torch.device, prompts: Prompts, text: list[int]
) -> Iterator[tuple[str, Figures]]:
    """Compare every part that ran; loads transformers once per type."""
    import transformers

    transformers.logging.set_verbosity_error()
    log("transformers, float32")
    exact = Reference(model, torch.float32, device)
    made = {"float32": exact}
    for part, found in ours.items():
        name = PARTS[part][0]
        if "skipped" in found:
            continue
        log(f"{part}: transformers")
        if name not in made:
            made[name] = Reference(model, getattr(torch, name), device)
        theirs = made[name]
        yield part, attempt(compare, found, theirs, exact, prompts, text)


def cost_of_fp8(report: Figures, part: str) -> float | None:
    try:
        return 100 * (report[part]["perplexity"] / report["bfloat16"]["perplexity"] - 1)
    except KeyError:
        return None


if __name__ == "__main__":
    bench.option("--model", default="smollm2-135m", help="name, folder or GGUF file")
    bench.option("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    bench.option("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    bench.option("--tokens", type=int, default=NUM_SCORED, help="tokens of text to score")
    bench.option("--output", type=int, default=24, help="greedy tokens after each prompt")
    bench.main(figures)
