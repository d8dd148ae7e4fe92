"""The recall of train_example.recall on cases worked out by hand."""

import dataclasses
import math

import pytest
import torch

from train_example.config import TINY
from train_example.data import IGNORE
from train_example.model import DeepSeekV4
from train_example.recall import attention_mass, indexer_recall, main, recall_of


def test_recall_by_hand():
    """Ratio 2, two selected of up to four entries: queries 5 to 7 choose among 3, 3 and 4; the others have no choice."""
    mass = torch.zeros(1, 8, 4)
    mass[0, 5:] = torch.tensor([[0.1, 0.5, 0.2, 0.9], [0.3, 0.2, 0.1, 0.9], [0.1, 0.2, 0.3, 0.4]])  # entry 3 is not yet visible to 5 and 6
    indices = torch.tensor([[-1, -1]] * 5 + [[2, 1], [2, 1], [0, 1]], dtype=torch.int32)[None]
    recall, chance = recall_of(mass, indices, ratio=2)
    assert recall[0, :5].isnan().all() and recall[0, 5:].tolist() == [1.0, 0.5, 0.0]
    torch.testing.assert_close(chance[0, 5:], torch.tensor([2 / 3, 2 / 3, 0.5]))


def test_attention_mass_by_hand():
    """One head, window 1, no sink: the mass of an entry is its share of a softmax over the entry and the query's own key."""
    q, kv = torch.ones(1, 4, 1, 16), torch.zeros(1, 4, 16)
    entries = torch.stack([torch.full((16,), 0.5), torch.full((16,), 1.0)])[None]
    mass = attention_mass(q, kv, entries, torch.tensor([-math.inf]), window=1, ratio=2)
    one, two = math.exp(2.0), math.exp(4.0)  # 16 * 0.5 / sqrt(16), 16 / sqrt(16); the own key has logit 0
    want = [[0, 0], [one / (one + 1), 0], [one / (one + 1), 0], [one / (one + two + 1), two / (one + two + 1)]]
    torch.testing.assert_close(mass, torch.tensor(want)[None])


def test_recall_of_a_model():
    """An indexer that selects by the attention's own mass would have recall 1; positions without a label and short sequences do not count."""
    config = dataclasses.replace(TINY, compress_ratios=(4,), num_layers=1, index_topk=3)
    torch.manual_seed(0)
    model = DeepSeekV4(config)
    ids = torch.randint(256, (2, 40))
    recall, chance = indexer_recall(model, [(ids, ids)])
    assert 0 < recall < 1 and 3 / 10 < chance < 3 / 4
    labels = ids.clone()
    labels[:, 20:] = IGNORE  # leaves queries 15 to 19: 4, 4, 4, 4 and 5 entries
    assert indexer_recall(model, [(ids, labels)])[1] == pytest.approx((4 * 3 / 4 + 3 / 5) / 5)
    assert model.training
    with pytest.raises(ValueError, match="no query has more entries"):
        indexer_recall(model, [(ids[:, :12], ids[:, :12])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "error: data nowhere does not exist"),
        (["--steps", "0"], "error: steps must be a number above 0"),
        (["--seq-len", "8", "--batch", "1", "--eval-sequences", "1"], "error: no query has more entries than index_topk"),
        (["--every", "0"], "--every: 1 or more, got 0"),
        (["--coefficients", "1", "-1"], "--coefficients: numbers of 0 or more"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(tmp_path, capsys, arguments, message):
    try:
        status = main([*arguments, "--device", "cpu", "--out", str(tmp_path)])
    except SystemExit as stop:  # argparse
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not torch.distributed.is_initialized()
