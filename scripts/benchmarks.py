"""Everything that is measured for the README on a card, some of it beside the rest.

python scripts/benchmarks.py --list
python scripts/benchmarks.py GROUP... [--output DIR] [--stop-s S]

The commands of a group run one after another, groups beside each other (`beside.py`); a group gets
cores before those that are named after it. Tables go to --output. With `--resume` among its options
(--list shows them) a command does not measure again what its table has there, so that a run that is
cut goes on where it was: to measure a row anew, also one that failed, take it out, or name another
folder. What lacks memory that other commands hold has no row, and is measured by the next run; on a
card of its own it is a result. Other commands write a new table. What needs data or other packages
is not here.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path

from beside import ends_by_signal, run, told

ROOT = Path(__file__).resolve().parent.parent
COMPILED = (
    "original-compiled sdpa-cudnn-compiled flex-compiled none-cudnn-compiled exact-compiled "
    "original exact"
)
VISION = f"{COMPILED} ours-compiled ours"
DECODED = (
    "sdpa-cudnn-compiled exact-compiled none-cudnn-compiled original-compiled sdpa-cudnn-graphs "
    "exact-graphs original exact"
)
PAIRS = "--device cuda --limit-s 200 --ranks 32 96 --network-ranks 96 --repeats 10"


def _models(names: str, variants: str, together: int = 8) -> str:
    return (
        f"bench_models.py --models {names} --variants {variants} --together {together} "
        "--repeats 10 --resume --output {output}/bench_models.csv"
    )


def _pairformer(parts: str, sizes: str, more: str = "") -> str:
    return (
        f"paper/pairformer.py --parts {parts} --sizes {sizes} --together 6 {PAIRS} {more} --resume "
        "--output {output}"
    )


#: by group, commands in the order of what matters most; {output} is the folder of tables
GROUPS = {
    "suite": ["gpu_suite.py --resume --output {output}/gpu_suite.json"],
    "pairformer": [
        _pairformer("core", "1218 768 384 256 2048"),
        _pairformer("training diffusion inference", "1218 384 768 256"),
        _pairformer(
            "inference", "2048", "--ways library SDPA 'ours, [!S]*' 'Flex*' 'boltz*' 'cuEq*'"
        ),
    ],
    "models": [
        _models("swinv2-b", VISION, 9),
        _models("gpt2-prefill-2k", COMPILED),
        _models("gpt2-decode-2k gpt2-decode-8k", DECODED, 6),
        _models("plain-16384 plain-65536", COMPILED, 7),
        _models("pangu", f"{VISION} svd-56-compiled", 10),
        _models("gpt2-prefill-8k", COMPILED),
        _models("swinv2-l", VISION, 9),
        _models("bloom7b-decode", DECODED, 6),
        _models("efficientformer", "original-compiled sdpa-compiled exact-compiled", 6),
    ],
    "families": [
        "bench_models.py --models families --variants original-compiled "
        "original-fused-compiled ours-compiled --together 14 --resume "
        "--output {output}/bench_families.csv",
    ],
    "profiles": [
        "profile_models.py --models swinv2-b --variants original-compiled ours-compiled "
        "--together 2 --resume --output {output}/profile_models.csv",
        "profile_models.py --models gpt2-decode-2k --variants sdpa-cudnn-compiled exact-compiled "
        "--together 2 --resume --output {output}/profile_models.csv",
    ],
    "training": [
        "bench_backward.py --bias frozen --resume --output {output}/bench_backward.csv",
        "bench_training.py gpt2 --resume --output {output}/bench_training.csv",
        "paper/pde_solver.py bench --resume --output {output}",
        "bench_training.py plain --resume --output {output}/bench_training.csv",
        "paper/pde_solver.py train --output {output}",
        "bench_score_scale.py --resume --output {output}/bench_score_scale.csv",
        "bench_backward.py --bias trained --resume --output {output}/bench_backward.csv",
    ],
    "attention": [
        "bench_attention.py --resume --output {output}/bench_attention.csv",
        "attention_floors.py --times {output}/bench_attention.csv "
        "--output {output}/attention_floors.csv",
        "bench_lengths.py --resume --output {output}/bench_lengths.csv",
        "paper/attention_speed.py --resume --output {output}/attention_speed.csv",
        "tune_parts.py --biases none alibi --resume --output {output}/tune_parts.csv",
    ],
    "costs": [
        "measure_factor_times.py --resume --output {output}/factor_times.csv",
        "measure_costs.py --resume --output {output}/cost_table.csv",
        "measure_training_costs.py --stop-s 1000 --resume --output {output}/training_costs.csv",
        "check_choice.py --resume --output {output}/check_choice.csv",
    ],
    "tuning": [
        "tune_hopper.py --resume --output {output}/tune_hopper.csv",
        "try_edits.py --output {output}/kernel_edits.csv",
        "tune_attention.py --two-entries --shapes 'triangle dense' 't5 dense' 'pangu dense' "
        "--resume --output {output}/tune_entries.csv",
        "tune_backward.py --trained --kernels queries keys all --head-sizes 16 --columns 16 "
        "--resume --output {output}/tune_backward.csv",
        "tune_backward.py --resume --output {output}/tune_backward.csv",
    ],
    "sanitizer": ["sanitize_kernel.py --resume --output {output}/sanitizer.json"],
}


def commands(group: str, output: Path) -> list[str]:
    """Of a group, ready for a shell."""
    python, scripts = shlex.quote(sys.executable), ROOT / "scripts"
    folder = shlex.quote(str(output))
    return [f"{python} {scripts}/{c.replace('{output}', folder)}" for c in GROUPS[group]]


def stream(group: str, output: Path, place: int) -> str:
    """A shell command for a whole group, which goes on where one of them fails."""
    steps = [f"nice -n {min(19, 5 * place)} {command}" for command in commands(group, output)]
    return "failed=0; " + "".join(f"{step} || failed=1; " for step in steps) + "exit $failed"


def main() -> int:
    """Run groups, and tell how each ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # argparse looks for the list of no groups among the choices, too
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], metavar="GROUP")
    parser.add_argument("--list", action="store_true", help="print commands and leave")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results")
    parser.add_argument("--logs", type=Path, default=Path("build/beside"))
    parser.add_argument("--stop-s", type=float, default=math.inf, help="end what still runs then")
    parser.add_argument("--settle-s", type=float, default=0.3, help="see beside.py")
    options = parser.parse_args()
    output = options.output.resolve()
    if options.list or not options.groups:
        for group in options.groups or GROUPS:
            print(f"{group}:", *commands(group, output), sep="\n    ")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    ends_by_signal()
    streams = [stream(group, output, place) for place, group in enumerate(options.groups)]
    return told(run(streams, options.logs, options.settle_s, options.stop_s))


if __name__ == "__main__":
    sys.exit(main())
