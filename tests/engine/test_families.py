"""Every architecture family: a small model of its real class answers as with SGLang's default
backend, and pat decodes the layers that it claims.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sglang
from family_engines import NUM_TOKENS, PREFIX, FamilyEngines, Run, family_engines
from model_families import FAMILIES, Family

pytestmark = pytest.mark.engine

# Float32 sums in another order differ by about 1e-6.
CLEAR_CUT = 5e-5


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyEngines]:
    """One import of SGLang for all families."""
    with family_engines(tmp_path_factory.mktemp("families")) as running:
        yield running


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=name, marks=[pytest.mark.nightly] if family.nightly else [])
        for name, family in FAMILIES.items()
    ],
)
def test_tokens_and_routes(engines: FamilyEngines, family: Family) -> None:
    refused = family.refused.get(sglang.__version__)
    if refused is not None:
        pytest.skip(f"SGLang {sglang.__version__} on a CPU: {refused}")
    expected = engines.run(family, None)
    assert_telling(expected)
    assert expected.routes is None
    found = engines.run(family, "pat")
    assert found.tokens == expected.tokens
    assert_routes(found, family)
    assert ("with attention sinks" in found.log) == family.pat_has_sinks
    if family.pat:
        assert_shared(found)
    # All layers are decoded in every step, none of them twice. How many steps there are depends on
    # when the prompts arrive.
    for run in (expected, found):
        (steps,) = {*run.calls.values()}
        assert steps >= 2 * (NUM_TOKENS - 1)
    assert {layer for _, layer in found.calls} == {layer for _, layer in expected.calls}


def assert_telling(run: Run) -> None:
    """Answers that would differ if attention did."""
    assert run.smallest_gap > CLEAR_CUT
    assert {len(answer) for answer in run.tokens} == {NUM_TOKENS}
    assert min(len(set(answer)) for answer in run.tokens) >= NUM_TOKENS // 4
    # Prompts that have most in common are answered differently.
    assert len({tuple(answer) for answer in run.tokens}) == len(run.tokens)


def assert_routes(run: Run, family: Family) -> None:
    """What was called, and what SGLang's server info says."""
    delegated = sorted(layer for layers in family.default.values() for layer in layers)
    assert run.layers_of("pat") == family.pat
    assert run.layers_of("default") == tuple(delegated)
    assert run.routes == {
        "default_backend": "torch_native",
        "pat_layers": len(family.pat),
        "default_layers": {reason: len(layers) for reason, layers in family.default.items()},
        "batch_invariant": False,
    }


def assert_shared(run: Run) -> None:
    """The prefix of all prompts is read once per step."""
    assert run.stats["private_steps"] == {}
    planned, alone = run.stats["kv_tokens_planned"], run.stats["kv_tokens_query_centric"]
    steps = NUM_TOKENS - 1
    assert alone - planned >= 0.9 * 7 * PREFIX * steps


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        # Layers of both routes: a hybrid's pools have the type as well.
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt-oss", "qwen3-next")),
    ],
)
def test_tokens_over_an_fp8_pool(engines: FamilyEngines, name: str) -> None:
    family = FAMILIES[name]
    if sglang.__version__ in family.refused:
        pytest.skip(f"SGLang {sglang.__version__} on a CPU: {family.refused[sglang.__version__]}")
    options = {"kv_cache_dtype": "fp8_e4m3"}
    expected = engines.run(family, None, **options)
    assert_telling(expected)
    found = engines.run(family, "pat", **options)
    assert found.tokens == expected.tokens
    assert_routes(found, family)
    assert_shared(found)
    assert "float8_e4m3fn" in found.log
