"""What guards checkpoints: one job a folder, a disk that has room for them, checksums of them and
of the data."""
import hashlib
import shutil
import zlib

import numpy as np
import torch

from extras.plan import parameters
from upipe import BadInput, refuse


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
    refuse(need > free, f"--save {folder}: {need:,} bytes are needed for --keep {settings.keep} "
           f"checkpoints and a new one, {free:,} are free")


def checksum(path):
    """CRC-32 of a file. Measured: 0.4 s of a core per GiB, where it takes 3 s to write a checkpoint
    and 1 s to load it."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
    return crc


def verify(job, saved):
    """Compare checksums, each rank's of its share of the files. BadInput for one that differs."""
    for name, (_, crc) in sorted(saved["files"].items())[job.rank::job.world]:
        refuse(crc is not None and checksum(saved["path"] / name) != crc,
               f"{name} is not what was written")


def fingerprint(tokens):
    """A text that differs for other tokens: of where files begin, and of 64 short windows. To read
    it all would cost hours; up to 256k tokens, this is all."""
    n, found = len(tokens), hashlib.sha256(repr(tokens.begins).encode())
    size = min(n, 4096)
    for start in np.linspace(0, n - size, 64, dtype=int).tolist():
        found.update(tokens.read(start, start + size).tobytes())
    return f"{n} tokens, {found.hexdigest()[:16]}"
