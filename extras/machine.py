"""What this process may use of the machine: the job's share of memory and cores, not the host's."""
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from extras import GIB


class Machine(NamedTuple):
    card: float  # bytes of a GPU; on a CPU, of a rank's part of the memory
    host: float  # bytes of a host
    ranks: int   # of this job that share a host


def find_machine(flags, local_rank):
    """The memory of this machine, or of the one that --dry-run is to think of."""
    cuda, dry = flags["device"] == "cuda", flags["dry_run"]
    ranks = min(flags["world"], flags["gpus_per_node"])
    host = flags["host_mem"] or (2000 if cuda and dry else memory_here() / GIB)
    card = host / ranks
    if cuda:
        card = 80 if dry else torch.cuda.get_device_properties(local_rank).total_memory / GIB
    return Machine((flags["gpu_mem"] or card) * GIB, host * GIB, ranks)


def cgroup_files(kind, name, root="/"):
    """The words of each file `name` in the cgroups (v1 and v2, kind "memory" or "cpu") that this
    process is in. Where there are none, as outside of Linux, there are no words."""
    groups, root = Path(root, "proc/self/cgroup"), Path(root, "sys/fs/cgroup")
    files = []
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, kinds, path = line.split(":", 2)
        if not kinds or kind in kinds.split(","):  # v2 has one tree, v1 one for each kind
            here = root / (kind if kinds else "") / path.lstrip("/")
            files += [folder / name for folder in (here, *here.parents)]
    return [file.read_text().split() for file in files if file.exists()]


def memory_here(root="/"):
    """Bytes that this machine has, or fewer, if a container may use fewer; inf if unknown."""
    limits = [math.inf]
    with suppress(AttributeError, ValueError):  # Windows has no sysconf, others not this name
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("memory.max", "memory.limit_in_bytes"):
        limits += [int(size) for size, in cgroup_files("memory", name, root) if size != "max"]
    return min(limits)


def cores_here(root="/"):
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    limits = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    quotas = cgroup_files("cpu", "cpu.max", root) + [  # v2: quota and period; v1: a file each
        quota + period for quota, period in zip(cgroup_files("cpu", "cpu.cfs_quota_us", root),
                                                cgroup_files("cpu", "cpu.cfs_period_us", root))]
    limits += [int(quota) // int(period) for quota, period in quotas if quota not in ("max", "-1")]
    return max(1, min(limits))


def threads_here(local_world, root="/"):
    """Threads of one of the ranks on this machine: several on one core slow all of them down."""
    threads, cores = torch.get_num_threads(), cores_here(root)
    if "OMP_NUM_THREADS" in os.environ and threads > 1:
        return threads  # asked for: what torchrun itself says is 1
    return max(1, cores // local_world) if local_world > 1 else min(threads, cores)
