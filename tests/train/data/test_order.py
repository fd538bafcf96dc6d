"""The order of examples, a permutation per epoch that is found by index, and threads that prefetch."""

from __future__ import annotations

import threading

import pytest

from mupax.train.config.run import DataConfig
from mupax.train.data import interface
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError

pytestmark = pytest.mark.core

RECORDED = [87, 61, 50, 7, 70, 72, 24, 52]
RECORDED_NUMBER = 0.5277151128372816


class Threads(Data):
    """Empty batches that note the threads which make them."""

    kind = "images"

    def __init__(self) -> None:
        config = DataConfig(name="threads", batch_size=5)
        super().__init__(config, facts={}, train_size=29, eval_size=29)
        self.made_by: set[str] = set()

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        self.made_by.add(threading.current_thread().name)
        return {}

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        raise DataError("gone")


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


def test_batches_are_made_by_threads_that_end_and_a_long_run_has_batches() -> None:
    data = Threads()
    before = set(threading.enumerate())
    iterator = data.train_batches(10**9)
    next(iterator)
    assert threading.current_thread().name not in data.made_by
    iterator.close()
    for thread in set(threading.enumerate()) - before:  # those that have made no batch yet, too
        thread.join(timeout=10)
    assert set(threading.enumerate()) <= before


def test_error_in_a_thread_reaches_the_loop() -> None:
    with pytest.raises(DataError, match="gone"):
        next(Threads().eval_batches())
