"""`python -m bench.quality`: what each number format of the engine costs in quality, against bf16.

1. Prepare the model once per variant and map all of them.
2. Run a fixed text through each, window by window, every token known (teacher-forced): the divergence of the
   predictions from bf16's, the perplexity, and how often both would choose the same token.
3. Let each go on from fixed beginnings, always choosing the likeliest token, and count how far its answers
   agree with bf16's.
4. Of the demo model, end with status 1 where a variant costs more than `GATES` allow.

Everything is exact arithmetic in fixed orders: on one kind of machine the figures do not change from run to
run, however busy it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.quality.measures import Tally
from bench.quality.texts import PROMPTS, PROSE
from cluster.engine.backends import NAMES, make_backend
from cluster.engine.batch import Row, SampleSpec
from cluster.engine.decoder import Decoder
from cluster.engine.load import load_decoder
from cluster.engine.model_spec import Dtype
from cluster.engine.packed_batch import pack
from cluster.engine.prepare import prepare_model
from cluster.engine.rotation import turned_tensors
from cluster.engine.weights import TORCH_DTYPES
from cluster.engine.weights_file import map_weights
from cluster.engine.weights_pack import assemble
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams
from cluster.tokenizer import Tokenizer
from kernels.ops import Backend, row_size
from kernels.reference import ReferenceBackend

BLOCK_SIZE = 64
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
BASE = "bf16"
GATES = {  # by variant: the most mean KL, and perplexity against bf16's; half above what was measured
    "int8": (0.025, 1.03),
    "int8-weights": (0.007, 1.012),
    "bf16, KV int8": (0.002, 1.003),
    "int8, KV int8": (0.026, 1.03),
}


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    dtype: Dtype
    quantization: str
    plain_head: bool = False  # the output matrix as without quantization
    kv_int8: bool = False


VARIANTS = (
    Variant(BASE, Dtype.BF16, "none"),
    Variant("fp32", Dtype.FP32, "none"),
    Variant("int8", Dtype.BF16, "int8"),
    Variant("int8, head bf16", Dtype.BF16, "int8", plain_head=True),
    Variant("int8-weights", Dtype.BF16, "int8-weights"),
    Variant("bf16, KV int8", Dtype.BF16, "none", kv_int8=True),
    Variant("int8, KV int8", Dtype.BF16, "int8", kv_int8=True),
)


class Subject:
    """One variant's decoder with a KV pool of its own."""

    def __init__(
        self, variant: Variant, model: str, backend_name: str, threads: int, num_blocks: int
    ) -> None:
        backend = make_backend(backend_name, threads, variant.quantization)
        prepared = prepare_model(model, variant.dtype, backend)
        self.directory = prepared.directory
        self.decoder = load_decoder(prepared, backend)
        head_bytes = 0
        if variant.plain_head:
            self.decoder, head_bytes = self._with_plain_head(variant, model, backend_name, threads, backend)
        spec = prepared.spec
        dtype = torch.int8 if variant.kv_int8 else TORCH_DTYPES[variant.dtype]
        row = row_size(spec.head_dim, dtype)
        self._pool = torch.zeros(
            (num_blocks, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, row), dtype=dtype
        )
        tensors = map_weights(prepared.directory).tensors
        streamed = sum(tensor.nbytes for name, tensor in tensors.items() if name != "embedding")
        if "lm_head" not in tensors:
            streamed += tensors["embedding"].nbytes
        elif head_bytes:
            streamed += head_bytes - tensors["lm_head"].nbytes
        self.tally = Tally(variant.name, streamed)

    @staticmethod
    def _with_plain_head(
        variant: Variant, model: str, backend_name: str, threads: int, backend: Backend
    ) -> tuple[Decoder, int]:
        """Layers of this variant, the output matrix of the one without quantization, turned as the layers
        are, and its bytes."""
        quantized = prepare_model(model, variant.dtype, backend)
        mapped = map_weights(quantized.directory)
        weights = assemble(quantized.spec, mapped.tensors, mapped.unpacked, backend)
        plain = map_weights(prepare_model(model, variant.dtype, ReferenceBackend()).directory).tensors
        rows, norm = plain.get("lm_head", plain["embedding"]), plain["final_norm"]
        turned = dict(turned_tensors([("final_norm", norm), ("lm_head", rows)], quantized.spec))["lm_head"]
        head = make_backend(backend_name, threads).pack_linear(turned.to(rows.dtype))
        mixed = dataclasses.replace(weights, lm_head=head)
        return Decoder(quantized.spec, mixed, backend, quantized.spec.max_context_len), head.nbytes

    def window(self, tokens: Sequence[int]) -> Tensor:
        """Logits fp32 [len(tokens), vocab] of a text from its beginning."""
        hidden = self._forward([tokens], [0], len(tokens)).clone()
        with torch.inference_mode():
            return torch.cat([self.decoder.logits(part) for part in hidden.split(64)])

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations, all prompts in one batch."""
        longest = max(map(len, prompts)) + num_tokens
        answers: list[list[int]] = [[] for _ in prompts]
        parts, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
        for _ in range(num_tokens):
            hidden = self._forward(parts, starts, longest)
            ends = torch.tensor([len(part) for part in parts]).cumsum(0) - 1
            with torch.inference_mode():
                chosen = self.decoder.logits(hidden[ends]).argmax(dim=-1).tolist()
            starts = [start + len(part) for start, part in zip(starts, parts, strict=True)]
            parts = [[token] for token in chosen]
            for answer, token in zip(answers, chosen, strict=True):
                answer.append(token)
        return answers

    def _forward(self, parts: Sequence[Sequence[int]], starts: Sequence[int], longest: int) -> Tensor:
        per_sequence = -(-longest // BLOCK_SIZE)
        rows = [
            Row(
                request=RequestId(str(index)),
                attempt=Attempt(1),
                token_ids=part,
                start=start,
                block_ids=[BlockId(index * per_sequence + block) for block in range(per_sequence)],
                sample=SampleSpec(GREEDY, (), ()),
            )
            for index, (part, start) in enumerate(zip(parts, starts, strict=True))
        ]
        with torch.inference_mode():
            batch = pack(rows, BLOCK_SIZE, self.decoder.max_model_len, self._pool.device)
            return self.decoder.forward(batch, self._pool).hidden


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    num_blocks = max(
        -(-arguments.window // BLOCK_SIZE), len(PROMPTS) * (2 + -(-arguments.num_tokens // BLOCK_SIZE))
    )
    subjects = [
        Subject(variant, arguments.model, arguments.backend, arguments.threads, num_blocks)
        for variant in VARIANTS
    ]
    base = subjects[0]
    tokenizer = Tokenizer.load(base.directory)
    text = list(tokenizer.encode(PROSE.read_text(encoding="utf-8")))
    windows = [text[start : start + arguments.window] for start in range(0, len(text), arguments.window)]
    for tokens in windows:
        expected = base.window(tokens)
        for subject in subjects:
            subject.tally.add_window(expected, subject.window(tokens), tokens)
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    base_answers = base.answers(prompts, arguments.num_tokens)
    for subject in subjects:
        for expected_answer, answer in zip(
            base_answers, subject.answers(prompts, arguments.num_tokens), strict=True
        ):
            subject.tally.add_answer(expected_answer, answer)
    return {
        "model": arguments.model,
        "backend": arguments.backend,
        "text_tokens": len(text),
        "window": arguments.window,
        "prompts": len(prompts),
        "answer_tokens": arguments.num_tokens,
        "base": BASE,
        "variants": [asdict(subject.tally.quality()) for subject in subjects],
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']} on the {result['backend']} backend against {result['base']}: "
        f"{result['text_tokens']} tokens of prose in windows of {result['window']}; "
        f"{result['prompts']} greedy answers of {result['answer_tokens']} tokens",
        "KL in nats per token; MB: matrices in memory; prefix: tokens before an answer differs",
        "",
        f"{'variant':<17}{'MB':>7}{'perplexity':>12}{'KL mean':>10}{'KL p99':>10}{'KL max':>10}"
        f"{'same argmax':>13}{'prefix':>8}",
    ]
    lines += [
        f"{v['name']:<17}{v['weight_megabytes']:>7.0f}{v['perplexity']:>12.3f}{v['kl_mean']:>10.5f}"
        f"{v['kl_p99']:>10.4f}{v['kl_max']:>10.4f}{v['same_argmax']:>13.1%}{v['mean_common_prefix']:>8.1f}"
        for v in result["variants"]
    ]
    return "\n".join(lines)


def too_dear(result: dict[str, Any]) -> list[str]:
    """What each variant beyond its gate costs."""
    variants = {one["name"]: one for one in result["variants"]}
    base, complaints = variants[result["base"]]["perplexity"], []
    for name, (most_kl, most_perplexity) in GATES.items():
        kl, perplexity = variants[name]["kl_mean"], variants[name]["perplexity"] / base
        if not (kl <= most_kl and perplexity <= most_perplexity):  # NaN is beyond, too
            complaints.append(
                f"{name}: mean KL {kl:.4f} of at most {most_kl}, "
                f"perplexity {perplexity:.3f} times {result['base']}'s of at most {most_perplexity}"
            )
    return complaints


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="as `baton serve --model`")
    parser.add_argument("--backend", default=NAMES[0], choices=NAMES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--window", type=int, default=512, help="tokens of text that see one another")
    parser.add_argument("--num-tokens", type=int, default=64, help="of each greedy answer")
    parser.add_argument("--output", type=Path, help="write NAME.json and NAME.txt too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = measure(options)
    print(table(result))
    if options.output is not None:
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        options.output.with_suffix(".txt").write_text(table(result) + "\n")
    complaints = too_dear(result) if options.model == "demo" else []
    for complaint in complaints:
        print(f"costs too much quality: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
