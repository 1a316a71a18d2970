"""The schemes of positions that evaluations are tested under."""

SCHEME_NAMES = ("learned", "none", "relative")
