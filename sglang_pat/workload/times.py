"""Parses times of logs: numbers in any unit, and texts."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from sglang_pat.messages import quoted

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # unit -> how many make a second
_FORMATS = ("%d/%b/%Y:%H:%M:%S %z", "%b %d, %Y @ %H:%M:%S.%f")  # of access logs and Kibana
_SLASHES = re.compile(r"^(\d{4})/(\d\d)/(\d\d)")  # 2025/10/09, as Go and nginx write dates
_ZONE = re.compile(r" UTC$|(?<=[Z\d])\[[\w/+-]+\]$")  # Java appends the zone's name in brackets
_EPOCH = (9e8, 4.2e9)  # numbers that count as seconds since 1970: 1998 to 2103


def seconds(value: object, unit: str | None = None, default: str = "s") -> float:
    """Return a time in seconds, since 1970 or since the log began.

    A text without a time zone is read as UTC.

    Parameters
    ----------
    unit
        The unit that the log names. None: the unit is `default`, but a number that would then be
        after 2103 gets the smaller unit in which it is between 1998 and 2103.

    Raises
    ------
    ValueError
        The value is neither a non-negative number nor a date as in ISO 8601, mails or access logs,
        or it is after 2103 in every allowed unit.
    """
    if isinstance(value, Mapping) and is_time(value):
        (key, inner), *rest = value.items()
        if str(key).startswith("$"):
            return seconds(inner, unit, default)
        return seconds(inner, "s") + (number_of(rest[0][1]) or 0.0) / UNITS["ns"]
    number = number_of(value)
    if number is None:
        return _moment(value)
    if not number >= 0 or not math.isfinite(number):
        raise ValueError(f"{quoted(value)} is not a time: a number from 0 or ISO 8601 is needed")
    first = UNITS[unit or default]
    for scale in UNITS.values():
        found = number / scale
        if scale == first and found <= _EPOCH[1]:
            return found
        if unit is None and scale > first and _EPOCH[0] <= found <= _EPOCH[1]:
            return found
    raise ValueError(
        f"{quoted(value)} is not a time: it is after the year 2103"
        + (f" in {unit}" if unit else " in s, ms, us and ns")
    )


def is_time(value: object) -> bool:
    """Return True if `value` is a JSON object of the form in which some databases write times.

    Such an object is `{"$date": {"$numberLong": "..."}}` or `{"seconds": ..., "nanos": ...}`.
    """
    if not isinstance(value, Mapping):
        return False
    keys = [str(key).lstrip("_") for key in value]
    is_pair = keys in (["seconds", "nanos"], ["seconds", "nanoseconds"])
    return is_pair or (len(keys) == 1 and keys[0].startswith("$"))


def number_of(value: object) -> float | None:
    """Return `value` as a float if it is a number or the text of a number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _moment(value: object) -> float:
    if isinstance(value, str) and len(value) < 100:
        text = _SLASHES.sub(r"\1-\2-\3", _ZONE.sub("", value.strip()))
        moment = None
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(text)
        if moment is None:
            with contextlib.suppress(ValueError, TypeError, IndexError):
                moment = parsedate_to_datetime(text)
        for written in _FORMATS if moment is None else ():
            with contextlib.suppress(ValueError):
                moment = datetime.strptime(text, written)
        if moment is not None:
            found = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            if 0 <= found <= _EPOCH[1]:
                return found
    raise ValueError(f"{quoted(value)} is not a time: a number or ISO 8601 is needed")
