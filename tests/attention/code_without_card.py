"""Prints what Inductor generates for calls of few queries on a card that is not there.

python tests/attention/code_without_card.py CASE ...

Everything up to the launch is the real thing: the trace, the lowering, and each kernel that a graph
holds is compiled by Triton. What would ask a card, or load a binary, is replaced for the whole
process: run it as one of its own. One line of JSON for each case.
"""

from __future__ import annotations

import contextlib
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_function
from torch._inductor import config, decomposition, graph
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses import FakeTensorMode, fake_tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
CARD = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30,
    warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, shared_memory_per_block_optin=227 * 1024, L2_cache_size=50 << 20,
    gcnArchName="", uuid="none",
)  # fmt: skip
HEADS, KEYS, SIZE = 8, 2176, 64


class Driver:
    """The part of Triton's that compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0


def pretend() -> tuple[list[str], list[Any]]:
    """A card for the rest of the process; gives code and kernels as they are generated."""
    codes: list[str] = []
    kernels: list[Any] = []
    cuda: Any = torch.cuda
    for name, value in {
        "get_device_properties": CARD, "get_device_name": CARD.name, "device_count": 1,
        "get_device_capability": (9, 0), "current_device": 0, "is_available": True,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "_exchange_device": 0, "_maybe_exchange_device": 0, "_lazy_init": None,
        "synchronize": None,
    }.items():  # fmt: skip
        setattr(cuda, name, lambda *_, found=value, **__: found)
    for name, value in {
        "get_device_properties": CARD, "get_compute_capability": 90, "is_available": True,
        "exchange_device": 0, "maybe_exchange_device": 0, "current_device": 0, "device_count": 1,
        "get_raw_stream": 0,
    }.items():  # fmt: skip
        own = staticmethod(lambda *_, found=value, **__: found)
        setattr(CudaInterface, name, own)
        if hasattr(CudaInterface.Worker, name):
            setattr(CudaInterface.Worker, name, own)
    patched: Any = fake_tensor
    patched.init_gpu_context = lambda *_: None
    triton.runtime.driver.set_active(Driver())
    patched = triton_helpers
    patched.set_driver_to_gpu = lambda: None
    patched = triton_heuristics.CachingAutotuner
    patched.precompile = lambda self, *_, **__: kernels.append(self)
    patched = graph.GraphLowering
    patched.save_output_code = staticmethod(codes.append)
    config.compile_threads = 1
    config.fx_graph_cache = False
    return codes, kernels


def inputs(case: str) -> dict[str, Any]:
    """Of one token and a cache that is written to."""
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    found = {
        "q": torch.empty(1, 1, HEADS, SIZE, **place).transpose(1, 2),
        "k": torch.empty(1, HEADS, KEYS, SIZE, **place),
        "v": torch.empty(1, HEADS, KEYS, SIZE, **place),
        "new": torch.empty(1, HEADS, 1, SIZE, **place),
        "slopes": torch.empty(HEADS, device="cuda"),
        "slots": torch.empty(1, device="cuda", dtype=torch.int64),
    }
    if case == "computed mask":
        found["places"] = torch.empty(KEYS, device="cuda", dtype=torch.int64)
    if case == "mask":
        found["mask"] = torch.empty(1, KEYS, device="cuda", dtype=torch.bool)
    if case == "gate":
        found["gate"] = torch.empty(1, HEADS, 1, SIZE, **place)
    return found


def call(case: str, given: dict[str, Tensor]) -> Tensor:
    """A step of decoding, with what is computed before and after."""
    from flashbias_convert.attention.flags import CAUSAL
    from flashbias_convert.attention.registration import attention_op

    mask = given.get("mask")
    if case == "computed mask":
        mask = torch.le(given["places"], given["slots"]).unsqueeze(0)
    spec = "((None, 0, 0, False, False, 0.0, False, 0, False, False, ('slopes',)),)"
    out = attention_op(
        given["q"] * 2, given["k"].index_copy(2, given["slots"], given["new"]), given["v"],
        [given["slopes"]], spec, 0.125, None, mask, 0, given["slots"], CAUSAL, given.get("gate"),
    )  # fmt: skip
    merged: Tensor = out.transpose(1, 2).flatten(2).sin()
    return merged


def call_by_place(case: str, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
    """`call` with tensors in the order of their names."""
    return call(case, dict(zip(names, tensors, strict=True)))


def compiled(kernel: Any) -> dict[str, Any]:
    """What Triton makes of a kernel as Inductor describes it."""
    meta, (settings,) = kernel.triton_meta, kernel.configs
    constants = {**meta["constants"], **settings.kwargs}
    source = ASTSource(kernel.fn, dict(meta["signature"]), constants, meta["configs"][0])
    options = {"num_warps": settings.num_warps, "num_stages": settings.num_stages}
    made = triton.compile(source, target=HOPPER, options=options)
    return {"name": kernel.fn.__name__, "signature": meta["signature"], "ptx": made.asm["ptx"]}


def main() -> None:
    """Generate and print."""
    codes, kernels = pretend()
    table = decomposition.select_decomp_table()
    for case in sys.argv[1:]:
        codes.clear(), kernels.clear()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            given = inputs(case)
            step = partial(call_by_place, case, tuple(given))
            function = aot_function(step, compile_fx_inner, decompositions=table)
            with contextlib.suppress(torch.AcceleratorError):  # the launch, at the very end
                function(*given.values())
        (code,) = codes
        held = [compiled(each) for each in kernels if each.fn.__name__.startswith("traced_")]
        print(json.dumps({"case": case, "code": code, "kernels": held}), flush=True)


if __name__ == "__main__":
    main()
