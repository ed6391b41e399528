"""The list of mutants does not rot. `make mutants` runs them."""

from __future__ import annotations

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
    assert not any(mutant.file.startswith("tests") for mutant in MUTANTS)
