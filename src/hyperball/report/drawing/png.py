"""Small PNG images with a palette, as data addresses."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

Color = tuple[int, int, int, int]  # red, green, blue, opacity
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def palette_png(rows: Sequence[bytes], colors: Sequence[Color]) -> bytes:
    """A PNG whose pixels, one byte each, are indices of at most 256 colors."""
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    plain = b"".join(b"\x00" + row for row in rows)
    parts = [(b"IHDR", header), (b"PLTE", b"".join(bytes(color[:3]) for color in colors))]
    parts += [(b"tRNS", bytes(color[3] for color in colors)), (b"IDAT", zlib.compress(plain, 9)), (b"IEND", b"")]
    return SIGNATURE + b"".join(chunk(*part) for part in parts)


def rgba_png(rows: Sequence[bytes]) -> bytes:
    """A PNG of rows of red, green, blue and opacity bytes."""
    header = struct.pack(">IIBBBBB", len(rows[0]) // 4, len(rows), 8, 6, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"".join(b"\x00" + row for row in rows), 9)), (b"IEND", b"")]
    return SIGNATURE + b"".join(chunk(*part) for part in parts)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def address(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
