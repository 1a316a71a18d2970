"""Precision: ``auto`` is what the device computes in; what it only emulates gives a warning."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from composer.utils import get_device
from torch.nn.attention import SDPBackend

from pospre.model.model import PretrainModel
from pospre.nn.vit import Encoder
from pospre.recipe.sections import Trainer
from pospre.training import precision as precisions
from pospre.training import train as trainers
from tests.algorithms.cases import Case

CPU = get_device("cpu")


@pytest.mark.parametrize(
    ("onednn", "capability", "instructions", "machine", "fast"),
    [
        (True, "AVX512", True, "x86_64", True),
        (True, "AVX512", False, "x86_64", False),  # Skylake: oneDNN says yes and takes 2.4 times
        (True, "AVX2", True, "x86_64", False),  # ATEN_CPU_CAPABILITY=avx2
        (False, "AVX2", False, "x86_64", False),
        (True, "DEFAULT", False, "aarch64", True),
        (False, "DEFAULT", False, "aarch64", False),
    ],
)
def test_which_cpus_compute_in_bf16(
    onednn: bool,
    capability: str,
    instructions: bool,
    machine: str,
    fast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert precisions.computes_bf16(CPU) is fast


@pytest.mark.parametrize(
    ("asked", "fast", "precision", "said"),
    [
        ("auto", True, "amp_bf16", "amp_bf16 (trainer.precision=auto: the CPU computes in bf16);"),
        ("auto", False, "fp32", "(trainer.precision=auto: the CPU would only emulate bf16);"),
        ("amp_bf16", False, "amp_bf16", "warning: trainer.precision = amp_bf16, but this CPU only"),
        ("amp_bf16", True, "amp_bf16", "on cpu in amp_bf16;"),
    ],
)
def test_the_start_says_the_precision_and_why(
    asked: str,
    fast: bool,
    precision: str,
    said: str,
    tiny: Path,
    run: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precisions, "computes_bf16", lambda device: fast)
    code, output = run(tiny, f"trainer.precision={asked}", "trainer.max_duration=3ba")
    assert code == 0 and said in output
    assert ("warning:" in output) is (asked == "amp_bf16" and not fast)
    recorded = yaml.safe_load((tmp_path / "runs/tiny/recipe.yaml").read_text())
    assert recorded["trainer"]["precision"] == precision  # decided: a run stays what it began as


def test_a_run_goes_on_in_the_precision_it_began_in(
    tiny: Path, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precisions, "computes_bf16", lambda device: False)
    assert run(tiny, "trainer.precision=auto", "trainer.max_duration=3ba")[0] == 0
    monkeypatch.setattr(precisions, "computes_bf16", lambda device: True)
    code, output = run(tiny, "trainer.precision=auto", "trainer.max_duration=4ba")
    assert code == 2
    assert "has trainer.precision = fp32, this one amp_bf16; give trainer.precision=fp32" in output
    assert run(tiny, "trainer.precision=fp32", "trainer.max_duration=4ba")[0] == 0


@pytest.mark.parametrize(
    ("names", "residual", "precision", "dtype"),
    [
        (("dinov2",), "auto", "amp_bf16", torch.bfloat16),
        (("dinov2",), "fp32", "amp_bf16", torch.float32),
        (("dinov2",), "auto", "fp32", torch.float32),
        (("mae",), "auto", "amp_bf16", torch.float32),
        (("mae",), "bf16", "amp_bf16", torch.bfloat16),
    ],
)
def test_the_tokens_between_blocks_are_as_precise_as_the_method_or_recipe_says(
    names: tuple[str, ...], residual: str, precision: str, dtype: torch.dtype
) -> None:
    case = Case(names)
    model, batch = case.build(), case.batch()
    trainer = Trainer.model_validate(
        {"max_duration": "1ep", "residual": residual, "precision": precision}
    )
    recipe: Any = SimpleNamespace(trainer=trainer, encoder=SimpleNamespace(name="vit_tiny16"))
    expected = model(dict(batch), progress=0.5).loss
    precisions.set_residual(model, recipe)
    seen = set()
    for module in model.modules():
        if isinstance(module, Encoder):
            for block in module.blocks:
                block.register_forward_hook(lambda *found: seen.add(found[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp_bf16"):
        loss = model(dict(batch), progress=0.5).loss
    loss.backward()
    assert seen == {dtype} and loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.03, atol=0.03)


def test_a_device_without_bf16_trains_with_a_float32_residual(
    tiny: Path, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precisions, "computes_bf16", lambda device: False)
    for steps in (3, 4):  # and goes on
        code, output = run(
            tiny,
            "trainer.residual=bf16",
            "trainer.precision=auto",
            f"trainer.max_duration={steps}ba",
        )
        assert code == 0, output


def test_cudnn_comes_first_and_the_order_of_before_comes_back() -> None:
    before = torch._C._get_sdp_priority_order()
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    with precisions.cudnn_first():
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.CUDNN_ATTENTION.value
        assert torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    assert torch._C._get_sdp_priority_order() == before
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled


def test_a_run_computes_attention_by_cudnn_if_it_says_so(
    tiny: Path, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[int] = []
    forward = PretrainModel.forward

    def noted(model: PretrainModel, *arguments: Any, **options: Any) -> Any:
        first.append(torch._C._get_sdp_priority_order()[0])
        return forward(model, *arguments, **options)

    monkeypatch.setattr(PretrainModel, "forward", noted)
    monkeypatch.setattr(trainers, "uses_cudnn", lambda recipe, device: True)
    assert run(tiny, "trainer.max_duration=3ba")[0] == 0
    assert set(first) == {SDPBackend.CUDNN_ATTENTION.value}


@pytest.mark.parametrize("precision", ["amp_bf16", "fp32"])
def test_the_forward_pass_on_a_cpu_casts_in_bf16_only(
    precision: str, tiny: Path, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    casts: dict[str, set[bool]] = {"forward": set(), "loss": set()}
    for name, seen in casts.items():
        plain = getattr(PretrainModel, name)

        def noted(*given: Any, plain: Any = plain, seen: set[bool] = seen, **options: Any) -> Any:
            seen.add(torch.is_autocast_enabled("cpu"))
            return plain(*given, **options)

        monkeypatch.setattr(PretrainModel, name, noted)
    assert run(tiny, f"trainer.precision={precision}", "trainer.max_duration=3ba")[0] == 0
    assert casts == {"forward": {precision == "amp_bf16"}, "loss": {False}}
