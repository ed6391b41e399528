"""Every mutant of the list still applies to the code. `make mutants` runs them."""

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
