"""Recall is learned by attention across the ranks alone."""
from unittest.mock import patch

import pytest
import torch

from extras.recall import Recall
from test_upipe import RANKS, as_rank, check_resumed, rank_main, records
from upipe import IGNORE


def test_a_window_of_recall_is_the_same_for_any_number_of_ranks():
    """Pairs first, noise, then every key once more; labels only where a value follows."""
    for ctx in (64, 100, 2000):
        task = Recall(0, ctx, 10)
        ids, labels = task.window(3 * ctx, as_rank(0, 1), ctx)
        for cp in (2, 4):
            parts = [task.window(3 * ctx, as_rank(rank, cp), ctx) for rank in range(cp)]
            for i, x in enumerate((ids, labels)):
                assert torch.equal(torch.cat([part[i] for part in parts])[:ctx], x)
        for rank in range(2):  # of a ring: one has the pairs, the other one is asked
            ring = task.window(3 * ctx, as_rank(rank, 2, 2), ctx)
            assert (ring[0][:2 * task.pairs] == ids[:2 * task.pairs]).all() == (rank == 0)
            assert (ring[1] != IGNORE).any() == (rank == 1)
        n = task.pairs
        pairs = dict(ids[:2 * n].view(n, 2).tolist())
        asked = (labels != IGNORE).nonzero().flatten().tolist()
        assert len(asked) == len(pairs) == n and min(asked) >= ctx - 2 * n > 2 * n
        assert all(pairs[ids[i].item()] == labels[i].item() for i in asked)
        assert not torch.equal(ids, task.window(4 * ctx, as_rank(0, 1), ctx)[0])
        assert (task.window(10 * ctx, as_rank(0, 1), ctx)[1] == IGNORE).all()


def rank_recall(flags, cut):
    """--task recall with four keys of four values; `cut`: as two documents, so that no attention
    crosses the ranks."""
    window = Recall.window

    def in_two(task, *where):
        return *window(task, *where), torch.tensor([0, task.ctx // 2])
    with patch.multiple(Recall, KEYS=4, VALUES=4, window=in_two if cut else window):
        return rank_main(flags)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut between the ranks"])
def test_recall_is_learned_by_attention_across_ranks_alone(cut, tmp_path):
    """Chance is log 4 = 1.386 nats: far below it with attention, never below it without."""
    flags = ["--task", "recall", "--ctx", 32, "--layers", 1, "--steps", 80, "--grad-accum", 2,
             "--lr", 3e-3, "--eval-windows", 32, "--eval-every", 0, "--log", tmp_path / "log"]
    out = RANKS[2](rank_recall, flags, cut)[0]
    loss = records(tmp_path / "log", "validation_loss")[80]["validation_loss"]
    assert 1.3 < loss < 3 if cut else loss < 0.7, out


def test_recall_goes_on_bit_for_bit(whole, tmp_path):
    """G1, as for text."""
    flags = "--task", "recall", "--no-keep-attention", "--checkpoint", 2
    check_resumed(2, whole(2, *flags), tmp_path)
