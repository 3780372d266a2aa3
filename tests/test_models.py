"""The second list of every room's bench."""

import pytest

from bench import ROOMS, bench


@pytest.mark.parametrize("room", ROOMS)
def test_models_adds_ten_shapes_that_the_room_does_not_measure_yet(room: str) -> None:
    one = bench(room)
    measured = {case.shape_text for case in one.cases()}
    added = {case.shape_text for case in one.models()}
    assert len(added - measured) >= 10
