"""Figures of methods, as plain numbers."""

import json
import math
from types import SimpleNamespace

import msgspec
import pytest

from lightning_egeria.core.training.methods import FREEZING
from lightning_egeria.core.training.panels import LONGEST, MOST_POINTS, Panel, panels_of


def panel(points, name="noise", **rest):
    return Panel(name, "Noise", "It grows.", "steps", "samples", {"noise": points}, **rest)


class Method:
    egeria_method = FREEZING

    def __init__(self, *panels):
        self.found = list(panels)

    def panels(self):
        return self.found


def test_what_a_panel_cannot_show_is_left_out():
    assert panel([(0, math.inf), (1, 2.0), (math.nan, 3.0)]).series == {"noise": [(1, 2.0)]}


def test_long_series_are_thinned_and_keep_their_ends():
    (points,) = panel([(step, step) for step in range(3 * LONGEST)]).series.values()
    assert LONGEST / 2 < len(points) <= LONGEST
    assert points[0] == (0, 0)
    assert points[-1] == (3 * LONGEST - 1, 3 * LONGEST - 1)
    assert [x for x, _ in points] == sorted({x for x, _ in points})


def test_a_panel_is_read_as_it_was_written():
    written = panel([(0, 1.5), (1, 2.5)], kind="bars", log=True)
    assert msgspec.json.decode(msgspec.json.encode(written), type=Panel) == written


@pytest.mark.parametrize("wrong", [{"name": "<b>"}, {"kind": "pie"}, {"series": {"a": [[0, 1, 2]]}}, {"title": 1}])
def test_a_panel_of_another_form_is_not_read(wrong):
    content = msgspec.to_builtins(panel([(0, 1)])) | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(content, type=Panel)


def test_the_methods_of_a_trainer_are_asked_for_panels():
    noise, losses, empty = panel([(0, 1)]), panel([(0, 2)], "losses"), panel([], "empty")
    users_own = SimpleNamespace(panels=lambda: "of another kind")
    callbacks = [users_own, Method(noise, empty), type("Silent", (), {"egeria_method": FREEZING})()]
    trainer = SimpleNamespace(callbacks=callbacks, datamodule=Method(losses))
    assert panels_of(trainer) == [noise, losses]


@pytest.mark.parametrize("name", ["a_b\n", "A", "../x", "", "a/b", "a\x00", "1a"])
def test_a_name_that_is_no_name_is_refused(name):
    """It becomes the name of a file."""
    text = msgspec.json.encode(panel([(0, 1.0)], name="ok")).replace(b'"ok"', json.dumps(name).encode())
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Panel)


def test_many_series_have_fewer_points_each():
    points = [(float(place), 1.0) for place in range(2000)]
    many = Panel("a", "A", "", "x", "y", {str(number): list(points) for number in range(500)})
    assert sum(map(len, many.series.values())) <= MOST_POINTS + len(many.series)
