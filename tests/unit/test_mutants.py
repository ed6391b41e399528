"""The list of mutants does not rot. `make mutants` runs them."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest
from mutants import CPP_TESTS, ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.why}")
def test_every_mutant_can_be_made(mutant: Mutant) -> None:
    changed = mutant.of((ROOT / mutant.file).read_text())
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert mutant.tests
    for target in mutant.tests:
        if target != CPP_TESTS:
            path, _, name = target.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text() or not name, target


@pytest.mark.parametrize(
    ("text", "found"),
    [("x = 1", "0 times"), ("if a < b:\n    return a < b", "2 times")],
)
def test_a_mutant_that_cannot_be_made_is_named(text: str, found: str) -> None:
    mutant = Mutant("a bound is wrong", "a.py", "a < b", "a <= b", ["tests/unit/test_a.py"])
    with pytest.raises(ValueError, match=rf"a\.py: 'a < b' is there {found}"):
        mutant.of(text)


def test_the_list_is_large() -> None:
    assert len(MUTANTS) >= 40
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert all(Path(mutant.file).parts[0] in ("scheduler", "sglang_pat") for mutant in MUTANTS)


@pytest.mark.parametrize(
    ("notices", "survives", "status", "line"),
    [
        (True, "", 0, "  killed    a.py: a bound is wrong (FAILED test_a; "),
        (False, "", 1, "! survived  a.py: a bound is wrong (all tests pass; "),
        (False, "no caller asks for it", 0, "  survived  a.py: a bound is wrong (no caller asks"),
        (True, "no caller asks for it", 1, "! killed    a.py: a bound is wrong (FAILED test_a; "),
    ],
)
def test_a_run_fails_where_a_mutant_does_not_do_as_listed(
    notices: bool,
    survives: str,
    status: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "a.py"
    copy.write_text("a < b")
    mutant = Mutant("a bound is wrong", "a.py", "a < b", "a <= b", ["tests"], survives)

    def failing(tests: list[str]) -> str | None:
        return "FAILED test_a" if notices and copy.read_text() == "a <= b" else None

    monkeypatch.setattr(mutants, "COPY", tmp_path)
    monkeypatch.setattr(mutants, "update_copy", lambda: None)
    monkeypatch.setattr(mutants, "read_mutants", lambda: [mutant])
    monkeypatch.setattr(mutants, "failing", failing)
    monkeypatch.setattr("sys.argv", ["mutants.py"])
    assert mutants.main() == status
    assert line in capsys.readouterr().out
    assert copy.read_text() == "a < b"


def test_a_run_of_no_mutant_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mutants.py", "no_file.py"])
    with pytest.raises(SystemExit, match="2"):
        mutants.main()
    assert "no mutant has no_file.py in its file or description" in capsys.readouterr().err
