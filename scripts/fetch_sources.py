"""Fetch source files of repositories that are no packages, with git, to test recipes on.

python scripts/fetch_sources.py [FOLDER] [--url TEMPLATE]

Those are github.com/jaketae/alibi (MIT), the BERT of github.com/mosaicml/examples (Apache-2.0), and
BEATs and WavLM of github.com/microsoft/unilm (MIT), each at one commit, with its licence. Nothing
of them is part of this repository, and nothing is installed: a few files are written where you say.
The folder is printed; by default it lies in the user's cache. What is there already is left as it
is. Tests take it from the environment:

FLASHBIAS_SOURCES=$(python scripts/fetch_sources.py) pytest tests/recipes/test_real_sources.py

The template of addresses has {owner} and {name} in it, for mirrors. A folder is a clone, which is
read where it lies.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

GITHUB = "https://github.com/{owner}/{name}.git"


@dataclass(frozen=True)
class Source:
    """Files of a repository at one commit.

    Attributes:
        repository: "owner/name" on GitHub.
        commit: 40 hexadecimal digits.
        files: paths in the repository, that of its licence among them.
    """

    repository: str
    commit: str
    files: tuple[str, ...]

    def within(self, folder: Path) -> Path:
        """Where its files lie: another commit has another place."""
        return folder / self.repository / self.commit[:12]

    def is_complete(self, folder: Path) -> bool:
        """Whether all of its files lie in `folder`."""
        return all((self.within(folder) / file).is_file() for file in self.files)

    def url(self, template: str) -> str:
        """Its address."""
        owner, _, name = self.repository.partition("/")
        return template.format(owner=owner, name=name)


def _below(folder: str, *names: str) -> tuple[str, ...]:
    return ("LICENSE", *(f"{folder}/{name}" for name in names))


ALIBI = Source(
    "jaketae/alibi",
    "021acae33158715ec64b652649a21306085acf68",
    _below("alibi", "__init__.py", "attention.py", "config.py", "layers.py", "model.py"),
)
MOSAIC = Source(
    "mosaicml/examples",
    "daddaeff7a535273ff984b0134da4839c70a45b3",
    _below(
        "examples/benchmarks/bert/src", "bert_layers.py", "bert_padding.py", "configuration_bert.py"
    ),
)
UNILM = Source(
    "microsoft/unilm",
    "768a3c873f598bb9b4d4dfb9267b099e35f8fe56",
    (
        *_below("beats", "BEATs.py", "backbone.py", "modules.py"),
        *_below("wavlm", "WavLM.py", "modules.py")[1:],
    ),
)
SOURCES = (ALIBI, MOSAIC, UNILM)


def default_folder() -> Path:
    """Where the files lie if nobody says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flashbias-convert" / "sources"


def is_complete(folder: Path) -> bool:
    """Whether the files of all repositories lie in `folder`."""
    return all(source.is_complete(folder) for source in SOURCES)


def fetch(folder: Path, template: str = GITHUB) -> Path:
    """Write the files into `folder`, below the name and the commit of their repository.

    Args:
        folder: for all repositories.
        template: see `Source.url`.

    Raises:
        subprocess.CalledProcessError: git cannot get a commit, or that has no such file.
    """
    for source in SOURCES:
        if not source.is_complete(folder):
            _fetch(source, folder, source.url(template))
    return folder


def _fetch(source: Source, folder: Path, url: str) -> None:
    place = source.within(folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        here, files = Path(url).expanduser(), Path(temporary) / "files"
        clone = here if here.is_dir() else _cloned(url, source.commit, Path(temporary) / "clone")
        for file in source.files:
            target = files / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_git("-C", str(clone), "show", f"{source.commit}:{file}"))
        if place.exists():  # a part of them
            place.rename(Path(temporary) / "old")
        files.rename(place)


def _cloned(url: str, commit: str, clone: Path) -> Path:
    """A clone with one commit, but without the contents of its files: git gets those it reads."""
    _git("init", "--quiet", "--bare", str(clone))
    _git("-C", str(clone), "remote", "add", "origin", url)
    _git("-C", str(clone), "config", "remote.origin.promisor", "true")
    few = ("--quiet", "--depth=1", "--filter=blob:none", "origin", commit)
    _git("-C", str(clone), "fetch", *few)
    return clone


def _git(*arguments: str) -> bytes:
    run = subprocess.run(["git", *arguments], check=True, stdout=subprocess.PIPE, stderr=sys.stderr)
    return run.stdout


def main() -> None:
    """Fetch the files and print where they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=default_folder())
    parser.add_argument("--url", default=GITHUB, metavar="TEMPLATE", help="of addresses")
    args = parser.parse_args()
    try:
        print(fetch(args.folder, args.url))
    except subprocess.CalledProcessError as problem:
        raise SystemExit(f"git could not do this: {shlex.join(problem.cmd)}") from None


if __name__ == "__main__":
    main()
