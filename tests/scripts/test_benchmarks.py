"""The list of what is measured: its commands exist, and take what they are told."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_models  # noqa: E402
import benchmarks  # noqa: E402

COMMANDS = [c for group in benchmarks.GROUPS for c in benchmarks.commands(group, Path("/out put"))]


def words_of(command: str) -> list[str]:
    _, script, *words = shlex.split(command)
    assert Path(script).is_file()
    return [script, *words]


def source_of(script: str) -> str:
    """Of a script and of those that it takes something from, which may read its options."""
    own = Path(script).read_text()
    others = (SCRIPTS / f"{name}.py" for name in re.findall(r"^from (\w+) import", own, re.M))
    return own + "".join(other.read_text() for other in others if other.is_file())


@pytest.mark.parametrize("command", COMMANDS)
def test_scripts_have_the_options_that_they_are_given(command: str) -> None:
    script, *words = words_of(command)
    source = source_of(script)
    assert all(f'"{word}"' in source for word in words if word.startswith("--"))
    assert any(word.startswith("/out put") for word in words)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "_models.py" in c])
def test_models_have_the_variants_that_are_asked_for(command: str) -> None:
    script, *words = words_of(command)
    options = {}
    for word in words:
        if word.startswith("--"):
            values = options[word] = []
        else:
            values.append(word)
    cases = bench_models.all_cases(False)
    names = [n for n in options["--models"] if n != "families"]
    assert all(set(options["--variants"]) <= set(cases[name].variants()) for name in names)
    if script.endswith("bench_models.py"):
        rows = len(options["--variants"]) * max(1, len(names))
        assert names == [] or rows <= 3 * int(options["--together"][0])


def test_a_group_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/one.py").write_text("raise SystemExit(2)")
    (tmp_path / "scripts/two.py").write_text(f"open({str(told)!r}, 'w').write('two')")
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    monkeypatch.setitem(benchmarks.GROUPS, "suite", ["one.py", "two.py"])
    streams = [benchmarks.stream("suite", tmp_path, place=3)]
    (command,) = benchmarks.run(streams, tmp_path / "logs", 0.0)
    assert command.process.returncode == 1 and told.read_text() == "two"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_go_on_where_they_were_if_they_can(command: str) -> None:
    script, *words = words_of(command)
    goes_on = '"--resume"' in source_of(script) and "train" not in words  # of the PDE solver
    assert ("--resume" in words) == goes_on
