"""What a measurement must say about itself: machine, versions, command, date."""

from __future__ import annotations

import ctypes
import datetime
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch


def processor() -> str:
    """The processor's name and the number of cores torch uses."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def provenance(device: str = "cpu", arguments: list[str] | None = None) -> str:
    """One line to put over a table; arguments: those worth saying, where not all of the command's are."""
    where = torch.cuda.get_device_name() if device == "cuda" else processor()
    said = sys.argv[1:] if arguments is None else arguments
    command = f"python {' '.join(['benchmarks/' + Path(sys.argv[0]).name, *said])}"
    return (
        f"{where}; Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}; "
        f"`{command}`; {datetime.date.today().isoformat()}"
    )


def devices(wanted: str | None) -> list[str]:
    """The named device, or all there are."""
    return [wanted] if wanted else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def best_time(work: Callable[[], object], device: str = "cpu", budget: float = 1.0, least: int = 3) -> float:
    """Shortest of several runs after one to warm up, in seconds: the one that other processes disturbed least."""
    start = perf_counter()
    work()
    wait(device)
    first = perf_counter() - start
    if first > budget * 10:
        return first
    times = []
    while len(times) < least or (sum(times) < budget and len(times) < 200):
        start = perf_counter()
        work()
        wait(device)
        times.append(perf_counter() - start)
    return min(times)


def peak_extra(work: Callable[[], object], device: str = "cpu") -> float:
    """Bytes in use at the worst moment of the work beyond those in use before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return float(torch.cuda.max_memory_allocated() - before)
    work()  # libraries allocate their own buffers at first use
    ctypes.CDLL(None).malloc_trim(0)  # hand freed memory back, or it would hide what the work takes
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    work()
    return max(0.0, _status("VmHWM") - before)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * float(next(line for line in lines if line.startswith(field)).split()[1])
