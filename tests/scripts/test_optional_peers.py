"""Peers of packages that may not be installed: rows that say so, and calls of stand-ins."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import attention_peers
import backward_step
import bench_attention
import bench_backward
import optional_peers
import row_file
from attention_shapes import SHAPES, Shape, alibi, low_rank, tiny
from optional_peers import MODULES, NOT_INSTALLED

from flashbias_convert.attention import flashbias_attention

from .turns_here import in_turns_here

CPU = torch.device("cpu")
NO_BIAS = {
    "flash_attn_interface": "flash-attn 3, no bias",
    "flash_attn.cute": "flash-attn 4, no bias",
}
RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "results"


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """What these packages compute, (B, N, H, D); causal queries are the last ones."""
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = q @ k.mT * softmax_scale
    if causal:
        n, m = scores.shape[-2:]
        later = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
        scores = scores.masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


class Stand:
    """Stands in for a package of flash attention.

    Attributes:
        seen: shapes of q and k, and causality, of all calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, sums: bool = False) -> None:
        self.seen: list[Any] = []
        made = ModuleType(module)

        def flash_attn_func(
            q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False
        ) -> Any:
            self.seen.append((tuple(q.shape), tuple(k.shape), causal))
            out = attend(q, k, v, softmax_scale, causal).to(q.dtype)
            return (out, out.new_zeros(q.shape[0], q.shape[2], q.shape[1])) if sums else out

        made.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module, made)


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these packages is installed, but for what a test puts in their place."""
    for module in MODULES.values():
        monkeypatch.setitem(sys.modules, module, None)


def named(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> dict[str, attention_peers.Peer]:
    bias = None if shape.bias is None else shape.bias(shape, CPU)
    return {peer.name: peer for peer in attention_peers.peers(shape, q, k, v, bias)}


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("module", NO_BIAS)
@pytest.mark.parametrize(
    "shape",
    [
        Shape((2,), 3, 24, 16),
        Shape((2,), 3, 24, 16, low_rank(4)),
        Shape((2, 5), 3, 24, 16, low_rank(4), {"cosine": True, "scale": 10.0}),
        Shape((2,), 3, 24, 16, alibi, {"causal": True}),
        Shape((2,), 3, 24, 16, alibi, {"causal": True}, queries=2),
    ],
    ids=["no bias", "low rank", "two batch dimensions, cosine", "causal", "decoding"],
)
def test_flash_attention_without_a_bias(
    shape: Shape, module: str, sums: bool, nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(monkeypatch, module, sums)
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.float32, CPU)
    peer = named(shape, q, k, v)[NO_BIAS[module]]
    assert peer.has_bias == (shape.bias is None)
    out = peer.make()()
    truth = flashbias_attention(
        q.double(), k.double(), v.double(), None, backend="eager", **shape.options
    )
    torch.testing.assert_close(out.double(), truth, rtol=0.0, atol=1e-5)
    entries = q.shape[:-3].numel()
    rows, keys = (entries, q.shape[-2], 3, 16), (entries, 24, 3, 16)
    assert stand.seen == [(rows, keys, shape.options.get("causal", False))]


def test_queries_that_are_not_the_last_ones_are_not_theirs() -> None:
    """Their causality begins at the last keys."""
    for start, served in ((0, False), (22, True)):
        options = {"causal": True, "query_start": start}
        shape = Shape((1,), 3, 24, 16, alibi, options, queries=2)
        names = named(shape, *shape.inputs(torch.float32, CPU))
        assert all((name in names) is served for name in NO_BIAS.values())


def test_torchs_kernels_without_a_bias() -> None:
    for name in ("swinv2b-s3 no bias", "swinv2b-s3 R=16"):
        shape = tiny(SHAPES[name])
        peers = named(shape, *shape.inputs(torch.float32, CPU))
        for kernel in ("flash", "cudnn", "efficient"):
            assert peers[f"{kernel}, no bias"].has_bias == (shape.bias is None)


def test_what_is_missing_is_said_before_anything_is_made(nothing: None) -> None:
    shape = tiny(SHAPES["t5 dense"])
    q, k, v = shape.inputs(torch.float32, CPU)
    assert shape.bias is not None

    def dense(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a bias was made for nobody")

    own = attention_peers.peers(shape, q, k, v, shape.bias(shape, CPU), dense=dense)
    found = {peer.name: peer for peer in own if peer.name in MODULES}
    assert found.keys() == MODULES.keys() - {"flash-attn, alibi"}
    for name, peer in found.items():
        with pytest.raises(optional_peers.NotInstalled, match=MODULES[name]):
            peer.make()


def test_a_package_is_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 4 alone is a folder that looks like the package of version 2."""
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("raise ImportError\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert optional_peers.is_installed("flash_attn.cute")
    assert not optional_peers.is_installed(MODULES["flash-attn, alibi"])
    assert not optional_peers.is_installed("flash_attn_interface")
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError\n")
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text("raise ImportError\n")
    importlib.invalidate_caches()
    assert optional_peers.is_installed(MODULES["flash-attn, alibi"])
    assert not any(name.split(".")[0] == "flash_attn" for name in sys.modules)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`bench_attention` with optional peers alone, on a CPU; returns what was compared."""
    compared: list[str] = []
    ready = bench_attention.ready

    def own(*args: Any, **kwargs: Any) -> list[attention_peers.Peer]:
        return [p for p in attention_peers.peers(*args, **kwargs) if p.name in MODULES]

    def seen(peer: attention_peers.Peer, *args: Any) -> Any:
        compared.append(peer.name)
        return ready(peer, *args)

    shapes = {name: tiny(SHAPES[name]) for name in ("alibi gpt2", "t5 dense")}
    changed = {
        "DEVICE": CPU, "SHAPES": shapes, "peers": own, "ready": seen,
        "in_turns": in_turns_here, "draw": lambda _: None,
        "machine": lambda: {"card": "none", "torch": "2", "triton": "3"},
        "measure": lambda call: {"median_ms": "1", "peak_mib": "1"},
    }  # fmt: skip
    for name, value in changed.items():
        monkeypatch.setattr(bench_attention, name, value)
    for name in ("memory_allocated", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    return compared


def test_a_missing_package_is_a_row_until_it_is_there(
    tmp_path: Path, nothing: None, on_a_cpu: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    output = tmp_path / "table.csv"

    def run(*words: str) -> dict[tuple[str, str], row_file.Row]:
        named = ["--shapes", "alibi gpt2", "t5 dense", "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["script", *named, *words])
        bench_attention.main()
        rows = row_file.read(output)
        found = {(row["shape"], row["peer"]): row for row in rows}
        assert len(found) == len(rows)
        return found

    first = run()
    assert {peer for _, peer in first} == MODULES.keys()
    for (_, peer), row in first.items():
        assert row["state"] == NOT_INSTALLED and MODULES[peer] in row["note"]
        assert not row["median_ms"] and not row["error"]
    said = capsys.readouterr().out
    assert all(said.count(peer) == 1 for peer in MODULES)  # once, and not for each shape
    on_a_cpu.clear()
    assert run("--resume") == first and not on_a_cpu

    Stand(monkeypatch, "flash_attn_interface")
    second, peer = run("--resume"), "flash-attn 3, no bias"
    assert on_a_cpu == [peer, peer] and second.keys() == first.keys()
    for key, row in second.items():
        assert row == first[key] if key[1] != peer else row["state"] == "ok"
        if key[1] == peer:
            assert (row["has_bias"], row["note"]) == ("0", "") and float(row["error"]) < 0.02
    on_a_cpu.clear()
    assert run("--resume") == second and not on_a_cpu


def test_older_tables_are_read_and_gone_on_with(tmp_path: Path) -> None:
    for script, name in ((bench_attention, "bench_attention"), (bench_backward, "bench_backward")):
        copy = tmp_path / f"{name}.csv"
        copy.write_bytes((RESULTS / copy.name).read_bytes())
        before = row_file.read(copy)
        row_file.begin(copy, script.FIELDS, resume=True)
        after = row_file.read(copy)
        assert [{**row, "note": row.get("note", "")} for row in before] == after
        assert not any(map(optional_peers.is_stale, after))
    assert optional_peers.not_installed([]) == ""


def test_training_says_what_is_missing_too(nothing: None) -> None:
    shape = bench_backward.shape_of("alibi gpt2", True)
    problem = backward_step.Problem.of(shape, False, torch.float32, CPU)
    made = {peer.name: make for peer, make in backward_step.steps(problem)}
    told, step = bench_backward.ready(made["xformers, dense"], None, CPU)
    assert told == {"state": NOT_INSTALLED, "note": "no module xformers"} and step is None


def test_a_bias_is_there_for_the_others() -> None:
    """No attention without a bias stands among those with one, nor the other way round."""
    shape = tiny(SHAPES["alibi gpt2"])
    peers = named(shape, *shape.inputs(torch.float32, CPU))
    assert all(peer.has_bias != ("no bias" in name) for name, peer in peers.items())
