"""Launch settings: a fixed function of the shape, so that the same call gives the same bits.

Those of the forward kernel are in `launch_table`, those of backward kernels here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class LaunchSettings:
    """How one kernel is launched.

    Attributes:
        block_m: queries per program.
        block_n: keys per step.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        max_registers: registers per thread, so that several programs share a multiprocessor.
        entries: of the batch that share each tile of a dense bias in inference, 1 or 2, where it
            is all that is added to their scores and the same for both.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    entries: int = 1

    def options(self) -> dict[str, int]:
        """What Triton is told of them."""
        found = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return found if self.max_registers is None else found | {"maxnreg": self.max_registers}

    def smaller(self) -> LaunchSettings | None:
        """What to try where a card has too little memory on the chip for these; None: nothing.

        Tiles that are read ahead of their turn go first, then long steps, then tall blocks.
        """
        m, n, depth = self.block_m, self.block_n, self.num_stages
        if self.entries > 1:
            return replace(self, entries=1)
        if depth > 2 or (depth > 1 and n <= 32 and m <= 64):
            return replace(self, num_stages=depth - 1)
        if n > 32 or (n > 16 and m <= 64):
            n //= 2
        elif m > 16:
            m //= 2
        else:
            return None
        # a warp has a row of 16 at the least, and no fewer than four warps keep a card busy
        warps = min(self.num_warps, max(4, m * n // 1024))
        return replace(self, block_m=m, block_n=n, num_warps=warps)


#: Longer sequences than this are told apart by powers of two only.
LONGEST_EXACT = 1024


@dataclass(frozen=True)
class LaunchShape:
    """What the settings of a launch depend on.

    Attributes:
        n: queries.
        d, dv: head sizes, padded to powers of two.
        columns: padded number of factor columns.
        half: fp16 or bf16 inputs; fp32 products run on the plain arithmetic units.
        terms: names of the tensors that the kernel reads besides q, k and v.
        shared: entries of the batch may share tiles of a dense bias, see `shared_dense`.
    """

    n: int
    d: int
    dv: int
    columns: int
    half: bool
    terms: tuple[str, ...]
    shared: bool = False

    def rounded(self) -> LaunchShape:
        """One shape for all that share measured settings."""
        n = self.n if self.n <= LONGEST_EXACT else 1 << (self.n - 1).bit_length()
        return replace(self, n=n, terms=tuple(sorted(self.terms)))


def few_rows(n: int) -> bool:
    """Whether blocks of 128 queries waste a quarter more than blocks of 64, as at 64 and 144."""
    return -(-n // 128) * 128 > 1.25 * (-(-n // 64) * 64)


@lru_cache(maxsize=4096)
def backward_settings(
    kernel: str,
    *,
    rows: int,
    d: int,
    dv: int,
    columns: int,
    half: bool,
    added: frozenset[str] = frozenset(),
    trained: bool = False,
    axial: int = 0,
) -> LaunchSettings:
    """Settings for one launch of a backward kernel, chosen so that common sizes fit registers.

    Args:
        kernel: "queries" (a block of queries walks the keys), "keys" (the other way round), "all"
            (the same with atomics for what belongs to queries) or "pairs" (one tile walks the
            batch).
        rows: that programs share out: number of queries for "queries", else of keys.
        d, dv: head sizes, padded to powers of two.
        columns: padded number of factor columns.
        half: fp16 or bf16 inputs.
        added: names of the tensors that scores get element by element: they take registers.
        trained: factors get gradients, whose sums take registers, too.
        axial: most rows or columns of an axial term that gets gradients: so do theirs.
    """
    width = max(d, dv)
    few = few_rows(rows)
    measured = columns <= 16 and not added and not trained and not few
    if not half:
        if kernel == "queries" and axial > 32 and width <= 64:
            return LaunchSettings(32, 32 if axial <= 64 else 16, 8, 1)
        block = 16 if width > 64 or kernel == "all" else 32
        return LaunchSettings(block, 16 if width > 64 else 32, 4, 1)
    if kernel == "all":
        plain = columns <= 16 and not added and not few
        return _all_gradients(width, columns, plain, few, trained)
    if "rel_h" in added and (kernel == "keys" or (kernel == "queries" and axial)):
        return _wide_axial(kernel, width, columns)
    if width > 128 or columns > 64:
        return LaunchSettings(32, 32, 4, 1)
    # Where three tiles are under way, a tile is read while the one before it is worked on; with two
    # the compiler lets a step wait for what the step before it has asked for last.
    if measured and width <= 64:
        return _plain_rows(kernel, width, columns)
    if columns <= 16 and width <= 32 and trained and not added and not few:
        return _trained_rows(kernel, width)
    if width <= 64 and columns <= 32:
        # three programs share a multiprocessor where that many registers do, and nothing spills
        crowded = len(added) > 1 or not added.isdisjoint({"table", "lookup"})
        enough = {"queries": width <= 32 or columns <= 16, "keys": width <= 32 and columns <= 16}
        return LaunchSettings(64, 64, 4, 3, 168 if enough.get(kernel) and not crowded else None)
    if measured and kernel == "queries" and not columns:
        return LaunchSettings(128, 64, 8, 3)
    # 64 rows of what is accumulated are the fewest of a wide tensor-core instruction
    if kernel == "keys":
        return LaunchSettings(32, 64, 4, 1 if columns > 32 else 3)
    return LaunchSettings(64, 32, 4, 3)


def _plain_rows(kernel: str, width: int, columns: int) -> LaunchSettings:
    """For heads of at most 64 without added or trained terms, as measured.

    Twice the rows, or keys, of a program halve what all of them read, where registers suffice.
    """
    if kernel == "queries":
        if width <= 32:
            return LaunchSettings(64, 64, 4, 3, 168) if columns else LaunchSettings(128, 64, 4, 3)
        return LaunchSettings(128, 64, 8, 3, 128) if columns else LaunchSettings(128, 64, 4, 3)
    if kernel == "keys" and width <= 32:
        return LaunchSettings(32 if columns else 64, 128, 4, 3)
    return LaunchSettings(64, 64, 4, 3)


def _trained_rows(kernel: str, width: int) -> LaunchSettings:
    """For heads of at most 32 with trained factors and nothing else, as measured."""
    if kernel == "queries":
        return LaunchSettings(128 if width <= 16 else 64, 64, 4, 3)
    if kernel == "keys":
        return LaunchSettings(64 if width <= 16 else 32, 128, 4, 3)
    return LaunchSettings(64, 64, 4, 3)


def _wide_axial(kernel: str, width: int, columns: int) -> LaunchSettings:
    """For axial terms that are no factors, in half precision.

    Read off what the compiler says of registers: eight warps hold the sums of queries, up to 256 a
    row beside all others, and where to look entries up, which four do not.
    """
    if width > 128 or columns > 64:
        return LaunchSettings(32, 32, 8, 1)
    if kernel == "queries":
        return LaunchSettings(64, 64 if width <= 64 and columns <= 32 else 32, 8, 3)
    return LaunchSettings(64 if width <= 64 and columns <= 16 else 32, 64, 8, 3)


def _all_gradients(
    width: int, columns: int, plain: bool, few: bool, trained: bool
) -> LaunchSettings:
    """For the walk with atomics, which holds the gradients of keys and a share of those of queries.

    Where nothing is measured they are read off what the compiler says of registers.
    """
    measured = plain and not trained
    if width > 128 or columns > 64:
        return LaunchSettings(32, 32, 4 if width <= 64 else 8, 1)
    if width > 64 and columns > 16:
        return LaunchSettings(16, 64, 8, 1) if columns <= 32 else LaunchSettings(32, 32, 8, 1)
    if width > 64:
        return LaunchSettings(64, 128 if measured and not columns else 64, 8, 3)
    if columns > (32 if width <= 32 else 16):
        return LaunchSettings(32, 64, 4, 3)
    # twice the keys per program halve what is added to memory, unless the last block is half empty
    if few:
        return LaunchSettings(64, 64, 4, 3)
    if plain and trained and width <= 32:  # gradients of factors take the registers of rows
        return LaunchSettings(64 if width <= 16 else 32, 128, 4, 3)
    return LaunchSettings(64, 128, 4 if measured and width <= 32 else 8, 3)
