"""The published sizes, and the second list of every room's bench."""

import pytest

from bench import ROOMS, bench, models


@pytest.mark.parametrize("room", ROOMS)
def test_models_adds_ten_shapes_that_the_room_does_not_measure_yet(room: str) -> None:
    one = bench(room)
    measured = {case.shape_text for case in one.cases()}
    added = {case.shape_text for case in one.models()}
    assert len(added - measured) >= 10


def test_sizes_are_whole() -> None:
    for name, model in models.MODELS.items():
        assert model.heads % model.kv_heads == 0, name
        assert (model.experts > 0) == (model.expert_intermediate > 0) == (model.slots > 0), name
        assert model.experts or model.intermediate, name
