"""The tiny recipe of the tests of training, and the command in this process."""

from tests.training.conftest import run as run
from tests.training.conftest import tiny as tiny
