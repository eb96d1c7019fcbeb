"""Requests to remote storage: errors with the URL, and retries of those that may succeed later."""

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from slimtensors.errors import SlimError

T = TypeVar("T")

_log = logging.getLogger(__name__)

ATTEMPTS = 6
_PAUSE = 0.1
_MAX_PAUSE = 10.0
"""How often a request is sent, and after how many seconds again: three times as long each time."""

_random = random.Random()  # a generator of its own: the state of the global one is the user's

_PERMANENT = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    AttributeError,
)
_PERMANENT_NUMBERS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EPERM,
    errno.ENOSYS,
    errno.ENAMETOOLONG,
    errno.EMSGSIZE,
}
_PERMANENT_NAMES = {"NoCredentialsError", "ParamValidationError", "ProfileNotFound"}
"""Errors of clients that no later attempt avoids."""


def send(url: str, request: Callable[[], T]) -> T:
    """Return `request()`; repeat it after errors that may be temporary.

    Errors of the file system are raised as `OSError` with the URL.
    """
    attempt = 1
    while True:
        try:
            return request()
        except Exception as error:  # every storage client has its own exceptions
            if attempt == ATTEMPTS or not is_temporary(error):
                found = translate(url, error)
                raise found from found.__cause__
            _log.info("%s: attempt %d of %d failed: %s", url, attempt, ATTEMPTS, error)
        pause(attempt)
        attempt += 1


def translate(url: str, error: Exception) -> Exception:
    """Return the error of a file system as an `OSError` with the URL."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{url}: no such file or folder")
    if isinstance(error, OSError | SlimError):
        return error
    found = OSError(f"{url}: {error}")
    found.__cause__ = error
    return found


def pause(attempt: int) -> None:
    """Wait before the next attempt, a random time so that many clients do not return at once."""
    time.sleep(min(_PAUSE * 3 ** (attempt - 1), _MAX_PAUSE) * _random.uniform(0.5, 1.0))


def is_temporary(error: Exception) -> bool:
    """Return True if a later attempt may succeed."""
    if isinstance(error, (*_PERMANENT, SlimError)) or type(error).__name__ in _PERMANENT_NAMES:
        return False
    return not (isinstance(error, OSError) and error.errno in _PERMANENT_NUMBERS)
