"""The explorer without a browser: outside a kernel its widgets are plain objects."""

import json

import numpy as np
import pytest

from perfmodel import api
from perfmodel import live as live_module
from perfmodel.explorer import FRONTIER, Explorer
from perfmodel.live import LiveChart, bundle, pack
from perfmodel.paths import data_dir

SYSTEM, OTHER = "gb300-nvl72", "h200-nvl8"


@pytest.fixture
def explorer():
    return Explorer(model="deepseek-v4-pro", systems=[SYSTEM, OTHER])


def sent(explorer, column="throughput_tok_s_mw"):
    return bytes(explorer.chart.frame["tables"]["rows"]["columns"][column])


def test_the_curve_is_what_the_api_gives(explorer):
    low, high = explorer.batches.value
    direct = api.best(
        "deepseek-v4-pro", SYSTEM, batch=np.unique(np.geomspace(low, high, 80).round()),
        context_tokens=2**16,
    )  # fmt: skip
    here = explorer.rows["system"] == SYSTEM
    for name in ("interactivity_tok_s_user", "throughput_tok_s_mw"):
        assert explorer.rows[name][here] == pytest.approx(direct[name])
    assert set(explorer.rows) == set(FRONTIER)
    assert set(explorer.rows["system"]) == {SYSTEM, OTHER}


def test_the_context_slider_sends_new_rows_in_place(explorer):
    before, frame, spec = sent(explorer), explorer.chart.frame["n"], explorer.chart.spec
    explorer.context.value = 2.0**17
    assert explorer.chart.frame["n"] == frame + 1
    assert sent(explorer) != before
    assert explorer.chart.spec is spec


def test_a_longer_context_is_never_better(explorer):
    best = [explorer.rows["throughput_tok_s_mw"].max()]
    for exponent in (17, 18, 19):
        explorer.context.value = 2.0**exponent
        best.append(explorer.rows["throughput_tok_s_mw"].max())
    assert best == sorted(best, reverse=True)


@pytest.mark.parametrize("plan, word", [("tp=7", "tp"), ("tp=8,tp=4", "twice"), ("nine", "nine")])
def test_a_bad_plan_says_why_and_keeps_the_inputs(explorer, plan, word):
    explorer.plan.value = plan
    assert word in explorer.message.value and "alert" in explorer.message.value
    assert explorer.rows == {} and explorer.chart.layout.display == "none"
    assert explorer.plan.value == plan
    explorer.plan.value = "best"
    assert explorer.message.value == "" and explorer.chart.layout.display == ""


def test_a_plan_that_fits_one_system_only_keeps_its_curve(explorer):
    explorer.plan.value = "tp=4"  # enough memory on one of the two
    assert set(explorer.rows["system"]) == {SYSTEM}
    assert OTHER in explorer.message.value and "does not fit" in explorer.message.value
    assert explorer.chart.layout.display == ""


def test_the_message_is_text_not_markup(explorer):
    explorer.plan.value = "<img src=x onerror=alert(1)>"
    assert "<img" not in explorer.message.value and "&lt;img" in explorer.message.value


def test_systems_come_and_go(explorer):
    explorer.systems[OTHER].value = False
    assert set(explorer.rows["system"]) == {SYSTEM}
    assert explorer.chart.frame["signals"]["shown_systems"] == [SYSTEM]
    explorer.systems[SYSTEM].value = False
    assert explorer.rows == {} and "No system" in explorer.message.value
    explorer.systems[OTHER].value = True
    assert set(explorer.rows["system"]) == {OTHER} and explorer.message.value == ""


def test_speed_of_light_is_labelled_and_not_slower(explorer):
    before = explorer.rows["throughput_tok_s_mw"].max()
    explorer.mode.value = "speed-of-light"
    assert "upper bound" in explorer.note.value
    assert "speed of light" in json.dumps(explorer.chart.spec)
    assert explorer.rows["throughput_tok_s_mw"].max() >= before


def test_the_power_basis_stands_on_the_axis(explorer):
    explorer.power.value = "chip"
    assert f"tok/s/MW, {api.POWER_BASES['chip']}" in json.dumps(explorer.chart.spec)


def test_a_click_and_the_batch_slider_choose_the_point(explorer):
    rows = explorer.rows
    i = int(np.flatnonzero(rows["system"] == OTHER)[3])
    pick = {k: [rows[k][i].item()] for k in ("system", "plan", "batch")}
    explorer.chart.set_state({"selected": {"pick": pick}})  # as the browser would
    assert OTHER in explorer.point.value and str(rows["plan"][i]) in explorer.point.value
    assert f"batch {int(rows['batch'][i]):,}" in explorer.point.value
    operators = explorer.breakdown.frame["tables"]["operators"]["columns"]["seconds"]
    assert np.frombuffer(operators).sum() > 0
    before = explorer.point.value
    explorer.point_batch.value = 1
    assert explorer.point.value != before


def test_every_model_can_be_chosen(explorer):
    for name in api.list_models():
        explorer.model.value = name
        assert explorer.precision.options == ("auto", *api.precisions(name))
        assert [d for _, d in explorer.draft_name.options] == [None, *api.drafts(name)]
        assert explorer.rows or explorer.message.value


def test_draft_tokens_without_an_acceptance_length_explain_themselves(explorer):
    explorer.draft.value = 7
    assert explorer.rows or "draft_tokens" in explorer.message.value


def test_every_input_has_a_description(explorer):
    for box in [*explorer._inputs(), explorer.point_system, explorer.point_batch]:
        assert box.description


def test_pack_refuses_columns_of_different_lengths():
    with pytest.raises(ValueError, match="differ in length"):
        pack({"a": [1.0, 2.0], "b": [1.0]})
    assert pack({})["length"] == 0


def test_the_browser_code_is_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundle.cache_clear()
    text = bundle()
    files = list((tmp_path / "perfmodel").iterdir())
    assert [f.suffix for f in files] == [".js"] and files[0].read_text() == text
    files[0].write_text("kept")
    bundle.cache_clear()
    assert bundle() == "kept"
    bundle.cache_clear()
    # a folder that others may write to is not trusted, since its content runs in the browser
    (tmp_path / "perfmodel").chmod(0o777)
    monkeypatch.setattr(live_module.tempfile, "gettempdir", lambda: str(tmp_path / "none" / "x"))
    assert bundle() == text
    bundle.cache_clear()


def test_the_notebook_is_valid_and_stored_without_outputs():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(data_dir("notebooks") / "explorer.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in code)
    assert notebook.metadata.kernelspec.name == "python3"
    scope = {}
    for cell in code:
        exec(cell.source, scope)
    assert isinstance(scope["explorer"], Explorer)
    assert isinstance(scope["explorer"].chart, LiveChart)
