"""A small meta.mat, written by SciPy's savemat, of the layout that ImageNet's devkit has."""

from base64 import b64decode

# ILSVRC2012_ID 1 is n00000030, 2 is n00000010, 3 is n00000020; 4 (n00000001) has children.
META = b64decode(
    "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFNhdCBOb3YgMjEgMDg6Mjc6"
    "NDcgMjAyNgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAA"
    "cwEAAHic7ZXPS8MwFMfT2s0NZUxPHnsWD229eFtBDxuIiIoeS2lDG+hSaSOy/8A/QPAP8p/xuD/BZE1qGqsdzVEf"
    "vKTvlc83JC8/JgCAjxEAQ9rTDpigsgGPLeoG913q5QqXkJT0vwUOeP6F+uLy9v7m3HNcL1hcMIGHq6qv7Tkv4lJO"
    "JFleNhL4aRlEKcriAuJNohEIDQxJkEKUpIQjpAgRDtAyTGAJJjR5Br7mM1TmY0jObMzzla1njPcl3mrhxxI/5TF2"
    "Nnbq8Pw2OnuKDotJiorYpi1Oah2nQ8do6Bgg4Vz/dfg+rsoLk3nB6Y7bnz/2Ncf3NevvyvWfd+gcKjosJhBH6Yl9"
    "h3AU2oS17evSpjdQ9FgsDtn/fujDj3T3g6dzH+xTf8xCTOz3NzuPY6Hz230gTNYR3J+r//WrZv2nuvV33B/m0aYz"
    "VHRYDDFBZLXdO2A2eJOefd31r/b/vIPfUfijml/P+Icv6+m+zzr76RPbH1dU"
)
