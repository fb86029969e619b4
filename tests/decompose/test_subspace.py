"""Leading singular vectors by products, Cholesky factors and one small eigenvalue problem."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashbias_convert.decompose import subspace
from flashbias_convert.decompose.subspace import Leading, leading, orthonormal

SIZE, COLUMNS = 24, 16
Spectrum = Callable[[Tensor], Tensor]
SPECTRA: dict[str, Spectrum] = {
    "flat": torch.ones_like,
    "geometric": lambda i: 0.7**i,
    "slow": lambda i: 1 / (1 + i),
    "repeated": lambda i: 2.0 ** -(i // 4),
    "cliff": lambda i: torch.where(i < 4, 1.0, 1e-6),
    "at rounding": lambda i: torch.where(i < 1, 1.0, 1e-7),
    "of rank 3": lambda i: (i < 3).double(),
    "of rank 1, huge": lambda i: 1e30 * (i < 1),
    "tiny": lambda i: 1e-30 * 0.8**i,
    "wide": lambda i: 10.0**-i,
}  # fmt: skip


def matrices(spectrum: Spectrum, n: int, m: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    count = min(n, m)
    u, v = (
        torch.linalg.qr(torch.randn(2, 2, x, count, generator=draw, dtype=torch.float64)).Q
        for x in (n, m)
    )
    return (u * spectrum(torch.arange(count).double()) @ v.mT).to(dtype)


def lost(found: Leading, matrix: Tensor) -> Tensor:
    """Share of the energy."""
    phi_q, phi_k = found.factors(COLUMNS)
    rest = matrix.double() - phi_q.double() @ phi_k.double().mT
    return rest.square().sum((-2, -1)) / matrix.double().square().sum((-2, -1))


@pytest.mark.parametrize("shape", [(96, 96), (96, 160), (160, 96), (SIZE, SIZE)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SPECTRA)
def test_as_good_as_by_qr_and_svd(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """And nearly the best: fp32 factors round by 2**-24 of the largest value, and many add up."""
    matrix = matrices(SPECTRA[name], *shape, dtype)
    found = leading(matrix, SIZE)
    values = torch.linalg.svdvals(matrix.double())
    energy = values.square()
    best = energy[..., COLUMNS:].sum(-1) / energy.sum(-1)
    rounding = COLUMNS * 2.0**-46  # squared, in both factors
    slower = subspace._one_by_one(matrix, SIZE, found.total)
    assert (lost(found, matrix) <= 1.01 * best + rounding).all()
    assert (lost(found, matrix) <= 1.01 * lost(slower, matrix) + rounding).all()
    torch.testing.assert_close(found.total, energy.sum(-1), rtol=1e-6, atol=0)
    ritz = torch.linalg.svdvals(found.left.mT @ matrix.double())
    off = (found.values - ritz).abs().amax(-1) / values[..., 0]
    # what squares resolve, and a product over the columns
    assert (off <= subspace.FLOOR + max(shape) ** 0.5 * torch.finfo(dtype).eps).all()


def test_columns_past_the_rank_are_noise_at_most() -> None:
    """Where plain Cholesky factorisation fails."""
    matrix = matrices(SPECTRA["of rank 3"], 96, 96, torch.float64)
    sketch = matrix @ torch.randn(96, SIZE, dtype=torch.float64)
    assert torch.linalg.cholesky_ex(sketch.mT @ sketch).info.all()
    left = orthonormal(sketch, times=2)
    lengths = torch.linalg.svdvals(left)
    torch.testing.assert_close(lengths[..., :3], torch.ones(2, 2, 3).double(), rtol=0, atol=1e-8)
    assert (lengths <= 1 + 1e-8).all()
    phi_q, phi_k = leading(matrix, SIZE).factors(COLUMNS)
    assert (phi_q[..., 3:].norm(dim=-2) <= 1e-3 * phi_q[..., :3].norm(dim=-2).amin()).all()
    assert phi_k.isfinite().all()


def test_columns_come_out_orthonormal() -> None:
    """Also those that were nearly the same: their condition is 1e7."""
    draw = torch.Generator().manual_seed(0)
    columns = torch.randn(3, 80, 1, generator=draw) + 1e-6 * torch.randn(3, 80, 8, generator=draw)
    left = orthonormal(columns, times=2)
    torch.testing.assert_close(left.mT @ left, torch.eye(8).double().expand(3, -1, -1),
                               rtol=0, atol=1e-7)  # fmt: skip
    both = torch.cat([left, columns.double() / columns.norm()], -1)
    assert (torch.linalg.svdvals(both)[..., 8:] < 1e-6).all()  # of the same span


def test_columns_that_squares_do_not_resolve_are_zero() -> None:
    """Balanced, they would be tiny in one factor and as large as you like in the other."""
    turn, total = torch.eye(2).double()[None, None], torch.ones(1, 1).double()
    left, right = turn.clone(), torch.tensor([[1.0, 0.0], [0.0, 1e-8]]).double()[None, None]
    for value, zero in ((1e-20, True), (1e-6, False)):
        values = torch.tensor([[[1.0, value]]]).double()
        phi_q, phi_k = Leading(left, right, turn, values, total).factors(2)
        assert (phi_q[..., 1].any(), phi_k[..., 1].any()) == (not zero, not zero)
        assert phi_k.abs().max() == 1 == phi_q.abs().max()


def test_matrices_of_zeros_have_factors_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a detour of all the others."""
    monkeypatch.setattr(subspace, "_one_by_one", lambda *_: pytest.fail("they went one by one"))
    matrix = torch.zeros(2, 1, 40, 50)
    matrix[1] = matrices(SPECTRA["geometric"], 40, 50, torch.float32)[0, :1]
    found = leading(matrix, SIZE)
    phi_q, phi_k = found.factors(COLUMNS)
    assert not phi_q[0].any() and not phi_k[0].any() and not found.values[0].any()
    assert (lost(found, matrix)[1] < 1e-4).all()


@pytest.mark.parametrize("failing", ["cholesky_ex", "eigh"])
def test_what_fails_goes_through_qr_and_svd(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = matrices(SPECTRA["geometric"], 60, 48, torch.float32)
    expected = lost(leading(matrix, SIZE), matrix)
    torch.manual_seed(7)
    drawn = torch.rand(3)

    def fails(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if failing == "eigh":
            raise torch.linalg.LinAlgError("it did not converge")
        return torch.return_types.linalg_cholesky_ex((matrix * torch.nan, matrix[..., 0, 0]))

    monkeypatch.setattr(torch.linalg, failing, fails)
    torch.manual_seed(7)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("cards were seeded"))
    found = leading(matrix, SIZE)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(leading(matrix, SIZE).right, found.right)
    torch.testing.assert_close(lost(found, matrix), expected, rtol=1e-3, atol=1e-12)


class Counted(TorchDispatchMode):
    """Which operations run, and how many of them make the host wait for a device."""

    WAIT = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def waits(self) -> int:
        return sum(name in self.WAIT for name in self.names)


def test_the_number_of_operations_does_not_depend_on_that_of_matrices() -> None:
    """And the host asks for one number, on the CPU."""
    names = []
    for count in (2, 16):
        matrix = torch.randn(1, count, 40, 40, generator=torch.Generator().manual_seed(0))
        with Counted() as seen:
            leading(matrix, SIZE).factors(COLUMNS)
        assert seen.waits() == 1  # "all finite", after a copy
        assert seen.names.count("linalg_cholesky_ex") == 2 * subspace.PASSES + 2
        names.append(seen.names)
    assert names[0] == names[1]
    assert not {"linalg_qr", "_linalg_svd"}.intersection(names[0])
