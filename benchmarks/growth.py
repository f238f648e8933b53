"""How a trace grows: what it adds to a pass, against tokens, responses, layers and width.

The public call of the default score, which makes two forward passes, on random responses. Work is counted, not timed:
floating-point operations and the peak of allocated bytes of a traced pass less those of the same pass without a trace,
so a busy machine changes nothing. One size varies at a time; the slope of the logarithms is 1 where the trace grows in
proportion. Nothing is left to chance: what stands as its interval is the range of the slopes from each size to the
next. `peak_memory` is the largest ratio of the peaks with and without, beside the range over all sizes. Width is shown
against the number of weights in a layer: a slope of 2 would be a matrix of weights by weights. `--write-docs` rewrites
the table and the picture of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks._growth_page import write_page
from benchmarks.common import REPOSITORY, emit, parse_arguments
from gradtrace.attribution import InfluenceTracer
from gradtrace.intervals import Interval


@dataclass(frozen=True)
class Size:
    tokens: int = 32
    """Of each response; the prompt has 16."""
    groups: int = 8
    """Of four responses each."""
    layers: int = 4
    width: int = 128


VARIED: dict[str, list[int]] = {
    "tokens": [16, 32, 64, 128],
    "groups": [8, 16, 32, 64],
    "layers": [4, 8, 16],
    "width": [64, 128, 256, 512],
}
PROMPT, EACH = 16, 4


def model_of(size: Size) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=size.width,
            intermediate_size=2 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    ).eval()


class Pass:
    """One pass over random responses, with a trace or without."""

    def __init__(self, size: Size) -> None:
        self.model = model_of(size)
        rows = size.groups * EACH
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(64, (rows, PROMPT + size.tokens), generator=generator)
        self.signs = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)

    def terms(self, rows: Tensor) -> Tensor:
        ids = self.ids[rows]
        logits = self.model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
        found = logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
        return found * self.signs[rows][:, None]

    def micro_batches(self) -> Iterator[Tensor]:
        for start in range(0, len(self.ids), 8 * EACH):
            yield torch.arange(start, min(start + 8 * EACH, len(self.ids)))

    def plain(self, optimizer: Any) -> None:
        for rows in self.micro_batches():
            self.terms(rows).sum().backward()

    def traced(self, optimizer: Any) -> None:
        self.plain(optimizer)
        InfluenceTracer(self.model, optimizer).parts(
            lambda: [own for rows in self.micro_batches() for own in self.terms(rows)]
        )


def counted(size: Size, kind: str) -> tuple[int, int]:
    """(operations, peak bytes) of a pass."""
    whole = Pass(size)
    optimizer = torch.optim.AdamW(whole.model.parameters(), lr=1e-6)
    work: Callable[[Any], None] = whole.traced if kind == "traced" else whole.plain
    with FlopCounterMode(display=False) as flops:
        work(optimizer)
    whole.model.zero_grad()
    with Peak() as bytes_:
        work(optimizer)
    return flops.get_total_flops(), bytes_.peak


class Peak(TorchDispatchMode):
    """The peak of bytes allocated by operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()

    def _free(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                size = storage.nbytes()
                self._known[storage] = size
                weakref.finalize(storage, self._free, size)
                self.now += size
                self.peak = max(self.peak, self.now)
        return found


def slope(sizes: list[float], values: list[float]) -> float:
    """Of the logarithms, by least squares."""
    x, y = ([math.log(value) for value in some] for some in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def growth(sizes: list[float], values: list[float]) -> Interval:
    """The slope over all sizes, and the range of those from each size to the next."""
    steps = [slope(list(pair), list(of)) for pair, of in zip(pairwise(sizes), pairwise(values), strict=True)]
    return Interval(slope(sizes, values), min(steps), max(steps), len(sizes))


def main(arguments: list[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--write-docs", action="store_true", help="rewrite docs/scaling.md")

    args = parse_arguments(__doc__, arguments, extra)
    detail: dict[str, Any] = {}
    ratios: dict[str, Interval] = {}
    for name, values in VARIED.items():
        rows = []
        for value in values[:2] if args.quick else values:
            size = replace(Size(), **{name: value})
            (plain, plain_peak), (traced, traced_peak) = (counted(size, kind) for kind in ("plain", "traced"))
            scale = value**2 if name == "width" else value
            rows.append(
                {
                    "size": scale,
                    "plain_flops": plain,
                    "added_flops": traced - plain,
                    "plain_bytes": plain_peak,
                    "added_bytes": traced_peak - plain_peak,
                }
            )
        detail[name] = rows
        sizes = [float(row["size"]) for row in rows]
        ratios[f"growth_flops_{name}"] = growth(sizes, [row["added_flops"] for row in rows])
        peaks = [1 + row["added_bytes"] / row["plain_bytes"] for row in rows]
        ratios[f"peak_memory_{name}"] = Interval(max(peaks), min(peaks), max(peaks), len(peaks))
    if args.write_docs:
        write_page(REPOSITORY / "docs", detail, {label: ratio.mean for label, ratio in ratios.items()})
    emit("growth", ratios, detail)


if __name__ == "__main__":
    main()
