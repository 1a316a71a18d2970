"""Many small kernels given to a GPU at once: recorded as a CUDA graph, then replayed."""

from collections.abc import Callable, Hashable
from functools import wraps

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Function = Callable[..., Tensor]


class _Recorded:
    """What a function did to tensors of certain shapes."""

    def __init__(self, function: Function, tensors: list[Tensor], options: tuple[Hashable, ...]):
        self.tensors = [tensor.clone() for tensor in tensors]
        self.graph = torch.cuda.CUDAGraph()
        self.done = torch.cuda.Event()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(*self.tensors, *options)  # what is made at the first call is no part of it
        torch.cuda.current_stream().wait_stream(side)
        # other threads go on: the loader pins memory meanwhile
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = function(*self.tensors, *options)

    def replay(self, tensors: list[Tensor]) -> Tensor:
        """Return what the function returns for ``tensors``."""
        torch.cuda.current_stream().wait_event(self.done)  # another stream may have used these
        for mine, given in zip(self.tensors, tensors, strict=True):
            mine.copy_(given)
        self.graph.replay()
        result = self.result.clone()
        self.done.record()
        return result


def replayed(function: Function) -> Function:
    """Return ``function``, recorded once for each shape, and replayed from then on, on GPUs.

    Launching a kernel takes the CPU 10 to 30 µs; running a small one takes the GPU 2 µs. On CPUs,
    under torch.compile and over the fake tensors of a plan the function is called directly.

    Args:
        function: of tensors, then of hashable options; returns one tensor. It neither waits for the
            GPU nor draws from a generator, and keeps nothing.
    """
    recorded: dict[Hashable, _Recorded] = {}

    @wraps(function)
    def call(*arguments: Tensor | Hashable) -> Tensor:
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        plain = torch.compiler.is_compiling() or any(isinstance(t, FakeTensor) for t in tensors)
        if plain or not all(tensor.is_cuda for tensor in tensors):
            return function(*arguments)
        options = arguments[len(tensors) :]
        key = (*((t.shape, t.dtype, t.device) for t in tensors), *options)
        with torch.cuda.device(tensors[0].device):
            if key not in recorded:
                recorded[key] = _Recorded(function, tensors, options)
            return recorded[key].replay(tensors)

    return call
