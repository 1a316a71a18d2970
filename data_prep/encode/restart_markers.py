"""Adding restart markers to JPEGs, so that any part can be decoded separately.

Entropy decoding is most of a JPEG's cost, and each block's brightness is stored as the difference
from the previous block. At a restart marker differences start from 0, so decoding can begin there.
The loader skips data between markers. Markers have equal distances that divide the rows of MCUs (of
8 to 32 pixels) evenly. Adding them moves bits, and re-encodes the first differences after each; no
coefficient changes, so no pixel does.

libjpeg-turbo 3.1 does the same (``tj3Transform``) in the same time with 5 % more bytes, or in twice
the time with as many. But no pip package offers it, and distributions have 2.1.

Unsupported files are returned unchanged: progressive and unusual ones, and damaged ones, which
other checks detect.
"""

import math
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data_prep.encode import entropy_coding
from pospre.data.decode.jpeg import segments

_BASELINE, _TABLES, _SCAN, _INTERVAL = 0xC0, 0xC4, 0xDA, 0xDD
_FRAMES = {*range(0xC0, 0xD0)} - {_TABLES, 0xC8, 0xCC}
_MARKER = re.compile(rb"\xff([\xd0-\xd7])")
_END_OF_SCAN = re.compile(rb"\xff(?![\0\xd0-\xd7])\xff*(.)", re.DOTALL)  # may follow fill bytes
_FULL_SPECTRUM = b"\x00\x3f\x00"
_MCUS = 4  # approximate number between two markers
_MAX_BLOCKS = 10  # in an MCU


class _Odd(Exception):
    """Not a supported JPEG."""


class _Layout(NamedTuple):
    """The parts of a JPEG, and the structure of its scan."""

    scan_header: int
    scan: int
    end: int
    interval: int
    rows: int
    per_row: int
    components: tuple[int, ...]  # of an MCU's blocks, in order
    dc_tables: tuple[tuple[int, bytes], ...]  # per component: number, counts and symbols
    ac_tables: tuple[bytes, ...]


def add_restart_markers(jpeg: bytes) -> bytes:
    """Return the same image with restart markers that divide every row of MCUs.

    Only baseline JPEGs with one scan are changed; others, including damaged ones, are returned
    unchanged. The pixels are bit-equal.
    """
    try:
        layout = _read_layout(jpeg)
        if layout.interval == mcus_between_markers(layout.per_row):
            return jpeg
        return _with_markers(jpeg, layout)
    except (_Odd, struct.error, LookupError):  # the last two for truncated headers
        return jpeg


def mcus_between_markers(per_row: int) -> int:
    """Return the number of MCUs between markers: the divisor of a row nearest to 4.

    Fewer would allow skipping slightly more, but each marker takes about five bytes.
    """
    divisors = (count for count in range(1, per_row + 1) if per_row % count == 0)
    return min(divisors, key=lambda count: abs(math.log(count / _MCUS)))


def _with_markers(jpeg: bytes, layout: _Layout) -> bytes:
    num_mcus, between = layout.rows * layout.per_row, mcus_between_markers(layout.per_row)
    interval = layout.interval or num_mcus
    words, ends = _read_scan(jpeg, layout, -(-num_mcus // interval))
    dc, ac = layout.dc_tables, layout.ac_tables
    wider = [_widen(table) for _, table in dc]
    most = ends[-1] + (num_mcus // between + len(ends)) * (len(dc) * 32 + 8)
    coded = np.zeros(most // 32 + 4, np.uint32)
    part_ends = np.zeros(num_mcus // between, np.int64)
    done = entropy_coding.recode(
        words,
        ends,
        (num_mcus, between, interval),
        np.array(layout.components),
        np.stack([_lookups(one, other) for (_, one), other in zip(dc, ac, strict=True)]),
        np.stack([_codes(table) for table in wider]),
        coded,
        part_ends,
    )
    if not done:
        raise _Odd
    new = {number: wide for (number, table), wide in zip(dc, wider, strict=True) if wide != table}
    header = [jpeg[: layout.scan_header]]
    for number, table in new.items():
        header.append(struct.pack(">HHB", 0xFF00 | _TABLES, 3 + len(table), number) + table)
    header.append(struct.pack(">HHH", 0xFF00 | _INTERVAL, 4, between))
    header.append(jpeg[layout.scan_header : layout.scan])
    parts = _write_parts(coded.astype(">u4").tobytes(), part_ends.tolist())
    return b"".join([*header, *parts, jpeg[layout.end :]])


def _write_parts(stored: bytes, ends: list[int]) -> Iterator[bytes]:
    start = 0
    for number, end in enumerate(ends):
        if number:
            yield bytes((0xFF, 0xD0 | (number - 1) & 7))
        yield stored[start:end].replace(b"\xff", b"\xff\0")
        start = end


def _read_scan(jpeg: bytes, layout: _Layout, num_parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scan without stuffing and markers, for ``recode``, and its parts' ends."""
    pieces = _MARKER.split(jpeg[layout.scan : layout.end])
    numbers = [pieces[at][0] & 7 for at in range(1, len(pieces), 2)]
    if numbers != [number & 7 for number in range(num_parts - 1)]:
        raise _Odd
    parts = [part.replace(b"\xff\0", b"\xff") for part in pieces[::2]]
    ends = np.cumsum([8 * len(part) for part in parts])
    padding = bytes(entropy_coding.PADDING - ends[-1] // 8 % 8)
    return np.frombuffer(b"".join([*parts, padding]), ">u8").astype(np.uint64), ends


# ------------------------------------------------------------------------------------- the header


def _read_layout(jpeg: bytes) -> _Layout:
    frame, interval = b"", 0
    tables: dict[int, bytes] = {}
    for marker, at, content in segments(memoryview(jpeg)):
        segment = bytes(content)
        if marker in _FRAMES:
            if marker != _BASELINE or frame:
                raise _Odd
            frame = segment
        elif marker == _TABLES:
            tables |= _read_tables(segment)
        elif marker == _INTERVAL and len(segment) == 2:
            interval = int.from_bytes(segment)
        elif marker == _SCAN:
            return _lay_out(jpeg, frame, tables, interval, (at, at + 4 + len(segment)))
    raise _Odd


def _read_tables(segment: bytes) -> dict[int, bytes]:
    tables, at = {}, 0
    while at < len(segment):
        counts = segment[at + 1 : at + 17]
        table = segment[at + 1 : at + 17 + sum(counts)]
        if len(counts) < 16 or len(table) < 16 + sum(counts) or sum(counts) > 256:
            raise _Odd
        if sum(count << (15 - length) for length, count in enumerate(counts)) > 1 << 16:
            raise _Odd
        tables[segment[at]] = table
        at += 1 + len(table)
    return tables


def _lay_out(
    jpeg: bytes, frame: bytes, tables: dict[int, bytes], interval: int, scan: tuple[int, int]
) -> _Layout:
    header = jpeg[scan[0] + 4 : scan[1]]
    bits, height, width, count = struct.unpack_from(">BHHB", frame)
    ids, across, down = frame[6::3], [n >> 4 for n in frame[7::3]], [n & 15 for n in frame[7::3]]
    is_usual = bits == 8 and height and width and count in (1, 3) and len(set(ids)) == count
    is_all = header[0] == count and header[1:-3:2] == ids and header[-3:] == _FULL_SPECTRUM
    end = _END_OF_SCAN.search(jpeg, scan[1])
    if end is None or end[1] != b"\xd9":  # the image does not end here
        raise _Odd
    if not (is_usual and is_all and all(1 <= n <= 4 for n in across + down)):
        raise _Odd
    if len(frame) != 6 + 3 * count or len(header) != 4 + 2 * count:
        raise _Odd
    if count == 1:  # a single component: an MCU is one block, whatever the factors are
        across = down = [1]
    blocks = [n for n in range(count) for _ in range(across[n] * down[n])]
    if len(blocks) > _MAX_BLOCKS:
        raise _Odd
    numbers = [(chosen >> 4, 0x10 | chosen & 15) for chosen in header[2:-3:2]]
    return _Layout(
        scan_header=scan[0],
        scan=scan[1],
        end=end.start(),
        interval=interval,
        rows=-(-height // (8 * max(down))),
        per_row=-(-width // (8 * max(across))),
        components=tuple(blocks),
        dc_tables=tuple((dc, tables[dc]) for dc, _ in numbers),
        ac_tables=tuple(tables[ac] for _, ac in numbers),
    )


# ------------------------------------------------------------------------------------ the tables


def _list_codes(table: bytes) -> list[tuple[int, int, int]]:
    """Return code, length and symbol of each code of a table."""
    codes, code, at = [], 0, 16
    for length, count in enumerate(table[:16], 1):
        for symbol in table[at : at + count]:
            codes.append((code, length, symbol))
            code += 1
        at += count
        code <<= 1
    return codes


@lru_cache(256)
def _widen(table: bytes) -> bytes:
    """Return a DC table with codes for missing categories, after the longest code.

    Tables optimised for one image only have codes for its differences; those from 0 may need
    others. Existing codes are kept. If not all fit, the last are left out.
    """
    code, length, _ = _list_codes(table)[-1]
    counts, symbols = bytearray(table[:16]), bytearray(table[16:])
    for symbol in sorted({*range(entropy_coding.NUM_CATEGORIES)} - {*symbols}):
        code, length = (code + 1) << 1, length + 1
        if length > 16 or code + 1 >= 1 << length:  # no code may be all ones
            break
        counts[length - 1] += 1
        symbols.append(symbol)
    return bytes(counts + symbols)


@lru_cache(256)
def _codes(table: bytes) -> np.ndarray:
    """Return code and length of each category of a DC table, int64 (12, 2); length 0: none."""
    codes = np.zeros((entropy_coding.NUM_CATEGORIES, 2), np.int64)
    for code, length, symbol in _list_codes(table):
        if symbol < entropy_coding.NUM_CATEGORIES:
            codes[symbol] = code, length
    return codes


@lru_cache(64)
def _lookups(dc: bytes, ac: bytes) -> np.ndarray:
    return np.stack(
        [
            entropy_coding.lookup_table(np.frombuffer(table, np.uint8), is_ac)
            for table, is_ac in ((dc, False), (ac, True))
        ]
    )
