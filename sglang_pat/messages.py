"""Quotes input in messages, shortened and on one line.

Input may be a user's text in a log, or a whole file on a command line, so no message repeats all of
it.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable

_QUOTED, _NAME, _NAMES = 60, 40, 12
_LONGEST_RUN, _LONGEST_LINE = 120, 900
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _QUOTED
_REPR.maxlevel = 2


def quoted(value: object) -> str:
    """Return the `repr` of a value, shortened if it is long."""
    text = _REPR.repr(value)
    return text if len(text) <= 2 * _QUOTED else f"{text[: 2 * _QUOTED]}..."


def listed(names: Iterable[object]) -> str:
    """Return the first few names, each shortened, separated by commas, or `(none)`."""
    found = [" ".join(str(name).split()) for name in names]
    shown = [name if len(name) <= _NAME else f"{name[:_NAME]}..." for name in found[:_NAMES]]
    while sum(map(len, shown)) > _LONGEST_RUN:
        shown.pop()
    more = f" and {len(found) - len(shown):,} more" if len(shown) < len(found) else ""
    return (", ".join(shown) or "(none)") + more


def one_line(message: str, words: Iterable[str] = ()) -> str:
    """Return a message on one line, with long words of the command line shortened.

    Parameters
    ----------
    words
        Words of the command line. Long words are shortened wherever the message repeats them.
    """
    for word in words:
        for long in {word, repr(word)[1:-1], *word.split("=", 1)[1:]}:
            if len(long) > _LONGEST_RUN:
                message = message.replace(long, f"{long[:_NAME]}...{long[-_NAME:]}")
    message = " ".join(message.split())
    message = re.sub(
        rf"\S{{{_LONGEST_RUN + 80},}}", lambda run: f"{run[0][:_LONGEST_RUN]}...", message
    )
    if len(message) > _LONGEST_LINE:
        message = f"{message[: _LONGEST_LINE // 2]} ... {message[-_LONGEST_LINE // 2 :]}"
    return message
