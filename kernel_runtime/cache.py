"""Triton's cache folder: where it is, whether it can be written, locks, and the state of an entry. Does not import Triton.

Triton itself writes every file atomically, but it takes no lock (N processes compile the same kernel N times), it trusts what it finds
(a truncated file is an exception at launch), and it stores absolute paths (a folder that was moved is not used). This module adds the
locks, the checks and the repair.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKSUMS = "checksums.json"
LOCKS = ".locks"
PROBE_BYTES = 1 << 20
OLD_TEMPORARY_SECONDS = 3600.0
ELF_NOBITS = 8  # a section that takes no room in the file
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # another folder may help
_NO_LOCKS_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def default_folder() -> Path:
    """The folder that Triton uses: TRITON_CACHE_DIR, else .triton/cache under TRITON_HOME or the home folder."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def use_folder(folder: Path) -> None:
    """Makes Triton use `folder` in this process and in its children."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def why_not_writable(folder: Path) -> str:
    """Empty if `folder` can take a kernel, else the reason in words. A probe file is written, as rights and space both matter."""
    probe = folder / f".probe-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(probe, "wb") as f:
            f.write(b"\0" * PROBE_BYTES)
            f.flush()
            os.fsync(f.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{folder} is {'full' if full else 'not writable'}: {error.strerror or error}"
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""


def fallback_folder(folder: Path) -> tuple[Path | None, str]:
    """A private folder of this node that stands in for `folder`, the same for all processes of the user; None with the reason if none."""
    name = f"triton-cache-{os.getuid()}-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    reasons = []
    for base in dict.fromkeys((tempfile.gettempdir(), "/dev/shm")):
        path = Path(base) / name
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
            continue
        owner = path.stat()
        if owner.st_uid != os.getuid() or owner.st_mode & 0o022 or path.is_symlink():
            reasons.append(f"{path} belongs to someone else or is open to others")
        elif reason := why_not_writable(path):
            reasons.append(reason)
        else:
            return path, ""
    return None, "; ".join(reasons)


class LockTimeout(TimeoutError):
    """Another live process held a lock for longer than allowed."""


class Lock:
    """An exclusive lock by name in a cache folder. The kernel drops it when its holder dies, so a killed compiler leaves no stale lock.

    `warning` says why there is no lock where the file system has none; work then goes on without it, at worst done twice.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / LOCKS / name
        self.warning = ""
        self._file: int | None = None

    def try_acquire(self) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self.warning = f"no lock in {self.path.parent}: {error.strerror}"
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in _NO_LOCKS_HERE:
                self.warning = f"the file system of {self.path.parent} has no locks: {error.strerror}"
                return True
            return False
        with contextlib.suppress(OSError):  # a full disk must not prevent the lock; the text is for people
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = handle
        return True

    def acquire(self, timeout: float) -> None:
        """Waits; LockTimeout that names the holder after `timeout` seconds."""
        end = time.monotonic() + timeout
        pause = 0.005
        while not self.try_acquire():
            if time.monotonic() > end:
                raise LockTimeout(f"lock {self.path} is held by process {self.holder()} for more than {timeout:.0f} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def holder(self) -> str:
        try:
            return self.path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextlib.contextmanager
def locked(folder: Path, name: str, timeout: float) -> Iterator[Lock]:
    """Holds the lock `name` of `folder` inside the block."""
    lock = Lock(folder, name)
    lock.acquire(timeout)
    try:
        yield lock
    finally:
        lock.release()


@dataclass(frozen=True)
class EntryState:
    """state: "ok", "missing", "moved" (whole, but stored paths lead elsewhere) or "corrupt" with the reason. bytes of the binary."""

    state: str
    reason: str = ""
    bytes: int = 0


def entry_folder(folder: Path, key: str) -> Path:
    """Where Triton keeps the entry of a hexadecimal key."""
    return folder / base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


def inspect(folder: Path, key: str, kernel: str, extension: str) -> EntryState:
    """State of the entry `key` of a kernel whose binary is `<kernel>.<extension>`, without loading it."""
    entry = entry_folder(folder, key)
    name = kernel[:150]
    group, metadata, binary = entry / f"__grp__{name}.json", entry / f"{name}.json", entry / f"{name}.{extension}"
    if not group.exists():
        return EntryState("missing")
    try:
        children = json.loads(group.read_text())["child_paths"]
        recorded = json.loads(metadata.read_text())["hash"]
        data = binary.read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        return EntryState("corrupt", f"{entry.name}: {type(error).__name__}: {error}")
    if recorded != key:
        return EntryState("corrupt", f"{metadata} belongs to key {recorded[:16]}")
    if reason := binary_damage(data):
        return EntryState("corrupt", f"{binary}: {reason}")
    for child in children:
        if not (entry / child).exists():
            return EntryState("corrupt", f"{entry / child} is gone")
    if reason := _checksum_damage(entry):
        return EntryState("corrupt", reason)
    moved = any(Path(path).parent != entry for path in children.values())
    return EntryState("moved" if moved else "ok", bytes=len(data))


def binary_damage(data: bytes) -> str:
    """Device binaries and C modules are ELF files: the headers tell how long one must be. Empty if nothing shows."""
    if len(data) < 64:
        return f"{len(data)} bytes are no binary"
    if data[:4] != b"\x7fELF" or data[4] != 2:
        return "no 64-bit ELF file"
    offset, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    programs, program_size, program_count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    end = max(offset + size * count, programs + program_size * program_count)
    if end <= len(data):
        for header in range(offset, offset + size * count, size or 1):
            kind, start, length = struct.unpack_from("<I", data, header + 4)[0], *struct.unpack_from("<QQ", data, header + 24)
            end = max(end, 0 if kind == ELF_NOBITS else start + length)
    return "truncated" if end > len(data) else ""


def _checksum_damage(entry: Path) -> str:
    path = entry / CHECKSUMS
    if not path.exists():
        return ""
    try:
        expected = json.loads(path.read_text())
    except (OSError, ValueError):
        return f"{path} cannot be read"
    for name, digest in expected.items():
        with contextlib.suppress(OSError):
            if hashlib.sha256((entry / name).read_bytes()).hexdigest() == digest:
                continue
        return f"{entry / name} differs from what was written"
    return ""


def seal(folder: Path, key: str) -> None:
    """Writes the checksums of a fresh entry, so that later damage shows."""
    entry = entry_folder(folder, key)
    files = [p for p in entry.iterdir() if p.is_file() and p.name != CHECKSUMS and not p.name.startswith("__grp__")]
    write_text(entry / CHECKSUMS, json.dumps({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}))


def discard(folder: Path, key: str) -> None:
    """Removes an entry; renamed first, so that no reader meets half of it."""
    entry = entry_folder(folder, key)
    if entry.exists():
        away = entry.with_name(f".bad-{entry.name}-{uuid.uuid4().hex[:8]}")
        entry.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def adopt(folder: Path, key: str, kernel: str) -> None:
    """Rewrites the absolute paths of an entry whose folder was moved or mounted elsewhere."""
    entry = entry_folder(folder, key)
    group = entry / f"__grp__{kernel[:150]}.json"
    children = json.loads(group.read_text())["child_paths"]
    write_text(group, json.dumps({"child_paths": {name: str(entry / name) for name in children}}))


def copy_entry(source: Path, destination: Path, name: str) -> None:
    """Copies the entry folder `name`; the last step is a rename, so that it is there whole or not at all."""
    if (destination / name).exists():
        return
    temporary = destination / f".copy-{uuid.uuid4().hex}"
    shutil.copytree(source / name, temporary)
    try:
        temporary.rename(destination / name)
    except OSError:  # another process was first
        shutil.rmtree(temporary, ignore_errors=True)


def sweep(folder: Path, key: str) -> None:
    """Removes what killed compilers left in an entry; recent leftovers may belong to a live process and stay."""
    for path in entry_folder(folder, key).glob("tmp.pid_*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > OLD_TEMPORARY_SECONDS:
                shutil.rmtree(path)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, for whoever reads meanwhile."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
