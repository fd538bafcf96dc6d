"""The order of examples: a permutation per epoch, found by index, split over processes, prefetched from any batch."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mupax.train.config.run import DataConfig
from mupax.train.data import interface
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError

pytestmark = pytest.mark.core

RECORDED = [87, 61, 50, 7, 70, 72, 24, 52]
RECORDED_NUMBER = 0.5277151128372816


class Numbers(Data):
    """Examples 0 to size - 1; an image is its own index."""

    kind = "images"

    def __init__(
        self, size: int, batch_size: int, seed: int, eval_batch_size: int | None = None
    ) -> None:
        super().__init__(
            DataConfig(name="numbers", batch_size=batch_size, eval_batch_size=eval_batch_size),
            facts={"digest": "0"},
            train_size=size,
            eval_size=size,
        )
        self._shuffle = interface.Shuffle(size, seed)
        self.made_by: set[str] = set()

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        self.made_by.add(threading.current_thread().name)
        return {"inputs": self._shuffle(interface.batch_indices(k, self.batch_size, rows))[1]}

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        return {"inputs": np.array(interface.batch_indices(j, self.eval_batch_size, rows))}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 101])
def test_an_epoch_is_a_permutation(size: int) -> None:
    shuffle = interface.Shuffle(size, seed=5)
    for epoch in range(3):
        epochs, positions = shuffle(range(epoch * size, (epoch + 1) * size))
        assert set(epochs) == {epoch}
        assert sorted(positions) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(interface.Shuffle(101, seed)(range(epoch * 101, (epoch + 1) * 101))[1])
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16  # run 1 does not begin with the second epoch of run 0
    assert tuple(range(101)) not in orders


def test_order_is_the_recorded_one() -> None:
    """A library that changes its shuffle would silently change every resumed run."""
    assert interface.Shuffle(101, seed=0)(range(8))[1].tolist() == RECORDED
    assert interface.rng(0, interface.AUGMENTATION, 3).random() == pytest.approx(
        RECORDED_NUMBER, abs=1e-15
    )


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_rows_of_processes_make_the_batch(processes: int) -> None:
    data = Numbers(29, batch_size=8, seed=1)
    share = 8 // processes
    for k in (0, 3, 1000):
        parts = [
            data.train_batch(k, slice(p * share, (p + 1) * share))["inputs"]
            for p in range(processes)
        ]
        assert np.array_equal(np.concatenate(parts), data.train_batch(k)["inputs"])


def test_iterator_starts_anywhere() -> None:
    whole, later = (
        Numbers(29, batch_size=5, seed=1).train_batches(0),
        Numbers(29, batch_size=5, seed=1).train_batches(6),
    )
    batches = [next(whole)["inputs"].tolist() for _ in range(11)]
    assert [next(later)["inputs"].tolist() for _ in range(5)] == batches[6:]
    assert batches[6] != batches[0]
    whole.close()
    later.close()


def test_batches_are_made_by_threads_that_end() -> None:
    data = Numbers(29, batch_size=5, seed=1)
    before = set(threading.enumerate())
    iterator = data.train_batches(0)
    next(iterator)
    assert threading.current_thread().name not in data.made_by
    iterator.close()
    for thread in set(threading.enumerate()) - before:  # those that have made no batch yet, too
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


def test_error_in_a_thread_reaches_the_loop() -> None:
    class Broken(Numbers):
        def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
            raise DataError("gone")

    with pytest.raises(DataError, match="gone"):
        next(Broken(29, batch_size=5, seed=1).train_batches(0))


def test_evaluation_ends_after_the_last_example() -> None:
    data = Numbers(11, batch_size=7, seed=1, eval_batch_size=4)
    assert [batch["inputs"].tolist() for batch in data.eval_batches()] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
