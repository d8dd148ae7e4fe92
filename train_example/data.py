"""Byte-level tokens of a real text: memory-mapped files, a fixed held-out tail, sequences in an order that depends on the seed alone.

A token is a byte (0..255); 256 ends a file. Sequence number n of a run is a function of (text, seq_len, seed, n): which process reads it,
and whether the run was interrupted, changes nothing. The labels are already shifted: labels[t] is the token after input_ids[t].
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train_example.run_config import ConfigError

END_OF_FILE = 256
IGNORE = -100


class Text:
    """One or more memory-mapped files, read as a single array of tokens in which each file ends with END_OF_FILE."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.bytes = [np.memmap(file, dtype=np.uint8, mode="r") for file in files]
        self.starts = np.concatenate([[0], np.cumsum([len(data) + 1 for data in self.bytes])])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start + count as int64; both ends must lie in the text."""
        out = np.empty(count, dtype=np.int64)
        done, file = 0, int(np.searchsorted(self.starts, start, side="right")) - 1
        while done < count:
            data, offset = self.bytes[file], start + done - int(self.starts[file])
            part = data[offset : offset + count - done]
            out[done : done + len(part)] = part
            done += len(part)
            if done < count:
                out[done] = END_OF_FILE
                done += 1
            file += 1
        return out

    def fingerprint(self) -> str:
        """sha256 over all bytes: two runs compare only on the same text, and the text that ships with Python changes with its version."""
        digest = hashlib.sha256()
        for data in self.bytes:
            digest.update(data)
            digest.update(b"\0end of file\0")
        return digest.hexdigest()


def write_default_text(path: Path) -> None:
    """Write the text used without `data`: the language reference that pydoc ships, about 370 kB of English prose with code in it.

    Paragraphs that occur more than once (the reference repeats whole topics) are kept once, or the held-out tail would be known already.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python comes without pydoc_data, the default text; name one with --data PATH") from error
    paragraphs = dict.fromkeys(part for name in sorted(topics) for part in topics[name].strip().split("\n\n"))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    temporary.replace(path)  # a run that is killed here leaves no half of it for the next one


def find_files(data: str) -> list[Path]:
    """The file, or all files below the folder in the order of their names (hidden and empty ones left out)."""
    path = Path(data)
    if not path.exists():
        raise ConfigError(f"data {data} does not exist")
    if path.is_file():
        if path.stat().st_size == 0:
            raise ConfigError(f"data file {data} is empty")
        return [path]
    shown = [file for file in sorted(path.rglob("*")) if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    found = [file for file in shown if file.is_file() and file.stat().st_size > 0]
    if not found:
        raise ConfigError(f"data folder {data} holds no file with anything in it")
    return found


class Dataset:
    """Training sequences and held-out sequences of a text.

    Args:
        text: the tokens.
        seq_len: tokens a sequence.
        eval_fraction: share at the end of the text that is held out; the training part never reaches into it.
        seed: of the order of the training sequences.
    """

    def __init__(self, text: Text, seq_len: int, eval_fraction: float, seed: int) -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        held_out = math.ceil(len(text) * eval_fraction)
        self.train_tokens = len(text) - held_out
        # a sequence needs one token more than it is long, for the last label
        self.windows = (self.train_tokens - 1) // seq_len
        if self.windows > 1:
            self.windows -= 1  # room to shift the windows from epoch to epoch
        if self.windows < 1:
            raise ConfigError(
                f"the training part of the text has {self.train_tokens} tokens of {len(text)} (eval_fraction {eval_fraction}), "
                f"too short for one sequence of seq_len {seq_len} + 1"
            )
        if held_out in (1, 2):  # the first token has no prediction, the last one is the end of a file: not a byte would count
            raise ConfigError(f"the held-out part of the text has {held_out} tokens (eval_fraction {eval_fraction}): too short; raise it, or take 0")
        self._epoch, self._order, self._shift = -1, np.empty(0, dtype=np.int64), 0

    def sequence(self, number: int) -> np.ndarray:
        """seq_len + 1 tokens of training sequence `number`; each epoch shuffles the windows anew and shifts all of them."""
        epoch, index = divmod(number, self.windows)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._shift = int(generator.integers(self.train_tokens - self.windows * self.seq_len))
            self._order, self._epoch = generator.permutation(self.windows), epoch
        return self.text.read(self._shift + int(self._order[index]) * self.seq_len, self.seq_len + 1)

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Sequences first .. first + count: input_ids and labels, [count, seq_len] int64 on the CPU."""
        tokens = torch.from_numpy(np.stack([self.sequence(first + i) for i in range(count)]))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def held_out(self, rank: int, world: int, batch: int, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the held-out sequences, in batches: input_ids and labels, [batch, seq_len] int64.

        Every rank yields the same number of batches (a sharded model needs all ranks in every forward pass); where a rank has nothing
        left, and behind the end of the text, labels are IGNORE.
        """
        start, total = self.train_tokens, len(self.text) - self.train_tokens - 1
        windows = math.ceil(total / self.seq_len) if limit == -1 else min(limit, math.ceil(total / self.seq_len))
        for first in range(0, windows, batch * world):
            inputs = torch.zeros(batch, self.seq_len, dtype=torch.int64)
            labels = torch.full_like(inputs, IGNORE)
            for row in range(batch):
                window = first + rank * batch + row
                if window < windows:
                    offset = window * self.seq_len
                    tokens = torch.from_numpy(self.text.read(start + offset, min(self.seq_len, total - offset) + 1))
                    inputs[row, : len(tokens) - 1] = tokens[:-1]
                    labels[row, : len(tokens) - 1] = tokens[1:]
            yield inputs, labels
