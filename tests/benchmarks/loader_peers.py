"""The loaders that are compared, each used as its documentation shows.

Every function makes one loader of a job, inside the process that runs it. All read the same bytes
at their original size and use all cores. What they do with an image:

  ours         box, bicubic antialiased resize (option ``interpolation``) and flip decision (done on
               the device); one decode
  ffcv         RandomResizedCropRGBImageDecoder per view (area resize; one decode each), ToTensor
  the others   their own decoding, once; torchvision's RandomResizedCrop per view (bilinear, or
               torchvision's option ``interpolation``; antialiased), flip, as uint8 tensor;
               processes, kept alive from epoch to epoch
  dali         on the CPU, threads; bilinear, antialiased, and flip, as uint8 tensor. One view:
               its decoder decodes around the crop alone; more: one decode, then the crops
"""

import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.loader_worker import Job, Views

_TOLERANCE = 1.0  # our default, RMS in grey levels of 255


@dataclass(frozen=True)
class Loader:
    """What a process serves."""

    epoch: Callable[[], Iterable[int]]  # gives the number of images of every batch
    note: Callable[[], str] = str  # says something about the loader once it ran
    estimate: Callable[[], int | None] = lambda: None  # bytes that the loader says it takes


def _our_loader(job: Job) -> Any:
    from pospre.data.loader import build_loader
    from pospre.data.views.options import ViewGroup

    options = {"interpolation": "bicubic", **job.options}
    kind = options.pop("interpolation")
    groups = [
        ViewGroup(f"views{place}", views.number, views.size, views.scale, interpolation=kind)
        for place, views in enumerate(job.views)
    ]
    return build_loader(
        job.data,
        views=groups,
        batch_size=job.batch_size,
        seed=0,
        drop_last=False,
        num_workers=job.num_workers,
        tolerance=_TOLERANCE,
        **options,
    )


def ours(job: Job) -> Loader:
    """Our loader, on whatever storage format; options are ``build_loader``'s."""
    from pospre.data.memory import estimate_memory

    loader = _our_loader(job)

    def epoch() -> Iterator[int]:
        return (len(batch["index"]) for batch in loader)

    return Loader(epoch, estimate=lambda: estimate_memory(loader).per_rank)


def ffcv(job: Job) -> Loader:
    """Stock FFCV; option ``layer`` sets numba's threading layer."""
    if "layer" in job.options:  # before numba is imported: FFCV starts its threads when it is
        os.environ["NUMBA_THREADING_LAYER"] = job.options["layer"]
    import numba
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader as FfcvLoader
    from ffcv.loader import OrderOption
    from ffcv.pipeline import PipelineSpec
    from ffcv.transforms import Squeeze, ToTensor

    pipelines: dict[str, Any] = {"label": [IntDecoder(), ToTensor(), Squeeze()]}
    for view in _single_views(job.views):
        decoder = RandomResizedCropRGBImageDecoder((view.size, view.size), scale=view.scale)
        name = "image" if "image" not in pipelines else f"image{len(pipelines)}"
        pipelines[name] = PipelineSpec("image", decoder=decoder, transforms=[ToTensor()])
    loader = FfcvLoader(
        job.data,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines=pipelines,
    )
    return Loader(
        lambda: (len(batch[0]) for batch in loader),
        lambda: f"(numba's threading layer: {numba.threading_layer()})",
    )


class Crops:
    """A list of random views of one image, by torchvision."""

    def __init__(self, job: Job, from_pil: bool = True) -> None:
        from torchvision import transforms

        kind = transforms.InterpolationMode(job.options.get("interpolation", "bilinear"))
        last = [transforms.PILToTensor()] if from_pil else []
        self.transforms = [
            transforms.Compose(
                [
                    transforms.RandomResizedCrop(view.size, scale=view.scale, interpolation=kind),
                    transforms.RandomHorizontalFlip(),
                    *last,
                ]
            )
            for view in _single_views(job.views)
        ]

    def __call__(self, image: Any) -> list[Any]:
        return [transform(image) for transform in self.transforms]


def _single_views(views: Iterable[Views]) -> list[Views]:
    return [group for group in views for _ in range(group.number)]


def _counted(kind: Callable[..., Iterable[Any]], data: Any, job: Job, **options: Any) -> Loader:
    """Serve a loader like torch's, whose batches are [views, labels]."""
    options |= {"batch_size": job.batch_size, "num_workers": job.num_workers}
    loader = kind(data, persistent_workers=True, **options)
    return Loader(lambda: (len(batch[1]) for batch in loader))


def torchvision(job: Job) -> Loader:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    return _counted(DataLoader, ImageFolder(job.data, Crops(job)), job, shuffle=True)


def litdata(job: Job) -> Loader:
    """StreamingDataLoader over a StreamingDataset of optimised chunks, which gives tensors."""
    from litdata import StreamingDataLoader, StreamingDataset

    crops = Crops(job, from_pil=False)

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return crops(sample["image"]), sample["class"]

    return _counted(StreamingDataLoader, Images(job.data, shuffle=True), job)


def webdataset(job: Job) -> Loader:
    import webdataset as wds

    shards = sorted(str(path) for path in Path(job.data).glob("*.tar"))
    dataset = (
        wds.WebDataset(shards, shardshuffle=100)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(Crops(job), int)
    )
    return _counted(wds.WebLoader, dataset, job)


def streaming(job: Job) -> Loader:
    """DataLoader over a stock StreamingDataset; options such as ``remote`` are its own."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    crops = Crops(job)

    class Images(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return crops(sample["image"].convert("RGB")), sample["label"]

    data = Images(local=job.data, shuffle=True, batch_size=job.batch_size, **job.options)
    return _counted(DataLoader, data, job)


def dali(job: Job) -> Loader:
    """NVIDIA DALI's pipeline over a folder, on the CPU, with its iterator for PyTorch."""
    import nvidia

    # torch's own wheels make a package of that name, which does not look for parts elsewhere
    nvidia.__path__ = pkgutil.extend_path(nvidia.__path__, "nvidia")
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    views = _single_views(job.views)

    @pipeline_def(batch_size=job.batch_size, num_threads=job.num_workers, device_id=None)
    def pipeline() -> tuple[Any, ...]:
        files, labels = fn.readers.file(file_root=job.data, random_shuffle=True, name="files")
        if len(views) == 1:
            crop = fn.decoders.image_random_crop(files, random_area=views[0].scale)
            crops = [fn.resize(crop, size=[views[0].size] * 2)]
        else:
            image = fn.decoders.image(files)
            crops = [
                fn.random_resized_crop(image, size=[view.size] * 2, random_area=view.scale)
                for view in views
            ]
        return *(fn.flip(crop, horizontal=fn.random.coin_flip()) for crop in crops), labels

    names = [*(f"view{place}" for place in range(len(views))), "label"]
    loader = DALIGenericIterator(
        pipeline(),
        names,
        reader_name="files",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
    return Loader(lambda: (len(batch["label"]) for (batch,) in loader))


def turbojpeg(job: Job) -> Loader:
    """No loader: libjpeg-turbo alone, bytes in memory; the limit of any loader that decodes all.

    Option ``at_scale``: at the DCT scale that our loader chooses for the job's views, else in full.
    """
    import simplejpeg

    loader = _our_loader(Job(job.loader, job.data, job.views, job.batch_size, job.num_workers))
    files = [loader.reader.read(index).encoded.numpy() for index in range(loader.num_samples)]
    shrinks = _shrinks(job.views, loader) if job.options.get("at_scale") else [1] * len(files)

    def decode(place: int) -> int:
        height, width, _, _ = simplejpeg.decode_jpeg_header(files[place])
        shrink = shrinks[place]
        sides = (-(-height // shrink), -(-width // shrink))
        options = {} if shrink == 1 else {"min_height": sides[0], "min_width": sides[1]}
        simplejpeg.decode_jpeg(files[place], "RGB", min_factor=float(shrink), **options)
        return 1

    pool = ThreadPoolExecutor(job.num_workers)
    return Loader(lambda: pool.map(decode, range(len(files))))


def _shrinks(views: Iterable[Views], loader: Any) -> list[int]:
    """Return by how much our loader decodes every image smaller, in its first epoch."""
    import numpy as np

    from pospre.data.decode.decoder import OpenedImage
    from pospre.data.views.crop_plan import plan_views
    from pospre.data.views.decode_crops import choose_shrink, least_oversampling

    plans = plan_views(loader.views, seed=0, epoch=1, index=np.arange(loader.num_samples))
    shrinks = []
    for row in range(loader.num_samples):
        image = OpenedImage(loader.reader.read(row).encoded)
        crops = [plan.crops(row, image.width, image.height) for plan in plans]
        shrinks.append(choose_shrink(crops, least_oversampling(_TOLERANCE)))
    return shrinks
