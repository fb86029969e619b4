"""Time our operator beside its peers, in one run on one card.

python scripts/bench_attention.py [--kernel FILE.py] [--shapes NAME ...] [--tuned] [--output FILE]

Peers, where they can compute the shape: torch SDPA without a bias (flash, cuDNN, memory-efficient),
with the dense bias (memory-efficient, cuDNN), compiled FlexAttention with the dense bias and with
the closed form of ALiBi and of relative tables, FlexAttention with max-autotune (`--tuned`, which
takes minutes), flash-attn with ALiBi slopes, FlashAttention 3 and 4 without a bias, xFormers with
the dense bias, cuEquivariance's triangle attention, our sdpa path (the paper's concatenation), and
a kernel from a file, the paper's published one for instance (see `given_kernel.py`). A package that
is not installed is a row that says so; once it is there, a run with --resume measures it.

Every result is compared with float64 on a slice; a peer that is off by more than `WRONG` is marked,
and no ratio in the tables is made with it. `median_ms` is time on the card (CUDA graph replays),
`call_ms` the time of eager calls, Python included; `peak_mib` what a call allocates, `held_mib`
what a peer keeps between calls, such as the dense bias. Shapes get ready (compile, and are
compared) together and are timed one after the other. What lacks memory beside other commands
(`beside.py`) is no row, unless the whole card is too small.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import row_file
import torch
from attention_figure import draw
from attention_peers import Call, Peer, peers
from attention_shapes import SHAPES, Shape, tiny
from failures import LACKED, lacked_beside_others
from given_kernel import GivenKernel
from optional_peers import NOT_INSTALLED, NotInstalled, is_stale, not_installed
from torch import Tensor
from turns import Wait, in_turns

from flashbias_convert import ScoreBias
from flashbias_convert.attention import flashbias_attention

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda")
#: Relative error from which on a result is wrong: rounding to bf16 gives 2e-3 to 5e-3.
WRONG = 0.03
OUT_OF_MEMORY = "out of memory"
CRASHED = "crashed"
#: Entries of a dense bias from which on a shape has the card to itself.
LARGE = 2**31
FIELDS = (
    "shape", "peer", "has_bias", "median_ms", "p20_ms", "p80_ms", "call_ms", "peak_mib", "held_mib",
    "error", "state", "note", "card", "torch", "triton",
)  # fmt: skip


def error(out: Tensor, shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None
          ) -> float:  # fmt: skip
    """Relative error of the last 128 queries of the first batch entry and head against float64."""
    out = out.reshape(*q.shape[:-1], v.shape[-1])
    at = (0,) * (q.dim() - 3)
    own = None if bias is None else _first_entry(bias.select_heads([0]), len(at))
    rows = min(q.shape[-2], 128)
    start = k.shape[-2] - rows  # with as many queries as keys or fewer, the last ones
    parts = [x[at][:1].double() for x in (q[..., -rows:, :], k, v)]
    own = None if own is None else _last_rows(own, rows)
    options = {**shape.options, "query_start": start}
    truth = flashbias_attention(*parts, own, backend="eager", **options)
    got = out[at][:1, -rows:].double()
    return float((got - truth).norm() / truth.norm())


def _first_entry(bias: ScoreBias, dims: int) -> ScoreBias:
    """The bias of batch entry 0, for terms that have batch dimensions."""
    tails = {"ids": 1, "rel_h": 3, "rel_w": 3}

    def first(name: str, x: Tensor) -> Tensor:
        while name in tails and x.dim() > tails[name]:
            x = x[0]
        return x

    return ScoreBias(tuple(t.map_tensors(first) for t in bias.terms), bias.num_heads)


def _last_rows(bias: ScoreBias, rows: int) -> ScoreBias:
    """The bias of the last queries alone."""
    axes = {"phi_q": -2, "u": -1, "bias": -2, "rel_h": -2, "rel_w": -2}

    def last(name: str, x: Tensor) -> Tensor:
        return x.narrow(axes[name], x.shape[axes[name]] - rows, rows) if name in axes else x

    terms = []
    for term in bias.terms:
        own = {name: last(name, x) for name, x in term.tensors().items()}
        if term.kind == "regions" and "key_ids" not in own:
            own["key_ids"], own["ids"] = own["ids"], own["ids"][..., -rows:]
        terms.append(type(term).from_state(term.static(), own))
    return ScoreBias(tuple(terms), bias.num_heads)


def measure(call: Callable[[], Tensor]) -> dict[str, Any]:
    """Milliseconds and peak MiB beyond the inputs."""
    import triton

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    eager = triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median")
    with torch.cuda.stream(torch.cuda.Stream()):
        low, middle, high = triton.testing.do_bench_cudagraph(
            call, rep=40, quantiles=[0.2, 0.5, 0.8]
        )
    return {
        "median_ms": f"{middle:.4f}", "p20_ms": f"{low:.4f}", "p80_ms": f"{high:.4f}",
        "call_ms": f"{eager:.4f}", "peak_mib": f"{peak:.1f}",
    }  # fmt: skip


def ready(peer: Peer, shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: ScoreBias | None
          ) -> tuple[dict[str, Any], Call | None]:  # fmt: skip
    """What is known about a peer before the clock runs, and its call, compiled; None if it fails.

    Illegal accesses are no errors that one survives: see `turns`.
    """
    found: dict[str, Any] = {"peer": peer.name, "has_bias": int(peer.has_bias or bias is None)}
    before = torch.cuda.memory_allocated()
    try:
        call = peer.make()
        wrong = error(call(), shape, q, k, v, bias if peer.has_bias else None)
        found |= {"error": f"{wrong:.1e}", "state": "ok" if wrong < WRONG else "wrong"}
        found["held_mib"] = f"{(torch.cuda.memory_allocated() - before) / 2**20:.1f}"
        return found, call
    except NotInstalled as problem:
        return found | {"state": NOT_INSTALLED, "note": str(problem)}, None
    except Exception as problem:  # a peer that fails is a row, not the end of the run
        if lacked_beside_others(problem):
            return found | {"state": LACKED}, None
        if isinstance(problem, torch.OutOfMemoryError):
            return found | {"state": OUT_OF_MEMORY}, None
        if type(problem).__name__ == "AcceleratorError":  # such as an illegal memory access
            return found | {"state": CRASHED}, None
        text = f"{type(problem).__name__}: {problem}".splitlines()[0][:90]
        return found | {"state": text}, None


def timed(found: dict[str, Any], call: Call | None) -> dict[str, Any]:
    """The row of a peer: what `ready` found, and the times."""
    try:
        return found if call is None else found | measure(call)
    except torch.OutOfMemoryError as problem:
        return found | {"state": LACKED if lacked_beside_others(problem) else OUT_OF_MEMORY}


def machine() -> dict[str, str]:
    """Where the times were taken."""
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"card": torch.cuda.get_device_name(), **versions}


def bench_shape(name: str, kernel_file: Path | None, tuned: bool, output: Path, wait: Wait) -> None:
    """Measure the peers that have no row on one shape; append rows to `output`."""
    kernel = None if kernel_file is None else GivenKernel.of(kernel_file)
    shape = SHAPES[name]
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.bfloat16, DEVICE)
    bias = None if shape.bias is None else shape.bias(shape, DEVICE)
    known = _known(output)
    left = [p for p in peers(shape, q, k, v, bias, kernel, tuned=tuned)
            if (name, p.name) not in known]  # fmt: skip
    found = [ready(peer, shape, q, k, v, bias) for peer in left]
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    wait()
    for seen, call in found:
        told = {"shape": name, **timed(seen, call), **machine()}
        if told["state"] != LACKED:
            row_file.append(output, FIELDS, told)
        if told["state"] == NOT_INSTALLED:  # said once, at the end
            continue
        shown = [told.get(x, "-") for x in ("median_ms", "call_ms", "peak_mib", "error")]
        print(f"{name:30s} {told['peer']:20s}", *shown, told["state"], flush=True)


def _known(output: Path) -> set[tuple[str, str]]:
    """Shapes and peers that have a row."""
    return {(row["shape"], row["peer"]) for row in row_file.read(output)}


def peers_of(name: str, kernel_file: Path | None, tuned: bool) -> list[str]:
    """The names of all peers of a shape, asked at a size that costs nothing."""
    kernel = None if kernel_file is None else GivenKernel.of(kernel_file)
    shape, cpu = tiny(SHAPES[name]), torch.device("cpu")
    bias = None if shape.bias is None else shape.bias(shape, cpu)
    own = peers(shape, *shape.inputs(torch.float32, cpu), bias, kernel, tuned=tuned)
    return [peer.name for peer in own]


def _left(options: argparse.Namespace) -> list[str]:
    """The shapes that lack rows; begins the file."""
    rows = row_file.begin(options.output, FIELDS, resume=options.resume)
    row_file.write(options.output, FIELDS, [row for row in rows if not is_stale(row)])
    known = _known(options.output)
    return [
        name
        for name in options.shapes
        if any((name, peer) not in known for peer in peers_of(name, options.kernel, options.tuned))
    ]


def waves(names: list[str], size: int) -> list[list[str]]:
    """Shapes that get ready together: at most `size`, and one whose dense bias is large alone."""
    large = [x for x in names if SHAPES[x].heads * SHAPES[x].n ** 2 > LARGE]
    small = [x for x in names if x not in large]
    together = [small[i : i + size] for i in range(0, len(small), size)]
    return together + [[x] for x in large]


def require_card(device: torch.device) -> None:
    """Leave with words, and before any table is touched, where a CUDA card is wanting.

    Raises:
        SystemExit: the device is a CUDA card, and this machine has none.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this machine has no CUDA card: nothing can be measured here")


def main() -> None:
    """Time every peer on every shape; print and write a table and a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", type=Path, help="a Python file, see given_kernel.py")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--tuned", action="store_true", help="FlexAttention tuned, too")
    parser.add_argument("--together", type=int, default=10, help="shapes that get ready at a time")
    parser.add_argument("--stop-s", type=float, default=math.inf, help="begin no shape after")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/bench_attention.csv")
    options = parser.parse_args()
    require_card(DEVICE)
    started = time.monotonic()
    for names in waves(_left(options), options.together):
        left = options.stop_s - (time.monotonic() - started)
        calls = [(name, options.kernel, options.tuned, options.output) for name in names]
        lost = calls if left < 0 else in_turns(bench_shape, calls, seconds=left)
        for name, *_ in lost:
            print(f"{name}: not measured")
    if missing := not_installed(row_file.read(options.output)):
        print(missing)
    draw(options.output)


if __name__ == "__main__":
    main()
