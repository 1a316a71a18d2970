"""Run many small kernels as one CUDA graph, recorded once and replayed."""

from collections.abc import Callable, Hashable
from functools import wraps

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Function = Callable[..., Tensor]


class _Recorded:
    """A function's recorded CUDA graph for tensors of given shapes."""

    def __init__(self, function: Function, tensors: list[Tensor], options: tuple[Hashable, ...]):
        self.tensors = [tensor.clone() for tensor in tensors]
        self.graph = torch.cuda.CUDAGraph()
        self.done = torch.cuda.Event()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(*self.tensors, *options)  # what is made at the first call is no part of it
        torch.cuda.current_stream().wait_stream(side)
        # other threads continue: the loader pins memory meanwhile
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
    """Return ``function``, recorded once per input shape on GPUs and replayed afterwards.

    Launching a kernel costs 10 to 30 µs of CPU time; running a small one takes the GPU 2 µs. On
    CPUs, under torch.compile and with fake tensors, the function is called directly. It takes
    tensors, then hashable options, and returns one tensor. It must not synchronise with the GPU,
    use a random generator or keep state.
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
