"""The text and its order, the metrics file, and the comparison of runs."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

from train_example import compare, metrics
from train_example.config import FLASH, TINY
from train_example.data import END_OF_FILE, IGNORE, Dataset, Text, find_files, write_default_text
from train_example.optim import learning_rate
from train_example.run_config import RunConfig


@pytest.fixture
def text(tmp_path):
    """Three files, one of them below a folder, and things that are left out: 30 + 1, 5 + 1, 64 + 1 tokens in the order of the names."""
    (tmp_path / "a.txt").write_bytes(bytes(range(30)))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes(bytes(range(100, 105)))
    (tmp_path / "c.txt").write_bytes(bytes(range(128, 192)))
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_bytes(b"hidden")
    return Text(find_files(str(tmp_path)))


ALL = [*range(30), END_OF_FILE, *range(100, 105), END_OF_FILE, *range(128, 192), END_OF_FILE]


def test_reading_across_files(text):
    assert len(text) == len(ALL) == 102
    for start in range(len(ALL)):
        for count in (1, 2, 7, len(ALL) - start):
            if start + count <= len(ALL):
                assert text.read(start, count).tolist() == ALL[start : start + count]
    assert isinstance(text.bytes[0], np.memmap)


def test_labels_are_the_next_tokens_and_stay_out_of_the_held_out_part(text):
    dataset = Dataset(text, seq_len=8, eval_fraction=0.25, seed=3)
    ids, labels = dataset.batch(0, 5 * dataset.windows)
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    held_out = set(ALL[dataset.train_tokens : -1])
    assert len(held_out) == 25
    assert not held_out & set(ids.flatten().tolist())
    assert not held_out & set(labels.flatten().tolist())


def test_an_epoch_reads_every_window_once_and_the_next_one_differs(text):
    dataset = Dataset(text, seq_len=8, eval_fraction=0.25, seed=3)
    epochs = [[tuple(dataset.sequence(e * dataset.windows + i)) for i in range(dataset.windows)] for e in range(2)]
    for epoch in epochs:
        assert len(set(epoch)) == dataset.windows
    assert epochs[0] != epochs[1]


def test_order_depends_on_seed_and_number_alone(text):
    one, two = (Dataset(text, 8, 0.25, seed=3) for _ in range(2))
    forward = [one.sequence(n).tolist() for n in range(20)]
    backward = [two.sequence(n).tolist() for n in reversed(range(20))]
    assert forward == backward[::-1]
    assert forward != [Dataset(text, 8, 0.25, seed=4).sequence(n).tolist() for n in range(20)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_held_out_text_is_read_once_by_all_ranks_together(text, world):
    dataset = Dataset(text, seq_len=8, eval_fraction=0.25, seed=3)
    by_rank = [list(dataset.held_out(rank, world, batch=2, limit=-1)) for rank in range(world)]
    assert len({len(batches) for batches in by_rank}) == 1, "a rank with fewer batches would leave the others waiting"
    labels = torch.cat([labels.flatten() for batches in by_rank for _, labels in batches])
    assert sorted(labels[labels != IGNORE].tolist()) == sorted(ALL[dataset.train_tokens + 1 :])
    for batches in by_rank:
        for ids, labels in batches:
            assert ((labels[:, :-1] == IGNORE) | (ids[:, 1:] == labels[:, :-1]) | (labels[:, 1:] == IGNORE)).all()


def test_limit_of_held_out_sequences(text):
    dataset = Dataset(text, seq_len=8, eval_fraction=0.25, seed=3)
    labels = torch.cat([labels for rank in range(2) for _, labels in dataset.held_out(rank, 2, 1, limit=3)])
    assert int((labels != IGNORE).sum()) == 24


def test_default_text_is_english_and_repeats_nothing(tmp_path):
    write_default_text(tmp_path / "text.txt")
    content = (tmp_path / "text.txt").read_text()
    assert len(content) > 200_000
    assert " the " in content
    paragraphs = content.strip().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    values = np.bincount(np.frombuffer(content.encode(), dtype=np.uint8)) / len(content.encode())
    entropy = -sum(p * math.log2(p) for p in values if p)
    assert 4.0 < entropy < 5.2, "unigram entropy of English bytes"


def test_learning_rate_schedule():
    config = RunConfig(lr=1.0, min_lr=0.1, warmup_steps=4, steps=12)
    rates = [learning_rate(config, step) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))


def test_flops_count_against_the_published_size():
    """Flash has 13 B activated parameters; 6 FLOPs each, the MTP block and attention over window + top-k come on top."""
    flops = metrics.flops_per_token(FLASH, 4096)
    assert 6 * 12e9 < flops < 6 * 22e9
    assert metrics.flops_per_token(TINY, 256) > metrics.flops_per_token(TINY, 32)


def test_peak_is_unknown_on_a_cpu_unless_given():
    assert metrics.peak_flops(torch.device("cpu"), "bf16", -1) is None
    assert metrics.peak_flops(torch.device("cpu"), "bf16", 2.5) == 2.5e12


# ---- metrics.jsonl and compare ------------------------------------------------------------------------------------------------


def write_run(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def row(step, loss, **more):
    return {"step": step, "loss": loss, "lm_loss": loss / 2, "kl_loss": 0.0, "mtp_loss": 0.1, "grad_norm": 1.0, **more}


def test_compare_finds_the_largest_difference(tmp_path, capsys):
    a = write_run(tmp_path / "a", [row(1, 4.0), row(2, 2.0), {"step": 2, "eval_bpb": 3.0}, row(3, 1.0)])
    b = write_run(tmp_path / "b", [row(1, 4.0), row(2, 2.001), {"step": 2, "eval_bpb": 3.3}])
    found = compare.compare(a, b)
    assert found["loss"] == [(1, 0.0), (2, pytest.approx(0.001 / 2.001))]
    assert found["eval_bpb"] == [(2, pytest.approx(0.3 / 3.3))]
    assert compare.main([str(a), str(b)]) == 0
    assert compare.main([str(a), str(b), "--tolerance", "1e-4"]) == 1
    assert compare.main([str(a), str(b), "--keys", "loss", "eval_bpb", "--steps"]) == 1
    assert "at step 2 (2 compared)" in capsys.readouterr().out


def test_compare_does_not_pass_nan(tmp_path):
    a, b = (write_run(tmp_path / name, [row(1, value)]) for name, value in (("a", 1.0), ("b", math.nan)))
    assert compare.main([str(a), str(b)]) == 1
    assert compare.main([str(b), str(b)]) == 1, "a NaN equals nothing"


def test_compare_refuses_what_it_cannot_compare(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, [row(step, 1.0)]) for name, step in (("a", 1), ("b", 2)))
    assert compare.main([str(a), str(b)]) == 2
    assert "no step in common" in capsys.readouterr().err
    assert compare.main([str(a), str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_metrics_behind_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row(step, 1.0, ms=1.0)) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "lo')
    log = metrics.MetricsLog(tmp_path, total=6, start=3)
    log.row(row(4, 2.0, ms=1.0))
    log.close()
    assert [(r["step"], r["loss"]) for r in metrics.read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 1 is damaged"):
        metrics.read_metrics(path)


def test_every_epoch_shifts_its_windows(tmp_path):
    """A text in which a token is its own position: windows of an epoch lie side by side, and elsewhere than those of other epochs."""
    (tmp_path / "text").write_bytes(bytes(range(250)))
    data = Dataset(Text([tmp_path / "text"]), 20, 0.2, seed=0)
    shifts = set()
    for epoch in range(6):
        starts = sorted(int(data.sequence(epoch * data.windows + i)[0]) for i in range(data.windows))
        assert starts == [starts[0] + 20 * i for i in range(data.windows)] and starts[-1] + 20 < data.train_tokens
        shifts.add(starts[0])
    assert len(shifts) > 3
