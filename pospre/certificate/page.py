"""A certificate as a table to read: on the terminal and as Markdown."""

import json
import platform
from pathlib import Path

from pospre.certificate.compare import TOLERANCE
from pospre.certificate.result import Certificate


def table(certificate: Certificate) -> str:
    """Return the table: a row for each property, a column for each disturbed run."""
    columns = certificate.columns
    names = list(dict.fromkeys(v.property for column in columns for v in column.verdicts))
    found = [{verdict.property: verdict for verdict in column.verdicts} for column in columns]
    rows = [["property", *(column.leg.title for column in columns)]]
    for name in names:
        cells = [verdicts.get(name) for verdicts in found]
        rows.append([name, *(_cell(cell.text, cell.holds) if cell else "–" for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write(certificate: Certificate, folder: Path) -> None:
    """Write ``certificate.json`` and ``certificate.md`` into a folder."""
    values = json.dumps(certificate.dump(), indent=1)
    (folder / "certificate.json").write_text(values + "\n", encoding="utf-8")
    (folder / "certificate.md").write_text(_page(certificate), encoding="utf-8")


def headline(certificate: Certificate) -> str:
    """Say in a line whether the certificate is green, or what is first wrong."""
    asked = certificate.request
    if certificate.is_green:
        return f"certificate of {asked.recipe}: green, in {certificate.seconds:.0f} s"
    title, verdict = next(
        (column.leg.title, verdict)
        for column in certificate.columns
        for verdict in column.verdicts
        if not verdict.holds
    )
    return f"certificate of {asked.recipe}: RED. {title}: {verdict.property} {verdict.text}"


def _page(certificate: Certificate) -> str:
    asked = certificate.request
    keys = " ".join(asked.overrides)
    return f"""# {headline(certificate)}

{asked.steps} steps, a save every {asked.save_every}, seed {asked.seed} of the moments; \
python -m pospre.certify {asked.recipe} {keys}

{table(certificate)}

Beside a run of one process that nothing disturbed. Every step that a life finished is compared,
also those that were trained twice: a hash for each sample of the batch as the model got it (ids,
boxes, flips, pixels, masks with all else that was drawn), the losses, and the weights after it.
*equal* means the same bits; *within*, where sums are taken in another order, a relative distance
of at most {TOLERANCE:g}. {platform.machine()}, {platform.system()}.
"""


def _cell(text: str, holds: bool) -> str:
    return text if holds else f"**{text}**"
