"""Position schemes of encoders: one file per scheme, ours listed here by name."""

import importlib
from collections.abc import Mapping
from inspect import signature
from typing import Any

from pospre.arguments import check_arguments
from pospre.errors import UserError, suggestion
from pospre.external_class import load_class
from pospre.nn.encoder_options import GivenPositions, named
from pospre.nn.positions.scheme import Scheme, TransformerDims
from pospre.nn.positions.sincos import DecoderSinCos

SCHEMES = {
    "none": "none:NoPositions",
    "sincos": "sincos:SinCos",
    "learned": "table:Table",
    "learned_sincos": "sincos:LearnedSinCos",
    "rotary": "rotary:Rotary",
    "rotary_mixed": "rotary_mixed:RotaryMixed",
    "learned_rotary": "learned_rotary:LearnedRotary",
    "alibi": "alibi:Alibi",
    "torus": "alibi:Torus",
    "lookhere": "lookhere:LookHere",
    "relative": "relative:Relative",
    "shared_relative": "relative:SharedRelative",
}
"""Names in recipes (``encoder.positions``), and the file and class of each.

A class of another package is named by its address, ``package.module:Class``.
"""

_OURS = {f"{__name__}.{place}": name for name, place in SCHEMES.items()}
"""The names of our classes by their addresses."""


def build_positions(positions: GivenPositions, dims: TransformerDims) -> Scheme:
    """Return a scheme by name, not initialised yet; ``UserError`` if an option is wrong."""
    name, options = named_scheme(positions)
    kind = scheme_class(name)
    if dims.num_registers and not kind.takes_registers:
        raise UserError(f"encoder.positions = {name} works without registers only.")
    known = [option for option in signature(kind).parameters if option != "dims"]
    for option in (each for each in options if each not in known):
        key = f"encoder.positions.{name}.{option}"
        raise UserError(f"unknown key '{key}'.{suggestion(option, known)}")
    arguments = {**options, "dims": dims}
    scheme = kind(**check_arguments(f"encoder.positions.{name}", kind, arguments))
    scheme.name, scheme.options = name, {**options}
    return scheme


def named_scheme(positions: GivenPositions) -> tuple[str, Mapping[str, Any]]:
    """Return a scheme's name and options; ``UserError`` if there is no such scheme."""
    positions = named(positions)
    given = {positions: {}} if isinstance(positions, str) else {**positions}
    if len(given) != 1:
        raise UserError(
            f"encoder.positions is {given}; give a scheme's name, or {{name: its options}}."
        )
    (name, options), *_ = given.items()
    name = _OURS.get(name, name)
    if name not in SCHEMES and ":" not in name:
        own = " Write your own class as package.module:Class." if "." in name else ""
        raise UserError(f"encoder.positions is '{name}'.{own}{suggestion(name, SCHEMES)}")
    return name, options


def decoder_positions(encoder: Scheme, dims: TransformerDims) -> Scheme:
    """Return a decoder's scheme, ready to use: the encoder's own, or sin-cos."""
    scheme = encoder.companion(dims) or DecoderSinCos(dims)
    scheme.reset_parameters()
    return scheme


def schemes_that(flag: str, value: bool = True) -> str:
    """Return the names of the schemes that have this flag, for errors: ``a, b or c``."""
    *others, last = (name for name in SCHEMES if bool(getattr(scheme_class(name), flag)) is value)
    return f"{', '.join(others)} or {last}" if others else last


def scheme_class(name: str) -> type[Scheme]:
    """Return the class of a scheme, by its name or address.

    Raises:
        UserError: another package has no such scheme, or is not trusted.
    """
    if name not in SCHEMES:
        return _outside_class(name)
    module, _, title = SCHEMES[name].partition(":")
    scheme: type[Scheme] = getattr(importlib.import_module(f"{__name__}.{module}"), title)
    return scheme


def _outside_class(address: str) -> type[Scheme]:
    key = "encoder.positions"
    scheme = load_class(address, key, "mylab.spiral:Spiral")
    if not issubclass(scheme, Scheme):
        raise UserError(f"{key}: '{address}' is no position scheme; derive it from pospre.Scheme.")
    return scheme
