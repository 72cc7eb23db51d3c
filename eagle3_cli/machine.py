"""The machine as its system tells it: processor, memory, limits of a container, large pages.

Each function asks one thing and says so plainly where the system does not tell.  The readers of Linux's files take the
text, so that they can be tested anywhere.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

MEMINFO, CPUINFO = Path("/proc/meminfo"), Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FILE_PAGES = ("active_file", "inactive_file")


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the system does not tell.  Within a container's limit, if there is one.

    available   what programs can still get, with what caches would give back
    """

    total: int | None = None
    available: int | None = None


def read(path: Path) -> str:
    """A file of the system; empty where there is none."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def processor() -> str:
    return processor_name(read(CPUINFO)) or platform.processor() or platform.machine()


def processor_name(cpuinfo: str) -> str:
    """Of /proc/cpuinfo; empty where it has none, as on ARM."""
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def allowed_cores() -> int:
    """Logical processors that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def quota() -> float | None:
    """Processors' worth of time that a container may use; None: no limit is known."""
    return quota_of(read(CGROUP / "cpu.max"))


def quota_of(cpu_max: str) -> float | None:
    """Of a cgroup's cpu.max: "200000 100000" is 2, "max 100000" is no limit."""
    most, _, period = cpu_max.strip().partition(" ")
    return int(most) / int(period) if most.isdigit() and period.isdigit() and int(period) else None


def load() -> float | None:
    """Processors in use, on average over the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def memory() -> Memory:
    limits = (read(CGROUP / name) for name in ("memory.max", "memory.current", "memory.stat"))
    return limited(memory_of(read(MEMINFO)), *limits)


def memory_of(meminfo: str) -> Memory:
    """Of /proc/meminfo, which counts kB; elsewhere what the C library knows."""
    values = {name: fields.split() for name, _, fields in (line.partition(":") for line in meminfo.splitlines())}
    sizes = {name: int(fields[0]) * 1024 for name, fields in values.items() if fields and fields[0].isdigit()}
    if "MemTotal" in sizes:
        return Memory(sizes["MemTotal"], sizes.get("MemAvailable"))
    try:
        return Memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return Memory()


def limited(found: Memory, most: str, used: str, stat: str) -> Memory:
    """The same within a cgroup: its memory.max, which may be "max", memory.current, and memory.stat, which says how
    much of that are pages of files, which are given back."""
    if not most.strip().isdigit():
        return found
    limit = int(most)
    files = sum(int(n) for name, _, n in (line.partition(" ") for line in stat.splitlines()) if name in _FILE_PAGES)
    left = max(limit - max(int(used) - files, 0), 0) if used.strip().isdigit() else limit
    total = limit if found.total is None else min(limit, found.total)
    return Memory(total, left if found.available is None else min(left, found.available))


def large_pages() -> str | None:
    """always, madvise or never; None where the system does not tell."""
    chosen = read(LARGE_PAGES).partition("[")[2].partition("]")[0]
    return chosen or None


def size(count: float) -> str:
    """Bytes in words, by thousands as files are: 1.25 GB, 14.8 MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def in_words(found: Memory) -> str:
    if found.total is None:
        return "unknown"
    return size(found.total) + (f", {size(found.available)} available" if found.available is not None else "")
