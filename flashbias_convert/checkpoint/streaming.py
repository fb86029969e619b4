"""Convert shards one after the other: what is not touched is copied, and nothing is held.

The output has the shards of the input, with the same names in them, and one more for the terms. It
is made in a hidden folder that outlives an interruption; the same conversion goes on from there.
Every shard, new or left by an earlier run, is read back and compared with the input before it
counts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, VerificationError
from ..plan import Plan
from .card import card_in
from .config_entry import mark_config
from .copied_shards import Shard, names_of, origin_of, require_apart, shards_of, unused_of
from .file_names import names_entry
from .header import LINKED_KEY, other_entries, own_entries
from .made_from import without_narrowed
from .mapped import MappedModel
from .origin import SOURCE_KEY, Origin, digest_of
from .outputs import WEIGHTS_NAME, check_output, is_folder, plan_path
from .partial import Partial
from .pieces import (
    ChangedInputError,
    Held,
    Piece,
    Source,
    copy_pieces,
    digests_of,
    header,
    holds,
    in_file_order,
    write_header,
    write_tensors,
)
from .publication import remove
from .shards import Split
from .shelf import Shelf
from .staging import Staging
from .unused_tensors import unused_entry
from .write import Check, copy_small_files, failed, file_header, prepare, small_files, write_card

logger = logging.getLogger(__name__)

#: called with bytes done, bytes in all, and the name of a shard
Copying = Callable[[int, int, str], None]

TERMS_NAME = "model-terms.safetensors"
#: as long as a digest, which is known when the last shard is copied
_NO_DIGEST = "0" * 32


def write_streamed(
    opened: MappedModel,
    target: Path,
    plan: Plan,
    *,
    force: bool = False,
    card: str | None = None,
    check: Check | None = None,
    copying: Copying | None = None,
    shelf: Shelf | None = None,
    link: bool = False,
) -> None:
    """Write the conversion of shards as a folder, complete or not at all.

    Args:
        opened: the patched model and where its weights lie.
        target: the folder to make.
        plan: goes into the headers and the sidecar.
        force: replace an earlier conversion.
        card: text of a model card.
        check: called with the complete folder, before it has its name; if it raises, there is no
            output, and after a `VerificationError` nothing is kept.
        copying: told of the progress.
        shelf: where the terms are kept, if not in memory.
        link: make hard links to shards that stay as they are, instead of copies; they are never
            opened for writing. The plan, and what the model calls the tensors, are in the headers
            of the other files only.

    What was finished before an error stays beside the target, and the same call goes on from it;
    not so if the input has changed, or the result was not verified: there is nothing to go on to.

    Raises:
        UsageError: the folder exists.
        CheckpointError: the disk is full, another process writes there, the input changes
            meanwhile, or what was written does not read back equal.
    """
    check_output(target, opened.checkpoint.folder, force)
    work = _Work.of(opened, target, plan, link)
    partial = Partial(target, work.job(), useless=(ChangedInputError, VerificationError))
    try:
        with partial:
            metadata = work.copy(partial, copying)
            work.finish(partial.out, shelf, metadata)
            if card is not None:
                write_card(card_in(partial.out), card, target)
            if check is not None:
                check(partial.out)
            staging = Staging(force)
            staging.adopt(partial.out, target)
            staging.commit()
    except (OSError, SafetensorError) as error:
        raise failed(target, error, partial.kept) from error
    except BaseException:
        if partial.kept is not None:
            logger.warning("%s keeps what was copied: the same call goes on from it", partial.kept)
        raise


@dataclass(frozen=True, eq=False)
class _Work:
    """What is written: shards, terms and their headers.

    Attributes:
        tied, names, unused: see `header.TIED_KEY`, `NAMES_KEY` and `UNUSED_KEY`; `names` has all
            weights that are copied.
        linked: names of the shards that are links by now.
    """

    opened: MappedModel
    target: Path
    plan: Plan
    shards: list[Shard]
    terms: dict[str, Tensor]
    tied: dict[str, str]
    names: dict[str, str]
    unused: list[str]
    origin: Origin
    link: bool = False
    linked: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, opened: MappedModel, target: Path, plan: Plan, link: bool = False) -> _Work:
        tensors = opened.checkpoint.tensors
        dtypes = {name: tensors[key].dtype for name, key in opened.sources.items()}
        state = without_narrowed(opened.model.state_dict(), dtypes, opened.computes)
        known = {**opened.sources, **opened.tied}
        terms, tied_terms = prepare({k: t for k, t in state.items() if k not in known})
        tied = {**opened.tied, **tied_terms}
        names = {in_file: name for name, in_file in names_of(opened).items()}
        unused = unused_of(opened)
        require_apart((*names, *unused), terms)
        shards, origin = shards_of(opened), origin_of(opened)
        return cls(opened, target, plan, shards, terms, tied, names, unused, origin, link)

    @property
    def source(self) -> Path | None:
        """The folder whose small files belong to the output."""
        checkpoint = self.opened.checkpoint
        return checkpoint.folder if is_folder(checkpoint.path) else None

    def metadata(self, digest: str) -> dict[str, str]:
        """Of every header."""
        own = {SOURCE_KEY: replace(self.origin, digest=digest).to_json()}
        own |= names_entry(self.names) | unused_entry(self.unused)
        if self.linked:
            own[LINKED_KEY] = json.dumps(sorted(self.linked))
        return file_header(
            self.plan, self.tied, {**other_entries(self.opened.checkpoint.metadata), **own}
        )

    def job(self) -> str:
        """Stands for everything that decides on the bytes of the shards."""
        stats = [shard.source.stat() for shard in self.shards]
        facts: list[Any] = [self.metadata(_NO_DIGEST), self.link]
        for shard, stat in zip(self.shards, stats, strict=True):
            facts.append([str(shard.source.resolve()), stat.st_size, stat.st_mtime_ns, shard.name])
            facts.append([(p.name, str(p.dtype), p.shape) for p in shard.pieces])
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def start(self, shard: Shard) -> int:
        """Where the tensors of a shard begin in its file: its header has a fixed length."""
        return len(header(shard.pieces, self.metadata(_NO_DIGEST)))

    # -- the shards ------------------------------------------------------------------------

    def link_shards(self, folder: Path) -> None:
        """Link what can be linked."""
        if own_entries(self.opened.checkpoint.metadata):
            return  # of an earlier conversion: headers say what is not so any more
        for shard in self.shards:
            path = folder / shard.name
            if not Source(shard.source).consists_of(shard.pieces):
                continue
            try:
                path.unlink(missing_ok=True)
                os.link(shard.source.resolve(), path)
            except OSError as error:
                logger.warning("%s is copied: it cannot be linked: %s", shard.name, error.strerror)
            else:
                self.linked.add(shard.name)

    def copy(self, partial: Partial, copying: Copying | None) -> dict[str, str]:
        """Copy every shard that is not there yet, then give all of them their headers.

        Returns:
            What the headers say.
        """
        finished, total = partial.finished(), sum(shard.nbytes for shard in self.shards)
        if self.link:
            self.link_shards(partial.out)
        self._require_space(partial.out)
        digests: dict[str, str] = {}
        done = 0
        for shard in self.shards:

            def on_bytes(count: int, name: str = shard.name) -> None:
                nonlocal done
                done += count
                if copying is not None:
                    copying(done, total, name)

            path, source = partial.out / shard.name, Source(shard.source)
            if shard.name in self.linked:
                digests |= digests_of(source, shard.pieces, on_bytes)
                continue
            start = self.start(shard)
            left = shard.name in finished and path.is_file()
            if left and holds(path, start, source, shard.pieces):
                logger.info("%s is there already", shard.name)
                digests |= digests_of(source, shard.pieces, on_bytes)
                continue
            path.unlink(missing_ok=True)  # whatever it is, it may be a link to something
            digests |= copy_pieces(source, shard.pieces, path, start, on_bytes)
            if not holds(path, start, source, shard.pieces):
                raise CheckpointError(f"the written file does not read back: {shard.name}")
            partial.finish(shard.name)
        metadata = self.metadata(self._digest(digests))
        self._write_headers(partial.out, metadata)
        return metadata

    def _require_space(self, folder: Path) -> None:
        """Raise OSError unless there is space for what is still to be written.

        Terms that wait in a file take their space already; they are written once more.
        """
        there = sum(
            path.stat().st_size for path in folder.iterdir() if path.name not in self.linked
        )
        needed = self._nbytes() - there
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"the output needs {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free: "
                "make room, or choose another --output",
            )

    def _nbytes(self) -> int:
        """Of the files that are written, but for the index and a model card."""
        copied = [shard for shard in self.shards if shard.name not in self.linked]
        shards = sum(self.start(shard) + shard.nbytes for shard in copied)
        heads = len(header(self._term_pieces(), self.metadata(_NO_DIGEST)))
        terms = heads + sum(t.nbytes for t in self.terms.values())
        small = sum(path.stat().st_size for path in small_files(self.source)) if self.source else 0
        return shards + terms + len(self._sidecar()) + small

    def _write_headers(self, folder: Path, metadata: Mapping[str, str]) -> None:
        for shard in self.shards:
            path = folder / shard.name
            if shard.name in self.linked:
                continue
            write_header(path, header(shard.pieces, metadata))
            self._check_header(path, shard.pieces, metadata)

    @staticmethod
    def _check_header(path: Path, pieces: list[Piece], metadata: Mapping[str, str]) -> None:
        with safe_open(path, framework="pt") as file:
            same = file.metadata() == metadata
            if not same or set(file.keys()) != {piece.name for piece in pieces}:
                raise CheckpointError("the written file does not read back: its header differs")

    def _digest(self, digests: Mapping[str, str]) -> str:
        """See `Origin.digest`."""
        pieces = [piece for shard in self.shards for piece in shard.pieces]
        return digest_of({piece.name: piece.describe(digests[piece.name]) for piece in pieces})

    # -- the rest --------------------------------------------------------------------------

    def finish(self, folder: Path, shelf: Shelf | None, metadata: dict[str, str]) -> None:
        """Write what is small: configs, the plan, the terms, and at last the index."""
        shards = {shard.name for shard in self.shards}
        for path in folder.iterdir():
            if path.name not in shards:  # of an earlier run
                remove(path)
        if self.source is not None:
            copy_small_files(self.source, folder)
            mark_config(folder, self.plan)
        sidecar = plan_path(folder / WEIGHTS_NAME)
        sidecar.write_text(self._sidecar(), encoding="utf-8")
        path = folder / TERMS_NAME
        forget = _nothing if shelf is None else shelf.forget
        write_tensors(path, self.terms, metadata, forget)
        pieces = self._term_pieces()
        self._check_header(path, pieces, metadata)
        start = len(header(pieces, metadata))
        if not holds(path, start, Held(self.terms, forget), pieces):
            raise CheckpointError(f"the written file does not read back: {TERMS_NAME}")
        files = {s.name: [piece.name for piece in s.pieces] for s in self.shards}
        total = sum(s.nbytes for s in self.shards) + sum(t.nbytes for t in self.terms.values())
        Split({**files, TERMS_NAME: list(self.terms)}, total).write_index(folder)

    def _sidecar(self) -> str:
        return json.dumps(self.plan.to_json(), indent=2) + "\n"

    def _term_pieces(self) -> list[Piece]:
        return in_file_order(
            [Piece(name, t.dtype, tuple(t.shape)) for name, t in self.terms.items()]
        )


def _nothing() -> None:
    pass
