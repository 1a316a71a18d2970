"""Report of a conversion about images of more than 8 bits: summary rows and description."""

from collections.abc import Sequence
from typing import Any

from data_prep.plan.records import Record, Summary, spans_of


def deep_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the summary rows: which values of deep images became 0 to 255."""
    counts = summary.num_deep
    if not counts:
        return []
    rows = [("deep", f"{counts.total()} of more than 8 bits; these values became 0..255:")]
    for (text, guessed), number in sorted(counts.items(), key=lambda entry: -entry[1]):
        rows.append((f"  {text}", f"{number}, guessed" if guessed else f"{number}"))
    if any(guessed for _, guessed in counts):
        rows.append(
            ("  guessed", "from each image's largest value; --deep-range LOW,HIGH sets one for all")
        )
    if summary.num_flat:
        rows.append(
            ("  one grey", f"{summary.num_flat} of them are nearly; the description lists them")
        )
    return rows


def describe_deep(records: Sequence[Record]) -> dict[str, Any]:
    """Return the samples of more than 8 bits by range, as spans of indices, inclusive."""
    ranges: dict[str, dict[str, Any]] = {}
    flat: list[int] = []
    first = 0
    for record in records:
        for number, text, guessed, is_flat in record.deep:
            entry = ranges.setdefault(text, {"guessed": False, "samples": []})
            entry["guessed"] |= guessed
            entry["samples"].append(first + number)
            if is_flat:
                flat.append(first + number)
        first += len(record.labels)
    for entry in ranges.values():
        entry["samples"] = spans_of(entry["samples"])
    return {"ranges": ranges, "nearly_one_grey": spans_of(flat)}
