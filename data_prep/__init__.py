import pospre  # noqa: F401  # it checks the installation for these commands too
