"""How far folds of real weights move when their pair biases lose something.

python scripts/paper/igfold_rmsd.py [FOLDER] [--device cuda] [--output DIR]

IgFold (non-commercial licence, see scripts/fetch_igfold.py, which gets it where FOLDER is not
given) folds antibodies of public sequence, by each of its four networks. Its invariant point
attention adds a bias from a pair representation. `exact` adds it with `flashbias_attention` as it
is; `SVD` truncates it at a share of its row-centred energy, anew for each structure, layer and
call; `no bias` leaves it out. The rest of the model, the values that attention takes from pairs
among it, stays as it is, and so do its graph transformers, whose edges are added to keys and values
and are no score bias. Values of pairs need the weights of the attention, which are made from the
same terms a second time: this is about folds, not about speed.

A row is a fold, before IgFold's refinement of bonds and angles: the root mean square distance of
its C-alpha atoms, superposed, to the fold by the same network unchanged (angstrom), the error that
the network expects of itself, ranks of heads, energy and attention error (total variation) in the
worst head. `other network` is the distance between the original folds of two networks: what the
model itself is unsure of.

Writes igfold_rmsd.csv, row by row, and igfold_rmsd.png.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from igfold_model import fold, language_model, open_models, read_chain, serve
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fetch_igfold import default_folder, fetch

from flashbias_convert import Dense, ScoreBias
from flashbias_convert.decompose import decompose
from flashbias_convert.options import DecomposeOptions

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "antibody", "residues", "network", "way", "energy_asked", "rmsd", "expected_error", "rank_mean",
    "rank_max", "energy_worst", "attention_error_worst", "dtype", "device", "torch",
)  # fmt: skip
#: what is drawn for a distance of zero, in angstrom
FLOOR = 1e-7
ENERGIES = (0.9, 0.95, 0.99, 0.999, 0.9999)
#: variable domains as they are published, heavy and light
ANTIBODIES = {
    "trastuzumab": (
        "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAE"
        "DTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
        "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQ"
        "QHYTTPPTFGQGTKVEIK",
    ),
    "adalimumab": (
        "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAE"
        "DTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
        "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQ"
        "RYNRAPYTFGQGTKVEIK",
    ),
    "rituximab": (
        "QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSE"
        "DSAVYYCARSTYYGGDWYFNVWGAGTTVTVSA",
        "QIVLSQSPAILSASPGEKVTMTCRASSSVSYIHWFQQKPGSSPKPWIYATSNLASGVPVRFSGSGSGTSYSLTISRVEAEDAATYYCQQ"
        "WTSNPPTFGGGTKLEIK",
    ),
    "bevacizumab": (
        "EVQLVESGGGLVQPGGSLRLSCAASGYTFTNYGMNWVRQAPGKGLEWVGWINTYTGEPTYAADFKRRFTFSLDTSKSTAYLQMNSLRAE"
        "DTAVYYCAKYPHYYGSSHWYFDVWGQGTLVTVSS",
        "DIQMTQSPSSLSASVGDRVTITCSASQDISNYLNWYQQKPGKAPKVLIYFTSSLHSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQ"
        "QYSTVPWTFGQGTKVEIK",
    ),
}


@dataclass
class Truncating:
    """Makes terms of biases by SVD and remembers what was decided."""

    energy: float
    decisions: list[Any] = field(default_factory=list)

    def __call__(self, bias: Tensor) -> ScoreBias:
        options = DecomposeOptions(
            energy=self.energy, method="svd", max_attention_error=1.0, fill=False
        )
        made = decompose(bias, options)
        self.decisions += made.decisions
        return made.bias

    def facts(self) -> dict[str, Any]:
        """Columns of the table."""
        ranks = [d.rank for d in self.decisions if d.rank is not None]
        return {
            "rank_mean": f"{statistics.mean(ranks):.1f}",
            "rank_max": max(ranks),
            "energy_worst": f"{min(d.energy for d in self.decisions):.6f}",
            "attention_error_worst": f"{max(d.attention_error for d in self.decisions):.4f}",
        }


def exact(bias: Tensor) -> ScoreBias:
    return ScoreBias((Dense(bias=bias),), bias.shape[-3])


def nothing(bias: Tensor) -> ScoreBias:
    return ScoreBias((), bias.shape[-3])


def rmsd(a: Tensor, b: Tensor) -> float:
    """Root mean square distance of points (N, 3) after the best rotation and translation."""
    a, b = ((x.double() - x.double().mean(0)) for x in (a, b))
    u, _, vh = torch.linalg.svd(a.mT @ b)
    handed = torch.ones(3, dtype=torch.float64, device=a.device)
    handed[-1] = torch.linalg.det(u @ vh).sign()  # no mirrors
    return float((a @ (u * handed) @ vh - b).square().sum(-1).mean().sqrt())


def ways(energies: tuple[float, ...]) -> Iterator[tuple[str, Any, Any]]:
    """(name, energy asked, what makes terms)."""
    yield "exact", "", exact
    for energy in sorted(energies, reverse=True):
        yield "SVD", energy, Truncating(energy)
    yield "no bias", "", nothing


def rows_of(
    models: list[Any], chains: list[tuple[Tensor, Tensor]], energies: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    """All rows of one antibody."""
    originals = [fold(model, chains) for model in models]

    def row(way: str, at: int, found: tuple[Tensor, float]) -> dict[str, Any]:
        distance = f"{rmsd(found[0], originals[at][0]):.6f}"
        own = {"way": way, "network": at + 1, "rmsd": distance}
        return {**own, "expected_error": f"{found[1]:.4f}"}

    for at, model in enumerate(models):
        yield row("original", at, originals[at])
        if len(models) > 1:
            yield row("other network", at, originals[(at + 1) % len(models)])
        for way, energy, decomposer in ways(energies):
            serve(model, decomposer)
            try:
                found = row(way, at, fold(model, chains))
            finally:
                serve(model, None)
            facts = decomposer.facts() if isinstance(decomposer, Truncating) else {}
            yield {**found, "energy_asked": energy, **facts}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Distance to the original fold for each way, a dot per fold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names: dict[str, list[float]] = {}
    for row in (row for row in rows if row["way"] != "original"):
        energy = row.get("energy_asked")
        label = f"SVD\n{100 * energy:g} %" if energy else row["way"].replace(" ", "\n")
        names.setdefault(label, []).append(float(row["rmsd"]))
    order = sorted(names, key=lambda name: statistics.median(names[name]))
    for at, name in enumerate(order):
        axes.scatter([at] * len(names[name]), [max(v, FLOOR) for v in names[name]], alpha=0.5, s=18)
        axes.plot([at - 0.3, at + 0.3], [max(statistics.median(names[name]), FLOOR)] * 2, "k-")
    axes.set(yscale="log", ylabel="C-alpha RMSD to the original fold, angstrom")
    axes.set_xticks(range(len(order)), order)
    axes.grid(axis="y", alpha=0.3)
    count = len({row["antibody"] for row in rows})
    networks = len({row["network"] for row in rows})
    axes.set_title(
        f"IgFold's pair bias: {count} antibodies, {networks} networks, {rows[0]['dtype']}"
    )
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where fetch_igfold.py unpacked it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--antibodies", nargs="+", choices=sorted(ANTIBODIES),
                        default=list(ANTIBODIES))  # fmt: skip
    parser.add_argument("--networks", type=int, default=4)
    parser.add_argument("--energies", type=float, nargs="*", default=ENERGIES)
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    return parser.parse_args()


def main() -> None:
    """Print and write a row per fold, and draw."""
    args = arguments()
    folder = fetch(args.folder or default_folder())
    args.output.mkdir(parents=True, exist_ok=True)
    cuda = args.device.startswith("cuda")
    device = torch.cuda.get_device_name(args.device) if cuda else "CPU"
    where = {"dtype": "float32", "device": device, "torch": torch.__version__}
    bert, vocabulary = language_model(folder)
    models = open_models(folder, args.device)[: args.networks]
    rows = []
    with (args.output / "igfold_rmsd.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for name in args.antibodies:
            chains = [read_chain(bert, vocabulary, chain) for chain in ANTIBODIES[name]]
            chains = [(x.to(args.device), weights.to(args.device)) for x, weights in chains]
            size = sum(x.shape[1] for x, _ in chains)
            for row in rows_of(models, chains, tuple(args.energies)):
                rows.append({"antibody": name, "residues": size, **row, **where})
                writer.writerow(rows[-1])
                file.flush()
                print(*(rows[-1].get(column, "") for column in COLUMNS[:11]), flush=True)
    draw(rows, args.output / "igfold_rmsd.png")


if __name__ == "__main__":
    main()
