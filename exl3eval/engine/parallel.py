"""Contexts in parallel: one core each, results in order.

On a CPU one thread per context beats splitting every product over cores, does not depend on what else the
machine does, and leaves the bits of a context independent of the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_contexts(work: Callable[[Item], Result], items: Iterable[Item], *, num_threads: int) -> Iterator[Result]:
    """Apply `work` to every item in `num_threads` threads, torch using one core in each; yield in order.

    The first failure is raised when its turn comes; work that has not started by then is dropped.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(max_workers=num_threads)
    try:
        for future in [pool.submit(work, item) for item in items]:
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)
