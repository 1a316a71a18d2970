"""An encoder as an ONNX graph for batches of any size; onnxruntime runs it as a check."""

import io
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from pospre.atomic_file import write_atomic
from pospre.errors import UserError, needing
from pospre.exporting.timm_encoder import OwnOutputs, Parts, TimmOutputs

LIBRARY = "onnx"
TOLERANCE = 1e-4  # other kernels, in float32 as well
OPSET = 17  # the first with LayerNormalization as one operator
_LIMIT = 2**31  # bytes that one protobuf message can hold
_INPUT = "images"


def write(parts: Parts, path: Path) -> None:
    """Write the graph of timm's model, or of ours if timm has none.

    Raises:
        UserError: it is too large for one file.
    """
    size = sum(tensor.nbytes for tensor in parts.tensors.values())
    if size >= _LIMIT:
        raise UserError(
            f"--format onnx: the encoder has {size / 2**30:.1f} GiB of weights, but one .onnx file "
            "holds less than 2. Use the format safetensors, timm or hf."
        )
    with needing("onnx", "--format onnx"):
        import onnx
    graph = onnx.load_model_from_string(_traced(parts))
    onnx.helper.set_model_props(graph, parts.metadata())
    onnx.checker.check_model(graph, full_check=True)
    write_atomic(path, graph.SerializeToString())


def _traced(parts: Parts) -> bytes:
    """Return the bytes of the exported graph."""
    names = parts.output_names
    shown = TimmOutputs(_for_one_size(parts), names) if parts.is_timms else OwnOutputs(parts)
    buffer: Any = io.BytesIO()  # the argument is annotated as a path
    with warnings.catch_warnings(action="ignore"):  # the sizes that it takes for constants are
        torch.onnx.export(
            shown,
            (parts.sample_images(1),),
            buffer,
            dynamo=False,  # the other exporter needs onnxscript
            opset_version=OPSET,
            input_names=[_INPUT],
            output_names=names,
            dynamic_axes={name: {0: "batch"} for name in [_INPUT, *names]},
        )
    return buffer.getvalue()


def _for_one_size(parts: Parts) -> Any:
    """Return timm's model with constant positions, because the exporter cannot resample."""
    fixed = {"dynamic_img_size": False} if "dynamic_img_size" in parts.kwargs else {}
    vit: Any = timm.create_model(parts.timm_name, **parts.kwargs | fixed)
    vit.load_state_dict(parts.tensors)
    if getattr(vit, "rope", None) is not None:
        turns = vit.rope.get_embed().detach()
        vit.rope.get_embed = lambda: turns
    return vit


def compute(parts: Parts, path: Path, images: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Return a sentence about what runs the graph, and its outputs."""
    with needing("onnx", "--format onnx"):
        import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    arrays = session.run(parts.output_names, {_INPUT: images.numpy()})
    outputs = dict(zip(parts.output_names, map(torch.from_numpy, arrays), strict=True))
    return f"onnxruntime {onnxruntime.__version__} runs the graph (opset {OPSET})", outputs


def usage(parts: Parts, out: Path) -> list[str]:
    """Return the lines of Python that run the graph."""
    height, width = parts.image_size
    shape = f"(batch, {parts.model.encoder.channels}, {height}, {width})"
    return [
        "import onnxruntime",
        f"session = onnxruntime.InferenceSession({str(out)!r})",
        f'{", ".join(parts.output_names)}, = session.run(None, {{"{_INPUT}": images}})'
        f"  # float32 {shape}",
    ]
