"""Chunks and schedulers: kernels against plain PyTorch, and choices against what is known."""

from typing import Any

import pytest
import torch

from kernelbook import check, runtime
from kernelbook.train import (
    SCHEDULERS,
    Layout,
    PlantedTeacher,
    chunk_norms,
    chunk_norms_reference,
    knn_scores,
    knn_scores_reference,
    make_scheduler,
    score_chunks,
    score_scheduler,
    top_chunks,
    weight_features,
)

LAYOUT = Layout((5, 70), (2, 9))


def _counts(layout: Layout) -> torch.Tensor:
    return torch.tensor(layout.active, dtype=torch.int32, device=runtime.DEVICE)


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize(("rows", "d", "chunk"), ((1, 1, 16), (128, 64, 64), (50, 700, 16), (33, 5, 20)))
def test_chunk_norms(dtype: torch.dtype, rows: int, d: int, chunk: int, device: torch.device) -> None:
    grad = torch.randn(rows, d, device=device).to(dtype)
    truth = chunk_norms_reference(grad.double(), chunk_size=chunk)
    baseline = chunk_norms_reference(grad.float(), chunk_size=chunk)
    with check.poisoned_empty():
        found = chunk_norms(grad, chunk_size=chunk)
    check.compare("norms", found, truth, baseline).require()


def test_chunk_norms_of_what_is_special(device: torch.device) -> None:
    grad = torch.randn(40, 33, device=device)
    out = torch.zeros(3, device=device)
    assert chunk_norms(grad.t().contiguous().t(), chunk_size=16, out=out) is out  # other strides
    torch.testing.assert_close(out, chunk_norms_reference(grad, chunk_size=16))
    torch.testing.assert_close(chunk_norms(grad[:, 0], chunk_size=16), chunk_norms_reference(grad[:, 0], chunk_size=16))
    assert chunk_norms(grad[:, :0], chunk_size=16).tolist() == [0, 0, 0]
    assert chunk_norms(grad[:0]).shape == (0,)
    grad[20, 7] = float("nan")
    assert chunk_norms(grad, chunk_size=16).isnan().tolist() == [False, True, False]
    with pytest.raises(TypeError, match="chunk_norms: grad must have dtype"):
        chunk_norms(grad.long())
    with pytest.raises(ValueError, match=r"chunk_norms: out must have shape \(3,\), got \(4,\)"):
        chunk_norms(grad, chunk_size=16, out=torch.zeros(4, device=device))
    with pytest.raises(ValueError, match="chunk_norms: chunk_size must be at least 1, got 0"):
        chunk_norms(grad, chunk_size=0)


@pytest.mark.parametrize("k", (1, 3))
def test_knn_scores(k: int, device: torch.device) -> None:
    n = LAYOUT.total
    features, norms = torch.randn(6, n, device=device), torch.rand(n, device=device)
    seen = torch.randint(-1, 20, (n,), device=device).int()
    seen[:5] = -1  # a layer of which nothing was observed
    seen[1] = 3
    step = torch.tensor([20], dtype=torch.int32, device=device)
    with check.poisoned_empty():
        found = knn_scores(features, norms, seen, step, LAYOUT.starts(), longest=70, window=9, k=k)
    expected = knn_scores_reference(features, norms, seen, step, LAYOUT.starts(), window=9, k=k)
    torch.testing.assert_close(found, expected)
    strided = knn_scores(
        features, torch.stack([norms, norms], 1)[:, 0], torch.stack([seen, seen], 1)[:, 0], step, LAYOUT.starts(),
        longest=70, window=9, k=k,
    )  # fmt: skip
    assert torch.equal(strided, found)
    assert found[0] == float("inf") and found[1] == norms[1]
    fresh = seen >= 11
    assert torch.equal(found[fresh], norms[fresh]) and not torch.equal(found, norms)


def test_chunks_at_random(device: torch.device) -> None:
    layout = Layout((70,), (10,))
    drawn = []
    for now in range(40):
        ids = torch.full((10,), -1, device=device)
        chosen = torch.empty(70, dtype=torch.int32, device=device)
        step = torch.tensor([now], dtype=torch.int32, device=device)
        top_chunks(
            None, ids, layout.starts(), layout.slots(), _counts(layout), longest=70, chosen=chosen, step=step, seed=3
        )  # fmt: skip
        assert len(set(ids.tolist())) == 10 and set(ids.tolist()) <= set(range(70))
        drawn += ids.tolist()
    # 400 draws over 70 chunks: each expects 5.7.
    frequency = torch.bincount(torch.tensor(drawn), minlength=70)
    assert len(set(drawn)) > 65 and frequency.max() < 18


def test_a_fraction_is_at_least_one_chunk() -> None:
    layout = Layout.of_fraction([128, 32, 3], 0.1)
    assert layout.active == (13, 3, 1)
    with pytest.raises(ValueError, match=r"active must lie in \[1, 3\]"):
        Layout((3,), (4,))


# --- schedulers -----------------------------------------------------------------------------------------------------


def _drive(scheduler: Any, steps: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(steps):
        if scheduler.needs_dense:
            scheduler.observe_all(torch.rand(scheduler.layout.total, generator=generator).to(scheduler.ids.device))
        ids = scheduler.select()
        found.append(ids.tolist())
        scheduler.observe(torch.rand(len(ids), generator=generator).to(ids.device))
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler(name: str) -> None:
    layout = Layout((5, 20), (2, 6))
    weights = [torch.randn(count * 16, 8, device=runtime.DEVICE) for count in layout.counts]

    def make() -> Any:
        scheduler = make_scheduler(name, layout, seed=1)
        scheduler.refresh(weights, 16)
        return scheduler

    scheduler = make()
    first = _drive(scheduler, 3)
    for ids, count in zip(scheduler.ids_of_layers(), layout.counts, strict=True):
        assert len(set(ids.tolist())) == len(ids) and set(ids.tolist()) <= set(range(count))
    expected = layout.counts if name == "all" else layout.active
    assert [len(ids) for ids in scheduler.ids_of_layers()] == list(expected)
    # The same again from the start, and on from a saved state.
    twin = make()
    assert _drive(twin, 3) == first
    resumed = make_scheduler(name, layout, seed=1)
    resumed.load_state_dict(scheduler.state_dict())
    assert _drive(resumed, 2) == _drive(scheduler, 2)
    with pytest.raises(RuntimeError, match="size mismatch for ids"):
        make_scheduler(name, Layout((5, 21), (3, 7))).load_state_dict(scheduler.state_dict())


def test_what_is_no_scheduler() -> None:
    with pytest.raises(ValueError, match=r"make_scheduler: name must be one of 'all', .*, got 'best'"):
        make_scheduler("best", LAYOUT)
    with pytest.raises(ValueError, match=r"explore must lie in \[0, 1\], got 2"):
        make_scheduler("knn", LAYOUT, explore=2)
    with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\), got 2"):
        make_scheduler("ema_topk", LAYOUT, decay=2)
    with pytest.raises(TypeError, match="seed must be an integer, got float"):
        make_scheduler("random", LAYOUT, seed=1.5)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        make_scheduler("knn", LAYOUT, k=0)


def test_round_robin_gives_everyone_a_turn() -> None:
    scheduler = make_scheduler("round_robin", Layout((7,), (2,)))
    turns = torch.bincount(torch.tensor(_drive(scheduler, 14)).flatten(), minlength=7)
    assert turns.tolist() == [4] * 7


def test_ema_topk_follows_what_it_saw(device: torch.device) -> None:
    scheduler = make_scheduler("ema_topk", Layout((8,), (3,)), explore=0.0, decay=0.5)
    unseen = scheduler.select().clone()
    scheduler.observe(torch.tensor([1.0, 2.0, 3.0], device=device))
    assert set(scheduler.select().tolist()).isdisjoint(unseen.tolist())  # what was never seen comes first
    scheduler.observe_all(torch.arange(8.0, device=device))
    scheduler.observe_all(torch.arange(8.0, device=device))
    scheduler._mean[0] = 100.0
    assert scheduler.select().tolist() == [0, 7, 6]
    scheduler.observe(torch.zeros(3, device=device))
    assert scheduler._mean[0] == 50.0 and scheduler._mean[5] != 0


def test_exploration_takes_its_share() -> None:
    scheduler = make_scheduler("ema_topk", Layout((40,), (10,)), explore=0.3, seed=2)
    scheduler.observe_all(torch.arange(40.0, device=scheduler.ids.device))
    found = []
    for _ in range(6):
        ids = scheduler.select().tolist()
        assert ids[:7] == [39, 38, 37, 36, 35, 34, 33] and len(set(ids)) == 10
        found.append(tuple(ids[7:]))
    assert len(set(found)) == 6
    oracle = make_scheduler("oracle", Layout((40,), (10,)), explore=0.3)  # it has nothing to explore
    oracle.observe_all(torch.arange(40.0, device=oracle.ids.device))
    assert oracle.select().tolist() == list(range(39, 29, -1))


def test_knn_predicts_from_neighbours(device: torch.device) -> None:
    # Two kinds of chunks; one of each kind is observed.
    kind = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1], device=device)
    weight = torch.randn(2, 16, 8, device=device)[kind].flatten(0, 1) + 0.01 * torch.randn(128, 8, device=device)
    scheduler = make_scheduler("knn", Layout((8,), (4,)), explore=0.0, k=1, window=0)
    scheduler.refresh([weight], 16)
    scheduler.observe_all(torch.ones(8, device=device))
    scheduler.select(), scheduler.select()  # so long ago that it no longer counts
    scheduler.ids.copy_(torch.tensor([0, 1, 2, 3], device=device))
    scheduler.observe(torch.tensor([5.0, 0.1, 5.0, 0.1], device=device))
    assert set(scheduler.select().tolist()) == {0, 2, 4, 6}


def test_features_keep_distances(device: torch.device) -> None:
    weight = torch.randn(20 * 16, 30, device=device)
    (features,) = weight_features([weight], 16, dims=400)
    assert features.shape == (400, 20)
    chunks = weight.view(20, -1)
    ratio = torch.pdist(features.t()) / torch.pdist(chunks)
    assert float(ratio.std() / ratio.mean()) < 0.1
    again = weight_features([weight], 16, dims=400)[0]
    assert torch.equal(features, again)
    assert weight_features([weight[:-3]], 16, dims=4)[0].shape == (4, 20)  # a shorter last chunk


# --- the planted teacher --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("families", (None, 4))
def test_the_gradient_lives_in_the_planted_chunks(families: int | None) -> None:
    teacher = PlantedTeacher(chunks=16, planted=4, families=families, d_in=16, batch=32, period=5)
    for step in (0, 4, 5):
        x, dy = teacher.gradients(step)
        norms = chunk_norms(dy.t() @ x, chunk_size=16)
        planted = teacher.planted_chunks(step).to(norms.device)
        assert score_chunks(planted, norms)["recall"] == 1 and score_chunks(planted, norms)["energy"] > 0.8
    assert set(teacher.planted_chunks(0).tolist()) != set(teacher.planted_chunks(5).tolist())
    with pytest.raises(ValueError, match=r"PlantedTeacher: families must divide chunks \(64\) .*, got 3"):
        PlantedTeacher(families=3)


def test_scores_are_what_they_say(device: torch.device) -> None:
    norms = torch.tensor([4.0, 3.0, 2.0, 1.0], device=device)
    score = score_chunks(torch.tensor([0, 3], device=device), norms)
    assert score == {"precision": 0.5, "recall": 0.5, "energy": 17 / 30}
    assert score_chunks(torch.tensor([0, 3], device=device), norms, wanted=1)["recall"] == 1


def test_schedulers_on_the_planted_teacher() -> None:
    def recall(name: str, families: int | None = 4) -> float:
        teacher = PlantedTeacher(chunks=32, planted=8, families=families, d_in=16, batch=16, period=6)
        scheduler = make_scheduler(name, Layout((32,), (8,)))
        scores = list(score_scheduler(teacher, scheduler, 15))
        return sum(score["recall"] for score in scores) / len(scores)

    found = {name: recall(name) for name in ("random", "ema_topk", "knn", "oracle")}
    assert found["oracle"] == 1.0 and 0.15 < found["random"] < 0.35
    assert found["ema_topk"] > found["random"] and found["knn"] > found["random"] + 0.1


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_never_wait_for_the_device(name: str, device: torch.device) -> None:
    layout = Layout((96, 32, 128), (10, 3, 13))
    scheduler = make_scheduler(name, layout)
    norms, some = torch.rand(layout.total, device=device), torch.rand(scheduler.layout.total_active, device=device)

    def step() -> None:
        scheduler.observe_all(norms)
        scheduler.select()
        scheduler.observe(some)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = scheduler.ids.clone()
    graph.replay(), graph.replay()
    if name == "random":
        assert not torch.equal(before, scheduler.ids)
    for ids, count in zip(scheduler.ids_of_layers(), layout.counts, strict=True):
        assert len(set(ids.tolist())) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < count
