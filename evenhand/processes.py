"""Work side by side on this machine, in processes of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from threading import Thread
from typing import Any, TypeVar

import torch

from evenhand.checks import EvenhandError

Task = TypeVar("Task")
Found = TypeVar("Found")


def threads_each(workers: int) -> int:
    """Cores that each of some processes may use, so that they do not stand in each other's way."""
    return max(1, (os.cpu_count() or 1) // workers)


def side_by_side(work: Callable[[Task], Found], tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Found]]:
    """Each task with what `work` makes of it, as they come to their end; begun in the order given."""
    workers, others = min(jobs, len(tasks)), multiprocessing.active_children()
    with pool_of(workers) as pool:
        waiting: dict[Future[Found], Task] = {pool.submit(work, task): task for task in tasks}
        try:
            for finished in as_completed(waiting):
                yield waiting[finished], finished.result()
        except BrokenProcessPool as error:
            raise EvenhandError(
                f"one of {workers} processes died in the middle of its work, most likely for want of memory; run fewer "
                "at a time (--jobs). In a script, what starts them must stand under: if __name__ == '__main__':"
            ) from error
        except BaseException:  # Ctrl-C, an error in one of them, or nobody wants the rest: the others need not go on
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            raise


def pool_of(workers: int) -> ProcessPoolExecutor:
    """Processes that share out the cores.

    Where the system can, they are forks of one that has loaded torch and done nothing yet; this one cannot be forked
    once it has used a GPU. Elsewhere each starts from nothing.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(["evenhand.running"])
        apart: Any = multiprocessing.get_context("forkserver")
    else:
        apart = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, apart, _as_worker, (threads_each(workers), dict(os.environ)))


def _as_worker(threads: int, environment: Mapping[str, str]) -> None:
    """A process of its own, which does not outlive the one that began it, and leaves Ctrl-C to that one."""
    os.environ.clear()  # a fork has that of the time when the first one was begun
    os.environ.update(environment)
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
