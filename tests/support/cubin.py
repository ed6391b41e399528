"""Reads a constant from a compiled image (an ELF file) without a driver."""

from __future__ import annotations

import struct


def constant(image: bytes, name: str) -> bytes:
    """Return the bytes of the symbol `name`.

    Raises
    ------
    KeyError
        The image has no such symbol.
    """
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry_bytes) for i in range(count)
    ]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for symbol in range(offset, offset + size, 24):
            at, _, _, section, value, length = struct.unpack_from("<IBBHQQ", image, symbol)
            if image.startswith(name.encode() + b"\0", names + at):
                begin = sections[section][4] + value
                return image[begin : begin + length]
    raise KeyError(name)
