"""The bench: it compares equals with equals, one after the other, and says what it compared."""

import json
import time

import pytest
import torch

from orthoworld import bench
from orthoworld.errors import ArgumentError
from orthoworld.functional import sigreg


def gen():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", ((64, 2, 8), (96, 3, 8)))
    monkeypatch.setattr(bench, "SECONDS", 0.01)
    monkeypatch.setattr(bench, "TURN_MS", 0.01)
    monkeypatch.setattr(bench, "TRAINING_STEPS", 2)
    monkeypatch.setattr(bench, "SWEEP_SEEDS", (0,))


def test_textbook_form_is_the_same_loss():
    h = torch.randn(50, 3, dtype=torch.float64, generator=gen())
    assert bench.textbook(h, generator=gen(), slices=16).item() == pytest.approx(
        sigreg(h, generator=gen(), slices=16).item(), rel=1e-12
    )


def test_calls_take_turns_and_the_slower_one_takes_longer():
    order = []
    calls = [lambda: (order.append("a"), time.sleep(0.03)), lambda: (order.append("b"), time.sleep(0.06))]
    fast, slow = bench.medians(calls, seconds=0.2)
    assert "".join(order[4:10]) == "ababab"  # after two each, of which one is the first
    assert 30 <= fast < slow
    assert slow >= 60


def test_short_calls_are_repeated_within_a_turn():
    order = []
    bench.medians([lambda: order.append("a"), lambda: (order.append("b"), time.sleep(0.03))], seconds=0.01)
    assert "a" * 10 in "".join(order)
    assert "bb" not in "".join(order[order.index("b") + 2 :])


def test_rows_say_what_was_timed(short):
    rows = list(bench.run(["kernel"]))
    assert [row.case for row in rows] == ["64 x 2, 8 slices", "96 x 3, 8 slices", "1048576 projections given"]
    assert all(row.ratio == row.textbook_ms / row.ours_ms for row in rows)


def test_an_installed_peer_is_timed_at_its_shape(short, monkeypatch):
    calls = []
    monkeypatch.setattr(bench, "PEER_ROWS", 96)
    monkeypatch.setattr(bench, "PEERS", {"torch": lambda slices, h: calls.append(slices) or h.sum(), "absent": None})
    first, second, _ = bench.run(["kernel"])
    assert first.peers == {}
    assert list(second.peers) == ["torch"]
    assert set(calls) == {8}
    assert bench.machine()["absent"] == "absent"


def test_memory_is_that_beyond_the_input(short):
    (row,) = bench.run(["memory"])
    assert row.peak_mb < 50  # of a process of some hundreds


def test_step_tells_what_the_regulariser_adds(short):
    assert ["SIGReg adds" in row.note for row in bench.run(["step"])] == [True, True]


def test_a_sweep_is_timed_as_an_ensemble_and_one_by_one(short):
    (row,) = bench.run(["ensemble"])
    assert (row.case, row.against) == ("9 runs, 2 steps", "one by one")


def test_the_published_run_is_timed_with_both_forms_and_learns_the_same(short, monkeypatch):
    losses = []
    train = bench.train_restart
    monkeypatch.setattr(bench, "train_restart", lambda *given: losses.append(train(*given).held_out_loss))
    (row,) = bench.run(["experiment"])
    assert row.ratio == row.textbook_ms / row.ours_ms
    assert losses == [pytest.approx(losses[0], rel=1e-4)] * len(losses)
    assert len(losses) >= 6


def test_unknown_section_is_refused_before_anything_is_timed():
    with pytest.raises(
        ArgumentError, match="section 'kernels': expected some of kernel, memory, step, ensemble, experiment"
    ):
        next(bench.run(["step", "kernels"]))


def test_command_prints_text_or_one_object_a_line(short, call):
    code, text, errors = call("bench", "step", "--threads", "1")
    assert (code, errors) == (0, "")
    assert text.startswith("processor ")
    assert "ratio" in text
    code, output, errors = call("bench", "step", "memory", "--json")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["section"] for row in rows] == ["step", "step", "memory"]
    assert {"section", "case", "ours_ms", "textbook_ms", "ratio", "peers", "peak_mb", "threads"} <= set(rows[0])
    assert rows[2]["ours_ms"] is None
    assert call("bench", "kernels")[0] == 2
