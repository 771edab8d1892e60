"""What guards a folder of checkpoints: one job at a time, and a disk that has room for them."""
import shutil

import torch

from extras.plan import parameters
from upipe import BadInput


def lock(folder):
    """Make a folder this job's own -> the lock. It ends with the process, however that ends."""
    held = open(folder / ".lock", "a")
    try:
        import fcntl
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"--save {folder}: another job saves there now: give another folder")
    except (ImportError, OSError) as error:  # Windows; some network disks
        print(f"notice    {folder} cannot be locked ({error}): see that no other job saves there")
    return held


def need_space(settings, folder, checkpoints):
    """BadInput if the disk has no room for so many: weights and two moments each. The headers of
    files (a kilobyte per tensor) do not count here."""
    one = 3 * parameters(settings) * max(4, getattr(torch, settings.dtype).itemsize)
    need, free = checkpoints * one, shutil.disk_usage(folder).free
    if need > free:
        raise BadInput(f"--save {folder}: {need:,} bytes are needed for --keep {settings.keep} "
                       f"checkpoints and a new one, {free:,} are free")
