"""What compiled code checks before each call of a language model, and how long that takes a host.

python scripts/measure_guards.py [--layers 12 48] [--ways original exact ...] [--output FILE.csv]

torch.compile guards on all that it has looked at while it traced. For one token with a cache of
fixed size, GPT-2 with ALiBi as it is, with a dense bias by hand, without a bias, and converted:
lines of the tree of guards, and the least time that going through it takes. Needs no card: the
converted model is traced as on one, and no kernel runs. Rows of other versions of torch, and of
other machines, stay in the file.
"""

from __future__ import annotations

import argparse
import inspect
import os
import platform
from pathlib import Path
from typing import Any

import row_file
import torch
from torch import fx
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._C._dynamo.guards import profile_guard_manager
from whole_models.case import EXACT, NONE_CUDNN, ORIGINAL, SDPA_CUDNN, Prepared
from whole_models.language import decode

from flashbias_convert.attention import backends, registration
from flashbias_convert.swap import patched_modules

ROOT = Path(__file__).resolve().parent.parent
FIELDS = ("way", "layers", "guards", "us", "python", "torch", "host")
#: what tells one row from another
KEY = ("way", "layers", "torch", "host")
WAYS = (ORIGINAL, SDPA_CUDNN, NONE_CUDNN, EXACT)
#: calls that are timed together, and how often
TOGETHER, TIMES = 5, 300


def pretend_card() -> None:
    """Converted models are traced as on a card, on which their kernels would run."""
    backends._device_problem = lambda device: None
    registration.launch = lambda spec, tensors, **_: tensors["o"].zero_()  # type: ignore[assignment]


def without_computing(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler whose code returns zeros: what checks it is all that counts here."""
    (results,) = next(node for node in graph.graph.nodes if node.op == "output").args

    def run(*given: Any) -> tuple[Any, ...]:
        return tuple(_zeros(result) for result in results)

    return run


def _zeros(result: Any) -> Any:
    value = result.meta.get("example_value") if isinstance(result, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return result
    return torch.zeros([int(size) for size in value.shape], dtype=value.dtype)


def prepared(way: str, layers: int) -> Prepared:
    """A model that is narrow: widths change no guard."""
    sizes = {"vocab_size": 100, "n_positions": 64, "n_embd": 128, "n_head": 4, "n_layer": layers}
    case = decode("GPT-2", sizes, 1, 32, True)
    made = case.prepare(way, torch.device("cpu"), torch.float16)
    for module in patched_modules(made.model):
        module.score_bias.backend = "triton"
    return made


@torch.no_grad()
def measured(way: str, layers: int) -> dict[str, Any]:
    """One row."""
    torch.compiler.reset()
    made = prepared(way, layers)
    run: Any = torch.compile(made.model, backend=without_computing, fullgraph=True)
    for _ in range(2):
        run(*made.args, **made.kwargs)
    forward = type(made.model).forward
    given = inspect.signature(forward).bind(made.model, *made.args, **made.kwargs)
    given.apply_defaults()
    (entry,) = _debug_get_cache_entry_list(forward.__code__)  # or it was compiled twice
    manager, places = entry.guard_manager, dict(given.arguments)
    times = [profile_guard_manager(manager.root, places, TOGETHER) for _ in range(TIMES)]
    return {
        "way": way,
        "layers": layers,
        "guards": sum("+-" in line for line in str(manager).splitlines()),
        "us": round(min(times), 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results/guards.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pretend_card()
    found = [measured(way, layers) for layers in options.layers for way in options.ways]
    new = {row_file.key_of(row, KEY) for row in found}
    kept = [r for r in row_file.read(options.output) if row_file.key_of(r, KEY) not in new]
    row_file.write(options.output, FIELDS, [*kept, *found])
    for row in found:
        print(f"{row['way']:12s} {row['layers']:3d} layers {row['guards']:6d} guards "
              f"{row['us']:8.1f} us, torch {row['torch']}")  # fmt: skip


if __name__ == "__main__":
    main()
