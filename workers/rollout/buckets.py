"""Weights on their way to a rollout in other processes: cut into buckets there, one stream again here."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

Bucket = list[tuple[str, np.ndarray]]  # whole tensors by name, in host memory


def in_buckets(weights: Iterable[tuple[str, Tensor]], *, max_bytes: int, keep: bool) -> Iterator[Bucket]:
    """The weights in buckets of at most `max_bytes`, a tensor that is larger in one of its own.

    Without `keep` the buckets are empty, of the same number: drawing the weights is a collective of ranks, and one of
    them is enough to hold what all have drawn.
    """
    bucket: Bucket = []
    count = size = 0
    for name, value in weights:
        if count and size + value.nbytes > max_bytes:
            yield bucket
            bucket, count, size = [], 0, 0
        count, size = count + 1, size + value.nbytes
        if keep:
            bucket.append((name, value.cpu().numpy()))
    if count:
        yield bucket


class WeightInbox:
    """Lets a function that reads one stream of weights run while calls bring them bucket by bucket.

    At most one bucket waits while another is read.
    """

    def __init__(self, load: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        self._waiting: queue.Queue[Bucket | None] = queue.Queue(maxsize=1)
        self._loaded: Future[None] = Future()
        threading.Thread(target=self._run, args=(load,), daemon=True).start()

    def put(self, bucket: Bucket | None) -> None:
        """Hand over a bucket, or None after the last, once there is room.

        Raises:
            Exception: as the function that reads raised it.
        """
        while True:
            if self._loaded.done():
                self._loaded.result()
                raise RuntimeError("the back end stopped reading before the last weight")
            try:
                return self._waiting.put(bucket, timeout=0.1)
            except queue.Full:
                continue

    def close(self) -> None:
        """Say that it was the last, and wait until all is read.

        Raises:
            Exception: as the function that reads raised it.
        """
        self.put(None)
        self._loaded.result()

    def _run(self, load: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        try:
            load(self._stream())
            self._loaded.set_result(None)
        except BaseException as error:
            self._loaded.set_exception(error)

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._waiting.get()) is not None:
            for name, value in bucket:
                yield name, torch.tensor(value)  # a copy: what lies in the object store cannot be written
