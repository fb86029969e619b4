"""``flashbias-convert env``: versions, cards, and which backends work on this machine."""

from __future__ import annotations

import platform
import warnings
from typing import Any

from .output import Output
from .parameters import DebugOpt, JsonOpt


def env(json: JsonOpt = False, debug: DebugOpt = False) -> int:
    """Say what is installed, and try every backend on every device."""
    output = Output(as_json=json)
    found = _environment()
    lines = [f"{name} {version}" for name, version in found["versions"].items()]
    lines.append(f"platform {found['platform']}")
    lines += [f"{card['device']} {card['name']}" for card in found["cards"]] or ["no CUDA card"]
    for trial in found["backends"]:
        verdict = "works" if trial["works"] else f"does not work: {trial['reason']}"
        lines.append(f"backend {trial['backend']} on {trial['device']}: {verdict}")
    output.result(lambda: found, *lines)
    return 0


def _environment() -> dict[str, Any]:
    import torch

    from ..inspection import library_versions

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = [{"device": f"cuda:{i}", "name": torch.cuda.get_device_name(i)} for i in range(count)]
    devices = ["cpu", *(card["device"] for card in cards)]
    return {
        "versions": library_versions(),
        "platform": platform.platform(),
        "cards": cards,
        "backends": [
            _try(backend, device) for device in devices for backend in ("triton", "sdpa", "eager")
        ],
    }


def _try(backend: str, device: str) -> dict[str, Any]:
    """Run one small attention with a bias on a backend and compare it with the eager one."""
    import torch

    from ..attention import flashbias_attention
    from ..terms import KeyBias, LowRank, ScoreBias

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)

    q, k, v = (draw(1, 2, 16, 16) for _ in range(3))
    low_rank = LowRank(phi_q=draw(2, 16, 2), phi_k=draw(2, 16, 2))
    bias = ScoreBias((low_rank, KeyBias(values=draw(2, 16))), 2)
    found = {"backend": backend, "device": device, "works": False, "reason": ""}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            out = flashbias_attention(q, k, v, bias, backend=backend)
            truth = flashbias_attention(q, k, v, bias, backend="eager")
        found["works"] = bool(torch.allclose(out, truth, atol=1e-2))
        found["reason"] = "" if found["works"] else "its result differs from the reference"
    except Exception as error:  # whatever keeps it from working is the answer
        found["reason"] = " ".join(str(error).split())[:200] or type(error).__name__
    return found
