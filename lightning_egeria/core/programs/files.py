"""Reads, writes and locks files that other users or programs could have written. No other module opens such files.

A file that is read has a limit on its size, and is never a pipe, a device or a folder, which could hold up the reader
for ever. A file that is written is a new one: it takes the place of the old one whole, so no link leads the content to
another file. A file that is added to, changed in place or locked belongs to this user, and is no link.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError as error:  # Windows
    raise ImportError("lightning_egeria needs a POSIX system, such as Linux or macOS") from error

PRIVATE, PUBLIC = 0o600, 0o666  # modes of new files; the umask takes bits from the second one
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DIGITS = 19  # of the largest integer in a JSON text, as in 64 bits
_PASSING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE),
    *(errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT),
}


def open_file(path: Path, flags: int, links: bool = False, shared: bool = False) -> int:
    """Open an ordinary file, and return its descriptor. A new one is for its user alone.

    Args:
        path: of the file.
        flags: of `os.open`.
        links: whether a link may stand in its place.
        shared: whether it may be written although it belongs to another user.

    Raises:
        OSError: it cannot be opened, is no ordinary file, or would be written and belongs to another user.
    """
    follow = 0 if links else os.O_NOFOLLOW
    # Do not wait: opening a pipe waits until another process opens its other end.
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | follow, PRIVATE)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
        if flags & os.O_ACCMODE != os.O_RDONLY and not shared and status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    except OSError:
        os.close(file)
        raise
    return file


def reading(path: Path, links: bool = True) -> io.BufferedReader:
    """Open an ordinary file for reading in parts.

    Raises:
        OSError: as `open_file`.
    """
    return os.fdopen(open_file(path, os.O_RDONLY, links), "rb")


def read_at_most(path: Path, most: int, links: bool = True) -> bytes:
    """Return the content of an ordinary file.

    Raises:
        OSError: it cannot be read, is no ordinary file, or is larger than ``most`` bytes.
    """
    with reading(path, links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
        return file.read(size)  # so much memory is taken before anything is read


def read_text(path: Path, most: int, links: bool = True, errors: str = "strict") -> str:
    """Return the text of an ordinary file in UTF-8.

    Raises:
        OSError: as `read_at_most`.
        UnicodeDecodeError: it is no text; a ValueError.
    """
    return read_at_most(path, most, links).decode(errors=errors)


def read_json(path: Path, most: int, links: bool = True) -> Any:
    """Return the content of a JSON file, as `parsed_json`.

    Raises:
        OSError: as `read_at_most`.
        ValueError: as `parsed_json`.
    """
    return parsed_json(read_at_most(path, most, links))


def parsed_json(text: str | bytes) -> Any:
    """Return the content of a JSON text from elsewhere.

    Raises:
        ValueError: it is none, is nested too deep, or has an integer of more than 19 digits, which no float, time or
            column of a database holds.

    >>> parsed_json('{"steps": 1' + 400 * "0" + "}")
    Traceback (most recent call last):
    ...
    ValueError: an integer of 401 digits, expected at most 19
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _integer(text: str) -> int:
    if (digits := len(text.lstrip("-"))) > _DIGITS:
        raise ValueError(f"an integer of {digits} digits, expected at most {_DIGITS}")
    return int(text)


def write_whole(path: Path, content: str | bytes, mode: int = PUBLIC) -> None:
    """Replace a file: a reader sees the whole old or new one, and a full disk leaves the old one.

    A link in its place is replaced, and what it leads to stays.

    Args:
        path: of the file.
        content: of it; a text is written in UTF-8.
        mode: of the new file, less the bits of the umask.

    Raises:
        OSError: it cannot be written.
    """
    draft = _draft(path, content, mode)
    try:
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_once(path: Path, content: str | bytes) -> None:
    """Write a file for this user alone, unless another process was faster: then its content stays.

    Raises:
        OSError: it cannot be written.
    """
    draft = _draft(path, content, PRIVATE)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def is_draft_of(name: str, of: str) -> bool:
    """Whether a file has the name of a draft of another, which a process that was killed has left.

    >>> is_draft_of(".a.json.00ff00ff00ff00ff", "a.json"), is_draft_of("a.json.orig", "a.json")
    (True, False)
    """
    start, end = f".{of}.", name[-16:]
    return name.startswith(start) and len(name) == len(start) + 16 and set(end) <= set("0123456789abcdef")


def _draft(path: Path, content: str | bytes, mode: int) -> Path:
    """Write a new file beside another, under a name that others cannot foresee."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(content.encode() if isinstance(content, str) else content)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return draft


def adding(path: Path) -> IO[bytes]:
    """Open a file of this user to add to its end, without a buffer; it is made if it is missing.

    Raises:
        OSError: as `open_file`.
    """
    return os.fdopen(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def touch(path: Path) -> None:
    """Make an empty file of this user, or bring the time of one up to date.

    Raises:
        OSError: as `open_file`.
    """
    file = open_file(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.utime(file)
    finally:
        os.close(file)


def make_own(path: Path) -> None:
    """Make an empty file of this user, or see that one is. It is not opened: that would end locks that SQLite holds.

    Raises:
        OSError: it cannot be made, is no ordinary file, or belongs to another user.
    """
    if not os.path.lexists(path):
        write_once(path, b"")
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))


def copy(source: Path, target: Path, links: bool = True) -> None:
    """Copy the content of an ordinary file to a new one.

    Raises:
        OSError: the source is no ordinary file, or the target exists.
    """
    with reading(source, links) as read:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE)
        with os.fdopen(file, "wb") as written:
            shutil.copyfileobj(read, written)


@contextlib.contextmanager
def held(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold a lock among the processes of one machine. It ends with the process.

    Yields:
        True for the one process that has it, False while another has.

    Args:
        path: of the lock's file, which is made and stays.
        wait: whether to wait until no other process has it.

    Raises:
        OSError: as `open_file`.
    """
    file = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        yield try_lock(file, wait)
    finally:
        os.close(file)


def try_lock(file: int, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file, and return whether it could be locked; True after waiting.

    Args:
        file: descriptor.
        wait: whether to wait for another process.
        shared: whether others may have it too, if they share it as well.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def try_lock_within(file: int, seconds: float) -> bool:
    """Share a lock with others, and return whether that was possible within some seconds."""
    began = time.monotonic()
    while not try_lock(file, shared=True):
        if time.monotonic() - began > seconds:
            return False
        time.sleep(0.002)
    return True


def unlock(file: int) -> None:
    """Let go of a lock."""
    fcntl.flock(file, fcntl.LOCK_UN)


def may_pass(error: OSError) -> bool:
    """Whether an error may end by itself, whatever the file is: the disk is full, say, or does not answer.

    >>> may_pass(OSError(errno.ENOSPC, "No space left on device")), may_pass(IsADirectoryError(errno.EISDIR, "x"))
    (True, False)
    """
    return error.errno in _PASSING


def set_aside(path: Path) -> None:
    """Give what stands in the place of a file or folder a name that tells so, and that others cannot foresee.

    Raises:
        OSError: it cannot be renamed.
    """
    path.rename(path.with_name(f"{path.name}.damaged-{secrets.token_hex(8)}"))


def make_private(folder: Path, close: bool = True) -> None:
    """Make a folder with its parents, for this user alone, whatever the umask is; or take one of this user.

    One that others can write to is refused, because what is in it may be theirs.

    Args:
        folder: to make.
        close: whether one that others can read is closed to them.

    Raises:
        OSError: it cannot be made, is a link that another user has made, belongs to another user, or others can write
            to it.
    """
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for part in reversed(missing):
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)
    check_private(folder)
    if close and folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def check_private(folder: Path, links: bool = True) -> None:
    """Check that only this user, and root, can have written to a folder.

    Args:
        folder: to look at.
        links: whether it may be a link that this user or root has made.

    Raises:
        OSError: others could have written to it, or put it there.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) and links:
        _check_owner(folder, status, "this link")
        status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder, or a link to one", str(folder))
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "it belongs to another user, or others may write to it", str(folder))


def check_above(folder: Path, owners: bool = False) -> None:
    """Check that not everyone can put another folder in the place of this one, or of a folder above it.

    Args:
        folder: to look at.
        owners: whether the folders above must belong to this user or to root.

    Raises:
        OSError: everyone can; or one above, or a link on the way, belongs to another user.
    """
    way = folder.absolute()
    for part in way.parents:  # as it was named
        if part.is_symlink():
            _check_owner(part, part.lstat(), "this link")
    for part in way.resolve().parents:
        status = part.stat()
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(errno.EPERM, "everyone may write to this folder above it", str(part))
        if owners:
            _check_owner(part, status, "this folder above it")


def _check_owner(path: Path, status: os.stat_result, what: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"{what} belongs to another user", str(path))
