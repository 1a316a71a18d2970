"""Kinds of positions are known in their own folder; elsewhere code asks a scheme by its flags."""

import re
from pathlib import Path

import pospre
from pospre.nn.positions import SCHEMES, schemes_that

_NAMES = "|".join(name for name in SCHEMES if name != "none")
_MODULES = "|".join(sorted({place.partition(":")[0] for place in SCHEMES.values()}))
KNOWS = re.compile(
    rf'"(?:{_NAMES})"|pos_embed|sincos_table|is_sincos|positions\.name [=!]='
    rf"|nn\.positions\.(?:{_MODULES})\b|Use (?:{_NAMES})\b"
)
WEIGHTS_OF_OTHERS = {
    "exporting/hf_folder.py",
    "nn/weights/encoder_from_tensors.py",
    "nn/weights/timm_eva.py",
    "nn/weights/timm_models.py",
    "nn/weights/layouts.py",
    "nn/weights/names.py",
    "training/reference.py",
    "training/start_positions.py",
    "training/start_weights.py",
    "training/weight_records.py",
}
OTHERS = {
    "algorithms/droppos.py": "no scheme: a dropped position's token may be learned",
    "algorithms/stop/ablations.py": "an ablation of the paper has learned positions",
    "algorithms/loca.py": "its head may add fixed sinusoids to what queries see, as published",
    "nn/encoder_options.py": "the default",
    "nn/swin/encoder.py": "Swin's own, the one that it has",
    "reporting/measured.py": "what the papers' encoders have",
}


def test_kinds_of_positions_are_known_to_few_files() -> None:
    root = Path(pospre.__file__).parent
    own = root / "nn" / "positions"
    paths = [path for path in root.rglob("*.py") if own not in path.parents]
    knowing = {str(path.relative_to(root)) for path in paths if KNOWS.search(path.read_text())}
    assert knowing == WEIGHTS_OF_OTHERS | OTHERS.keys()


def test_refusals_name_the_schemes_by_their_flags() -> None:
    assert schemes_that("can_forget", False) == "none"
    assert schemes_that("takes_boxes", False) == "none, relative or shared_relative"
    assert "relative" not in schemes_that("takes_boxes")
