"""Plans: parsing, refusals that name the part, and the plans that are searched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import api
from perfmodel.api import Plan
from perfmodel.errors import InputError

size = st.integers(1, 64)


@given(tp=size, dp=size, pp=size)
def test_parse_reads_back_labels(tp: int, dp: int, pp: int) -> None:
    p = Plan(tp=tp, dp=dp, pp=pp)
    q = Plan.parse(p.label)
    assert (q.tp, q.dp, q.pp, q.experts) == (tp, dp, pp, p.experts)
    assert p.gpus == tp * dp * pp
    assert Plan.parse(f"tp={tp},dp={dp},pp={pp}") == p


@pytest.mark.parametrize(
    ("text", "says"),
    [("tp=x", "'tp=x'"), ("zz=2", "'zz=2'"), ("", "''"), ("tp=2,tp=4", "twice"),
     ("tp=0", "0 is not a whole number"), ("tp=-1", "'tp=-1'"), ("tp=5000", "5000"),
     ("tp=1.5", "'tp=1.5'")],
)  # fmt: skip
def test_parse_refuses(text: str, says: str) -> None:
    with pytest.raises(InputError, match="plan") as e:
        Plan.parse(text)
    assert says in str(e.value)


@pytest.mark.parametrize("name", ["tp", "dp", "pp", "ep", "etp", "dcp"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, 10**6])
def test_bad_sizes_are_named(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"plan {name}: ") as e:
        Plan(**{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(e.value)


@pytest.mark.parametrize(
    ("plan", "says"),
    [(Plan(tp=3), "128 heads"), (Plan(tp=2, ep=4), "must equal"), (Plan(dp=512), "384 experts"),
     (Plan(pp=62), "61 layers"), (Plan(tp=4, dcp=8), "must divide tp=4"),
     (Plan(tp=2, dp=2, ep=2, etp=2), "etp=2")],
)  # fmt: skip
def test_check_says_what_does_not_go(plan: Plan, says: str) -> None:
    with pytest.raises(InputError) as e:
        plan.check(api.load_model("deepseek-v4-pro"), api.load_system("gb300-nvl72"))
    assert says in str(e.value)


@pytest.mark.parametrize(
    ("model", "plan", "says"),
    [("qwen3-235b-a22b", Plan(tp=4, dcp=2), "one cache per KV head"),
     ("gpt-oss-120b", Plan(tp=2, dcp=2), "window layers"),
     ("llama-3.1-8b", Plan(tp=64), "32 heads"), ("minimax-m2.5", Plan(tp=32), "48 heads"),
     ("gpt-oss-120b", Plan(dp=256), "128 experts")],
)  # fmt: skip
def test_check_of_other_shapes(model: str, plan: Plan, says: str) -> None:
    with pytest.raises(InputError) as e:
        plan.check(api.load_model(model), api.load_system("gb300-nvl72"))
    assert says in str(e.value)


@pytest.mark.parametrize("model", api.list_models())
@pytest.mark.parametrize("system", api.list_systems())
def test_searched_plans_are_possible_and_unique(model: str, system: str) -> None:
    found = api.plans(model, system)
    assert found and len(set(found)) == len(found)
    for p in found:
        p.check(api.load_model(model), api.load_system(system))
        ep, etp = p.experts
        assert ep * etp * p.pp == p.gpus
    assert all(p.gpus <= 4 for p in api.plans(model, system, max_gpus=4))
