"""Re-encoding of a baseline JPEG's entropy-coded data, so that its parts can be separated.

It is compiled and takes a few nanoseconds per byte. There are no bounds checks, so every loop ends
at the end of the data, whatever they contain. Numba caches the compiled code until this file
changes.
"""

from typing import Any

import numpy as np

from pospre.portable_math import compiled

NUM_CATEGORIES = 12  # of a difference of 8-bit pixels' DC: 0 to 11 bits
PADDING = 512  # bytes after the scan; more than the longest codes of a block
_PEEK = 11  # bits looked up at once; longer codes are rare
_BLOCK_END = 128  # more coefficients than a block has
_LIMITS = 1 << _PEEK  # where they start in a lookup table
_OFFSETS = _LIMITS + 17
_ENTRIES = _OFFSETS + 17
_SIZE = _ENTRIES + 256


# -------------------------------------------------------------------------------------- look-up


@compiled
def lookup_table(table: np.ndarray, is_ac: bool) -> Any:
    """Return the table that ``_find`` uses to decode with a Huffman table, int64 (_SIZE,).

    An entry is for one code: bits of the code and, for AC, of the value after it; × 256: the DC's
    category, or the number of coefficients by which AC advances.

    Args:
        table: counts of the codes of 1 to 16 bits, then their symbols, uint8; a valid number of
            codes.
        is_ac: whether it is for AC.
    """
    entries = np.zeros(_SIZE, np.int64)
    code, number = 0, 0
    for length in range(1, 17):
        entries[_OFFSETS + length] = number - code
        for _ in range(table[length - 1]):
            symbol = np.int64(table[16 + number])
            entry = symbol << 8 | length
            if is_ac:
                steps = (symbol >> 4) + 1 if symbol & 15 or symbol >> 4 == 15 else _BLOCK_END
                entry = steps << 8 | length + (symbol & 15)
            entries[_ENTRIES + number] = entry
            if length <= _PEEK:
                first = code << (_PEEK - length)
                for bits in range(first, first + (1 << (_PEEK - length))):
                    entries[bits] = entry
            code, number = code + 1, number + 1
        entries[_LIMITS + length] = code
        code <<= 1
    return entries


@compiled
def _find(lookup: np.ndarray, bits: int) -> Any:
    """Return the entry of the code at the start of 64 bits; 0 if there is none."""
    entry = lookup[bits >> np.uint64(64 - _PEEK)]
    if entry != 0:
        return entry
    for length in range(_PEEK + 1, 17):
        code = np.int64(bits >> np.uint64(64 - length))
        if code < lookup[_LIMITS + length]:
            return lookup[_ENTRIES + code + lookup[_OFFSETS + length]]
    return 0


# --------------------------------------------------------------------------------- bits in and out


@compiled
def _peek(words: np.ndarray, at: int) -> Any:
    """Return 64 bits starting at bit ``at``."""
    word, shift = np.uint64(at) >> np.uint64(6), np.uint64(at & 63)
    behind = (words[word + np.uint64(1)] >> np.uint64(1)) >> (np.uint64(63) - shift)
    return words[word] << shift | behind


@compiled
def _put(coded: np.ndarray, at: int, value: int, count: int) -> Any:
    """Write up to 32 bits at bit ``at``; return the position after them."""
    if count > 0:
        word = at >> 5
        pair = np.uint64(value) << np.uint64(64 - count - (at & 31))
        coded[word] |= np.uint32(pair >> np.uint64(32))
        coded[word + 1] |= np.uint32(pair & np.uint64(0xFFFFFFFF))
    return at + count


@compiled
def _copy(words: np.ndarray, start: int, stop: int, coded: np.ndarray, at: int) -> Any:
    while start < stop:
        count = min(32, stop - start)
        value = _peek(words, start) >> np.uint64(64 - count)
        at = _put(coded, at, np.int64(value), count)
        start += count
    return at


@compiled
def _put_difference(coded: np.ndarray, at: int, difference: int, codes: np.ndarray) -> Any:
    """Write a difference with its code; return the next position, -1 if it has no code."""
    size, left = 0, abs(difference)
    while left:
        size, left = size + 1, left >> 1
    if size >= NUM_CATEGORIES or codes[size, 1] == 0:
        return -1
    at = _put(coded, at, codes[size, 0], codes[size, 1])
    value = difference if difference > 0 else difference + (1 << size) - 1
    return _put(coded, at, value, size)


@compiled
def _end_part(coded: np.ndarray, at: int) -> Any:
    """Fill the last byte with ones, as the standard requires."""
    return _put(coded, at, (1 << (-at & 7)) - 1, -at & 7)


# ---------------------------------------------------------------------------------------- the scan


@compiled
def _skip_ac(words: np.ndarray, at: int, lookup: np.ndarray) -> Any:
    """Return the start of the next block; -1 if this one is damaged."""
    coefficient, bits, left = 1, _peek(words, at), 64
    while coefficient < 64:
        if left < 16:  # not enough for a code
            bits, left = _peek(words, at), 64
        entry = _find(lookup, bits)
        if entry == 0:
            return -1
        used = entry & 255
        at, left, bits = at + used, left - used, bits << np.uint64(used)
        coefficient += entry >> 8
    return at if coefficient == 64 or coefficient > _BLOCK_END else -1


@compiled
def recode(
    words: np.ndarray,
    ends: np.ndarray,
    sizes: tuple[int, int, int],
    components: np.ndarray,
    lookups: np.ndarray,
    codes: np.ndarray,
    coded: np.ndarray,
    part_ends: np.ndarray,
) -> Any:
    """Re-encode a scan so that every part starts at a byte, with differences from 0.

    Args:
        words: the scan without stuffing and markers, 64 bits each, uint64, padded.
        ends: of the parts between existing restart markers, in bits; of the expected number.
        sizes: the number of MCUs in the scan, in a new part, and between existing markers.
        components: components of an MCU's blocks.
        lookups: ``lookup_table`` of each component's DC and AC, int64 (components, 2, …).
        codes: int64 (components, 12, 2): code and length for a difference of each number of bits;
            length 0: none.
        coded: zeros for the result, 32 bits each.
        part_ends: output: ends of the new parts, in bytes.

    Returns:
        Whether the scan is valid and every difference has a code.
    """
    num_mcus, between, interval = sizes
    read, written = np.zeros(4, np.int64), np.zeros(4, np.int64)  # the last DC on each side
    part, at, copied, to = 0, 0, 0, 0
    for mcu in range(num_mcus):
        if mcu > 0 and mcu % interval == 0:
            to = _copy(words, copied, at, coded, to)
            if not 0 <= ends[part] - at < 8:
                return False
            copied = at = ends[part]
            part += 1
            read[:] = 0
        if mcu > 0 and mcu % between == 0:
            to = _end_part(coded, _copy(words, copied, at, coded, to))
            copied = at
            part_ends[mcu // between - 1] = to >> 3
            written[:] = 0
        for component in components:
            bits = _peek(words, at)
            entry = _find(lookups[component, 0], bits)
            length, size = entry & 255, entry >> 8
            if entry == 0 or size >= NUM_CATEGORIES:
                return False
            value = np.int64(bits >> np.uint64(64 - length - size)) & ((1 << size) - 1)
            if size > 0 and value >> (size - 1) == 0:
                value -= (1 << size) - 1
            value += read[component]
            if read[component] != written[component]:
                to = _copy(words, copied, at, coded, to)
                to = _put_difference(coded, to, value - written[component], codes[component])
                if to < 0:
                    return False
                copied = at + length + size
            read[component] = written[component] = value
            at = _skip_ac(words, at + length + size, lookups[component, 1])
            if at < 0 or at > ends[part]:
                return False
    to = _end_part(coded, _copy(words, copied, at, coded, to))
    part_ends[-1] = to >> 3
    return part == len(ends) - 1 and ends[part] - at < 8
