"""Over several processes every objective has the value and the gradient of the global batch; real processes say so."""

import pytest
import torch

import across_processes as task
from orthoworld.functional import sigreg, this_process_only
from orthoworld.objectives.processes import processes

NAMES = [*task.LOSSES, *task.OBJECTIVES]


@pytest.mark.parametrize("name", NAMES)
def test_value_is_that_of_the_global_batch(alone, ranks, name):
    for found in ranks:
        torch.testing.assert_close(found[name][0], alone[name][0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_mean_over_processes_is_the_gradient_of_the_global_batch(alone, ranks, name):
    rows = torch.cat([found[name][1] for found in ranks], dim=1) / len(ranks)
    torch.testing.assert_close(rows, alone[name][1], rtol=1e-9, atol=1e-12)


def test_encoder_under_ddp_gets_the_gradient_of_the_global_batch(alone, ranks):
    for found in ranks:
        for own, expected in zip(found["ddp"], alone["ddp"], strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


def test_this_process_only_leaves_the_others_out(ranks):
    rows = task.ROWS[len(ranks)]
    parts = task.embeddings().split(rows, dim=1)
    for found, h in zip(ranks, parts, strict=True):
        assert found["alone"] == sigreg(h, generator=task.gen(3), slices=8)


def test_training_on_one_rank_waits_for_no_other(alone, ranks):
    for own, expected in zip(ranks[0]["trained"], alone["trained"], strict=True):
        assert torch.equal(own, expected)


def test_without_a_process_group_there_is_one_process():
    assert processes() == 1
    with this_process_only():
        assert processes() == 1
