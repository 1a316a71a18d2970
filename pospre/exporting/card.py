"""The card of an export: the weights, how they were made, their figures, and how to load them.

Markdown, with the header of a Hugging Face model card.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pospre.errors import UserError
from pospre.evaluation.figures import Figure, figures_in, read_documents, run_folder_of
from pospre.evaluation.run import encoder_hash
from pospre.evaluation.verdict import Judgement, judge
from pospre.exporting.timm_encoder import Parts
from pospre.model.algorithm import algorithm_class
from pospre.output import markdown_table


class Measurements(NamedTuple):
    """Results of a run's evaluations by name: of exactly the exported weights, and of others."""

    own: dict[str, dict[str, Any]]
    others: dict[str, dict[str, Any]]


def make_card(
    parts: Parts,
    *,
    library: str,
    loading: Sequence[str],
    checked: str,
    checkpoint: str,
    weights: str,
    step: int | None,
    license: str | None,
    measured: Measurements,
    judgement: Judgement | None,
) -> str:
    """Return the card of an export of the weights ``student`` or ``teacher`` after ``step`` steps.

    ``loading`` are lines of Python that load it with ``library``, ``checked`` the result of that.
    ``measured`` are the run's results, ``judgement`` compares it with the weights that training
    started from.
    """
    recipe = parts.recipe
    header = {
        "library_name": library,
        "tags": ["pospre", "vision-transformer", *recipe.algorithms],
        "pipeline_tag": "image-classification" if parts.classifier else "image-feature-extraction",
        **({"license": license} if license else {}),
    }
    sections = {
        "Loading": _code(loading, "python") + f"\n\n{_pixels(parts)}\n\nChecked: {checked}.",
        "Encoder": _encoder(parts),
        **({"Classes": _classes(parts.classes)} if parts.classes else {}),
        "Training": _training(parts, checkpoint, weights, step),
        **({} if judgement is None else {"Verdict": judgement.sentence}),
        "Figures": _figures(measured),
        "Licence": _licence(parts, license),
    }
    name = Path(checkpoint).name
    if recipe.algorithms:
        name = recipe.run_name
        text = yaml.safe_dump(recipe.as_trained.dump(), sort_keys=False).rstrip()
        sections["Recipe"] = _code([text], "yaml")
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    front = yaml.safe_dump(header, sort_keys=False)
    return f"---\n{front}---\n\n# {name}\n\n{text}\n"


def _pixels(parts: Parts) -> str:
    mean, std = ([round(value, 4) for value in values] for values in (parts.mean, parts.std))
    height, width = parts.image_size
    return (
        f"Images of {height} × {width} pixels and {parts.model.encoder.channels} channels, as "
        f"numbers in [0, 1], minus mean {mean}, divided by std {std}."
    )


def _encoder(parts: Parts) -> str:
    encoder = parts.model.encoder
    count = sum(value.numel() for value in parts.tensors.values())
    positions = parts.model.layout.placer or encoder.positions.name
    facts = {
        "architecture": f"`{parts.timm_name}` of timm, with `{parts.kwargs}`"
        if parts.is_timms
        else f"`{parts.recipe.encoder.name}` of pospre; timm has no such model",
        "tensors": f"{len(parts.tensors)} of {count:,} numbers, float32",
        "tokens": f"{encoder.num_prefix_tokens} + {parts.grid[0]} × {parts.grid[1]} patches, "
        f"{encoder.embed_dim} wide",
        "positions": positions,
        "class head": "trained" if parts.classifier else "none trained",
    }
    return markdown_table(("what", "is"), [list(row) for row in facts.items()])


def _classes(names: Sequence[str]) -> str:
    text = _code([json.dumps(names)], "json")
    return f"The names of the logits, in order:\n\n{text}"


def _training(parts: Parts, checkpoint: str, weights: str, step: int | None) -> str:
    recipe = parts.recipe
    if not recipe.algorithms:
        return f"By others: the weights are those of `{checkpoint}`, converted by pospre."
    methods = [f"- `{name}`: {_summary(name)}" for name in recipe.algorithms]
    start = recipe.encoder.weights
    lines = [
        f"Trained by pospre on `{recipe.data.path}`, for at most {recipe.trainer.max_duration}, "
        f"with seed {recipe.seed}{f', from the weights `{start}`' if start else ''}. Exported from "
        f"`{checkpoint}` ({weights}, step {step}). Methods:",
        "",
        *methods,
    ]
    return "\n".join(lines)


def _summary(algorithm: str) -> str:
    """Return the first line of an algorithm's module, or class: name, paper, arXiv."""
    kind = algorithm_class(algorithm)
    text = sys.modules[kind.__module__].__doc__ or kind.__doc__ or ""
    return text.strip().partition("\n")[0]


def measurements_of(parts: Parts, checkpoint: str, weights: str, step: int | None) -> Measurements:
    """Return what the run's folder has; raise a ``UserError`` if a file is damaged."""
    folder = run_folder_of(checkpoint) or parts.recipe.run_path()
    if not parts.recipe.algorithms:  # a file's weights are of no run
        return Measurements({}, {})
    damaged: list[str] = []
    documents = read_documents(folder, damaged) if (folder / "recipe.yaml").is_file() else {}
    if damaged:
        raise UserError(damaged[0])
    documents = {name: each for name, each in documents.items() if each.get("weights") == weights}
    these, keys = [step, encoder_hash(parts.model)], ("step", "encoder_sha256")
    own = {name: each for name, each in documents.items() if [*map(each.get, keys)] == these}
    others = {name: documents[name] for name in documents.keys() - own.keys()}
    return Measurements(own, others)


def judged(parts: Parts, measured: Measurements, weights: str) -> Judgement | None:
    """Return the verdict on the exported weights; None: their recipe declares none."""
    verdict, start = parts.recipe.verdict, str(parts.recipe.encoder.weights)
    if verdict is None:
        return None
    if verdict.weights != weights:
        other = f"The run's verdict is on the {verdict.weights}, and this is the {weights}."
        return Judgement("unknown", other)
    return judge(verdict, start, measured.own)


def _figures(measured: Measurements) -> str:
    """Return the figures of exactly these weights, and the names of the run's other figures."""
    rows = [
        [name, each.name, *_numbers(each), f"`{document.get('data')}`"]
        for name, document in measured.own.items()
        for each in figures_in(document)
    ]
    text = "None was measured of these weights (`python -m pospre.evaluate` measures them)."
    if rows:
        text = markdown_table(("evaluation", "figure", "value", "start", "untrained", "on"), rows)
    others = [f"`{name}` (step {each.get('step')})" for name, each in measured.others.items()]
    if others:
        names = ", ".join(sorted(others))
        text += f"\n\nNot shown, because other weights of this run gave them: {names}."
    return text


def _numbers(figure: Figure) -> list[str]:
    """Return the value with its error, the start's and the untrained encoder's."""
    others = (figure.start, figure.untrained)
    return [
        f"{figure.value:.4g}{figure.spread}",
        *("–" if each is None else f"{each:.4g}" for each in others),
    ]


def _licence(parts: Parts, license: str | None) -> str:
    start = parts.recipe.encoder.weights
    if not parts.recipe.algorithms:
        return f"- weights: {license or 'that of their authors; not stated for this conversion'}"
    return "\n".join(
        [
            f"- weights: {license or 'not stated in the export'}",
            f"- data: not recorded; the terms of `{parts.recipe.data.path}` apply",
            *([f"- weights it started from, `{start}`: their own terms apply"] if start else []),
            "- the code that trained them: Apache-2.0",
        ]
    )


def _code(lines: Sequence[str], language: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])
