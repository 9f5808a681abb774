import json

from lightning_egeria.workflow.history import Row
from lightning_egeria.workflow.jobfolders import State
from lightning_egeria.workflow.page import curves_in, job_page, jobs_page

ROW = Row(
    3, "<b>a</b>", "/run", "local", State.RUNNING, 0.0, 10.0, None, 1, "<script>x</script>", 0, "me", 1, (), "", ""
)


def test_nothing_of_a_job_becomes_html():
    pages = jobs_page([ROW], 75.0) + job_page(ROW, 75.0, "<img>", "<i>", {"<u>": [(0.0, 1.0)]}, actions=True)
    assert not [tag for tag in ("<b>a", "<script>", "<img>", "<i>", "<u>") if tag in pages]
    assert "1m 5s" in pages
    assert "No job yet" in jobs_page([], 0.0)


def test_buttons_only_if_the_page_may_act():
    assert "cancel" in job_page(ROW, 0.0, "", "", {}, actions=True)
    assert "<form" not in job_page(ROW, 0.0, "", "", {}, actions=False)


def test_curves_come_from_the_record(tmp_path):
    assert curves_in(tmp_path) == {}
    points = [
        {"step": 1, "values": {"val": 0.5, "egeria/x": 1}},
        {"step": 5, "values": {"val": 0.7, "nan": float("nan")}},
    ]
    (tmp_path / "egeria.json").write_text(json.dumps({"metrics": points}))
    assert curves_in(tmp_path) == {"val": [(1.0, 0.5), (5.0, 0.7)]}
    page = job_page(ROW, 0.0, "", "", curves_in(tmp_path), actions=False)
    assert 'points="10.0,170.0 630.0,10.0"' in page
    for damaged in ("{", "[]", '{"metrics": [1]}', '{"metrics": [{"step": 1, "values": []}]}'):
        (tmp_path / "egeria.json").write_text(damaged)
        assert curves_in(tmp_path) == {}
