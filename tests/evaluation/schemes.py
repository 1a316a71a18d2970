"""The schemes of positions that evaluations are tested under."""

SCHEME_NAMES = ("learned", "none", "relative", "rotary", "rotary_mixed", "alibi")
