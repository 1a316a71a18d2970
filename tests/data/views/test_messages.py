"""What view groups and their changes of pixels say of options that cannot be."""

from collections.abc import Callable
from typing import Any

import pytest

from pospre.data.views.augment_options import Augment, RandAugment
from pospre.data.views.options import ViewGroup, named_groups
from pospre.training.data import build_views
from tests.augment.test_device import EVERYTHING, JITTER, recipe
from tests.refusals import refuses

GROUP: Any = ViewGroup


def nested(**groups: dict[str, Any]) -> object:
    views = {"view": ViewGroup(), **{name: ViewGroup(**some) for name, some in groups.items()}}
    return named_groups(views)


def coloured(**augment: Any) -> ViewGroup:
    return ViewGroup(size=64, count=2, augment=Augment(**augment))


def written(**augment: Any) -> object:
    return build_views(recipe(augment))


ROWS: list[tuple[str, Callable[[], object]]] = [
    # view groups
    (r"query\.inside = viev, but .* view groups are: view",
     lambda: nested(query={"inside": "viev"})),
    (r"query\.inside = query, which is itself inside query\. Give",
     lambda: nested(query={"inside": "query"})),
    (r"query\.inside = other, which is itself inside query",
     lambda: nested(query={"inside": "other"}, other={"inside": "query"})),
    (r"other\.crop = pad, .* Use random or full",
     lambda: nested(query={"inside": "other"}, other={"crop": "pad"})),
    (r"other\.count = 2 and data\.views\.query\.count = 4\. Use equal counts",
     lambda: nested(query={"inside": "other", "count": 4}, other={"count": 2})),
    ("inside = global needs crop = random, not full",
     lambda: ViewGroup(inside="global", crop="full")),
    ("'size' is 0", lambda: ViewGroup(size=0)),
    ("'size' is 0", lambda: ViewGroup(size=(32, 0))),
    ("'count' is 0", lambda: ViewGroup(count=0)),
    ("'scale' is", lambda: ViewGroup(scale=(0.5, 0.2))),
    ("'scale' is", lambda: ViewGroup(scale=(0.0, 1.0))),
    ("'ratio' is", lambda: ViewGroup(ratio=(2.0, 1.0))),
    (r"0\.001 <= low <= high <= 1000", lambda: ViewGroup(ratio=(0.5, 2000.0))),
    (r"'flip_rate' is 1\.5", lambda: ViewGroup(flip_rate=1.5)),
    ("expected 'bicubic', 'bilinear'", lambda: GROUP(interpolation="bicubik")),
    ("'crop' is 'middle'", lambda: GROUP(crop="middle")),
    ("'simple' cuts squares, but size is", lambda: ViewGroup(crop="simple", size=(32, 16))),
    # changes of pixels
    (r"augment: key 'grayscale_rate' is 1\.5 .* equal to 1", lambda: Augment(grayscale_rate=1.5)),
    (r"augment: key 'blur_rate' is -1\.0", lambda: Augment(blur_rate=(0.1, -1.0))),
    (r"augment: key 'jitter' is \(0\.4, .* hue to 0\.5",
     lambda: Augment(jitter=(0.4, 0.4, 0.2, 0.6))),
    ("augment: key 'jitter' is", lambda: Augment(jitter=(-0.4, 0.4, 0.2, 0.1))),
    (r"augment: key 'blur_sigma' is \(2\.0, 0\.1\).*low <= high",
     lambda: Augment(blur_sigma=(2.0, 0.1))),
    ("augment: key 'blur_kernel' is 8 .* an odd number", lambda: Augment(blur_kernel=8)),
    ("augment: key 'solarize_threshold' is 300", lambda: Augment(solarize_threshold=300)),
    (r"grayscale_rate = 0\.2 has no effect with three_augment",
     lambda: Augment(three_augment=True, grayscale_rate=0.2)),
    (r"augment: key 'erase_rate' is 2\.0", lambda: Augment(erase_rate=2.0)),
    ("rand_augment: key 'num_ops' is 0 .*greater than 0", lambda: RandAugment(num_ops=0)),
    (r"rand_augment: key 'magnitude' is 11\.0 .*equal to 10", lambda: RandAugment(magnitude=11.0)),
    (r"rand_augment: key 'magnitude_std' is -1\.0", lambda: RandAugment(magnitude_std=-1.0)),
    # of views
    (r"'view': augment\.blur_rate is \[0\.0, 0\.9\]; .* or 3",
     lambda: ViewGroup(count=3, augment=EVERYTHING)),
    (r"augment\.blur_kernel is 9; views have only 4 pixels",
     lambda: ViewGroup(size=4, augment=Augment(blur_rate=0.1))),
    ("group 'view': .*augment.jitter_rate = 0.5 .* jitter = None",
     lambda: coloured(jitter_rate=0.5)),
    ("group 'view': .*jitter .* jitter_rate = 0",
     lambda: coloured(jitter=JITTER, jitter_rate=(0.0, 0.0))),
    ("group 'view': .*blur_sigma = .0.1, 0.5. .* blur_rate = 0",
     lambda: coloured(blur_sigma=(0.1, 0.5))),
    ("group 'view': .*blur_kernel = 7 has no",
     lambda: coloured(blur_kernel=7, blur_rate=(0.0, 0.0))),
    ("group 'view': .*solarize_threshold = 9 .*solarize_rate = 0",
     lambda: coloured(solarize_threshold=9)),
    ("group 'view': .*ratio = .1.0, 1.0. .* crop = simple",
     lambda: ViewGroup(crop="simple", ratio=(1.0, 1.0))),
    ("group 'view': .*scale = .0.9, 1.0. has no effect with crop = pad",
     lambda: ViewGroup(crop="pad", scale=(0.9, 1.0))),
    ("group 'view': .*scale .* crop = full", lambda: ViewGroup(crop="full", scale=(0.9, 1.0))),
    ("group 'view': .*ratio .* crop = center", lambda: ViewGroup(crop="center", ratio=(1.0, 1.0))),
    ("group 'view': .*flip_rate = 1.0 .* crop = center",
     lambda: ViewGroup(crop="center", flip_rate=1.0)),
    ("view group 'view': unknown key 'augment.jiter'. Did you mean 'jitter'",
     lambda: GROUP(augment={"jiter": 1})),
    ("view group 'view': unknown key 'rand_augment.mag'",
     lambda: GROUP(augment={"rand_augment": {"mag": 1}})),
    ("view group 'view': augment: key 'blur_rate' is 2.0",
     lambda: GROUP(augment={"blur_rate": 2.0})),
    ("view group 'view': key 'augment' is 5", lambda: GROUP(augment=5)),
    # in a recipe
    (r"'data\.views\.global\.augment\.blurrate'\. Did you mean 'blur_rate'",
     lambda: written(blurrate=0.1)),
    (r"augment\.rand_augment\.num_op'\. Did you mean 'num_ops'",
     lambda: written(rand_augment={"num_op": 1})),
    (r"'data\.views\.global\.augment\.blur_rate' is 'often'", lambda: written(blur_rate="often")),
    (r"global\.augment\.jitter' is \[0\.4, 0\.4\].*more entries",
     lambda: written(jitter=[0.4, 0.4])),
    (r"rand_augment\.magnitude' is 12 .*equal to 10",
     lambda: written(rand_augment={"magnitude": 12})),
    (r"'global': augment\.grayscale_rate is .* give one number, or 2",
     lambda: written(grayscale_rate=[0.1, 0.2, 0.3])),
]  # fmt: skip
NEED_COLOURS: dict[str, Any] = {
    "jitter": JITTER, "grayscale_rate": 0.2, "three_augment": True, "rand_augment": RandAugment()
}  # fmt: skip


@pytest.mark.parametrize(("words", "call"), ROWS)
def test_what_cannot_be_is_said(words: str, call: Callable[[], object]) -> None:
    refuses(words, call)


@pytest.mark.parametrize("key", NEED_COLOURS)
def test_what_needs_colours_is_refused_by_name(key: str) -> None:
    augment = Augment(**{key: NEED_COLOURS[key]})
    augment.check_channels("view", 3)
    said = rf"data\.views\.view\.augment\.{key} .*channels = 6"
    refuses(said, lambda: augment.check_channels("view", 6))
    Augment(blur_rate=0.5, solarize_rate=0.5, erase_rate=0.5).check_channels("view", 6)
