"""``--options``: what a recipe may hold, read from what declares it."""

from pathlib import Path

import pytest

from pospre.train import main
from pospre.training.options_text import options_text
from tests.refusals import refuses


def test_types_ranges_and_defaults_are_those_of_the_declaration() -> None:
    text = options_text("droppos")
    assert "\n  mask_ratio: number ≥ 0, < 1 or null = null\n" in text
    assert "\n  temperature: number > 0 or null = 0.1\n      τ of the attentive" in text
    assert "\n  distance: squared | euclid = squared\n" in text
    assert "\n  mask_ratio: [number, number] = [0.1, 0.5]\n" in options_text("dinov2")
    assert "\n  name: text = ''\n" in options_text("encoder")
    assert "\n  path: text (required)\n" in options_text("data")
    assert "\n  seed: whole number ≥ 0, < 4294967296 = 0\n" in options_text("recipe")
    assert "\n  inside: text or null = null\n" in options_text("data.views")


def test_without_a_name_all_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--options"])
    assert ended.value.code == 0
    assert "data.views.augment" in (printed := capsys.readouterr().out)
    assert "masked_position" in printed


def test_an_unknown_name_is_a_user_error() -> None:
    refuses(r"'dropos' is no section, algorithm or.*droppos", lambda: options_text("dropos"))


def test_a_class_of_another_package_is_read_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mylab_options.py").write_text(
        "from dataclasses import dataclass\n"
        "from pospre import MAE\n\n\n"
        "@dataclass(kw_only=True, eq=False)\n"
        "class Mine(MAE):\n"
        '    """Mine."""\n\n    share: float = 0.5\n    """Of all."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = options_text("mylab_options:Mine")
    assert "\n  share: number = 0.5\n      Of all." in text and "  decoder_depth: " in text
