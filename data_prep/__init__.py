import pospre  # noqa: F401  # whose check of what is installed holds for these commands as well
