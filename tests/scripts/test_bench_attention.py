"""Which peers of a shape, or of a length, are measured by a run that goes on; no kernel runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "paper"))

import attention_peers
import attention_speed
import bench_attention
import bench_lengths
import row_file
from attention_shapes import Shape, alibi, tiny
from turns import BESIDE

from flashbias_convert.attention import flashbias_attention

from .turns_here import in_turns_here

CPU = torch.device("cpu")
NAMES = ["swinv2b-s3 no bias", "swinv2b-s3 R=16"]


class Wanting:
    """Peers whose calls compute nothing; those of these names have not enough memory.

    Attributes:
        names: of shape or length and peer.
        asked: all that were called.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.asked: list[str] = []

    def peers(self, *args: Any, **kwargs: Any) -> Iterator[attention_peers.Peer]:
        """Stands in for `attention_peers.peers`."""
        for peer in attention_peers.peers(*args, **kwargs):
            yield attention_peers.Peer(peer.name, self._make(peer.name, args[1]), peer.has_bias)

    def _make(self, name: str, q: torch.Tensor) -> Callable[[], Any]:
        def make() -> Any:
            self.asked.append(name)
            if name in self.names:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return lambda: q

        return make


@pytest.fixture
def wanting(monkeypatch: pytest.MonkeyPatch) -> Wanting:
    pytest.importorskip("triton")
    made = Wanting()
    shapes = {name: tiny(bench_attention.SHAPES[name]) for name in NAMES}
    where = {"card": "none", "torch": "2", "triton": "3"}
    for script in (bench_attention, bench_lengths):
        monkeypatch.setattr(script, "DEVICE", CPU)
        monkeypatch.setattr(script, "peers", made.peers)
        monkeypatch.setattr(script, "in_turns", in_turns_here)
        monkeypatch.setattr(script, "machine", lambda: where)
        monkeypatch.setattr(script, "draw", lambda _: None)
    monkeypatch.setattr(bench_attention, "SHAPES", shapes)
    monkeypatch.setattr(bench_attention, "error", lambda *_: 0.0)
    monkeypatch.setattr(bench_attention, "measure", lambda _: {"median_ms": "1", "peak_mib": "1"})
    for name in ("memory_allocated", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    return made


def run(
    script: Any, monkeypatch: pytest.MonkeyPatch, output: Path, *words: str
) -> list[tuple[str, str]]:
    monkeypatch.setattr(sys, "argv", ["script", *words, "--output", str(output)])
    script.main()
    return [(row["peer"], row["state"]) for row in row_file.read(output)]


WORDS = {
    bench_attention: ["--shapes", *NAMES],
    bench_lengths: ["--lengths", "8", "16"],
}


@pytest.mark.parametrize("script", WORDS, ids=lambda script: script.__name__)
def test_want_of_memory_beside_others_is_no_row(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanting: Wanting
) -> None:
    output, words, peer = tmp_path / "table.csv", WORDS[script], "flash, no bias"
    monkeypatch.setenv(BESIDE, "/nowhere")
    wanting.names = {peer}
    rows = run(script, monkeypatch, output, *words)
    every = len(wanting.asked)
    assert len(rows) == every - 2 and {state for _, state in rows} == {"ok"}
    assert peer not in [name for name, _ in rows]
    wanting.names = set()
    wanting.asked.clear()
    again = run(script, monkeypatch, output, *words, "--resume")
    assert again == [*rows, (peer, "ok"), (peer, "ok")] and wanting.asked == [peer] * 2
    wanting.asked.clear()
    assert run(script, monkeypatch, output, *words, "--resume") == again and not wanting.asked
    # the card is theirs alone: it is a result, and stays
    monkeypatch.delenv(BESIDE)
    wanting.names = {peer}
    rows = run(script, monkeypatch, output, *words)
    assert len(rows) == every and rows.count((peer, bench_attention.OUT_OF_MEMORY)) == 2
    wanting.asked.clear()
    assert run(script, monkeypatch, output, *words, "--resume") == rows and not wanting.asked


@pytest.mark.parametrize("script", [*WORDS, attention_speed], ids=lambda script: script.__name__)
def test_a_machine_without_a_card_is_told_so_and_keeps_its_table(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "table.csv"
    output.write_text("measured before\n")
    with pytest.raises(SystemExit, match="no CUDA card"):
        run(script, monkeypatch, output)
    assert output.read_text() == "measured before\n"


def test_a_shape_that_was_cut_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanting: Wanting
) -> None:
    output = tmp_path / "table.csv"
    rows = run(bench_attention, monkeypatch, output, "--shapes", *NAMES)
    row_file.write(output, bench_attention.FIELDS, row_file.read(output)[:6])
    wanting.asked.clear()
    assert run(bench_attention, monkeypatch, output, "--shapes", *NAMES, "--resume") == rows
    assert wanting.asked == [peer for peer, _ in rows[6:]]


def test_peers_with_a_matrix_round_what_is_visible_as_we_do() -> None:
    """ALiBi, causal, bf16: a row's largest entry must be one that its query sees."""
    shape = Shape((1,), 8, 512, 16, alibi, {"causal": True})
    torch.manual_seed(0)
    q, k, v = shape.inputs(torch.bfloat16, CPU)
    bias = alibi(shape, CPU)
    truth = flashbias_attention(
        q.double(), k.double(), v.double(), bias, backend="eager", causal=True
    )
    made = {peer.name: peer.make for peer in attention_peers.peers(shape, q, k, v, bias)}
    for name in ("flex, dense", "flex, closed form"):
        attend = made[name]()
        off = (attend().double() - truth).norm() / truth.norm()
        assert 0 < off < 2.0**-7, name  # as the others of this benchmark: bits of bf16
