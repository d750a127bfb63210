"""MobileNetV2: torchvision's names, the frozen part, weights that are missing or wrong."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.errors import ModelError
from fedloom.models.catalogue import Shape
from fedloom.models.mobilenet import FROZEN, MobileNetV2
from tests.models.making import make, samples, with_files

SHAPE = Shape((3, 32, 32), 10)
NAMES = {  # of torchvision's state_dict
    "features.0.0.weight": (32, 3, 3, 3),
    "features.0.1.running_mean": (32,),
    "features.1.conv.0.0.weight": (32, 1, 3, 3),
    "features.1.conv.1.weight": (16, 32, 1, 1),
    "features.1.conv.2.num_batches_tracked": (),
    "features.2.conv.0.0.weight": (96, 16, 1, 1),
    "features.2.conv.1.0.weight": (96, 1, 3, 3),
    "features.2.conv.2.weight": (24, 96, 1, 1),
    "features.2.conv.3.weight": (24,),
    "features.17.conv.2.weight": (320, 960, 1, 1),
    "features.18.0.weight": (1280, 320, 1, 1),
    "features.18.1.running_var": (1280,),
    "classifier.1.weight": (1000, 1280),
    "classifier.1.bias": (1000,),
}


@pytest.fixture(scope="module")
def imagenet() -> dict[str, Tensor]:
    """Weights as torchvision stores them, with statistics that are not the initial ones."""
    torch.manual_seed(3)
    state = MobileNetV2(1000).state_dict()
    for name, value in state.items():
        if name.endswith("running_mean"):
            value.normal_(std=0.1)
    return state


def frozen(name: str) -> bool:
    return name.startswith("features.") and int(name.split(".")[1]) < FROZEN


def test_names_are_torchvisions(imagenet: dict[str, Tensor]) -> None:
    assert len(imagenet) == 314
    assert {name: tuple(imagenet[name].shape) for name in NAMES} == NAMES


@pytest.mark.parametrize("file", ["mobilenet_v2.safetensors", "mobilenet_v2-b0353104.pth", "mobilenet_v2.pth"])
def test_the_frozen_part_is_loaded_and_the_rest_is_new(tmp_path: Path, file: str, imagenet: dict[str, Tensor]) -> None:
    if file.endswith(".pth"):
        torch.save(imagenet, tmp_path / file)
    else:
        save_file(imagenet, tmp_path / file)
    for text in ("mobilenetv2", f"mobilenetv2(weights='{tmp_path / file}')", f"mobilenetv2(weights='{file}')"):
        model = make(text, with_files(SHAPE, tmp_path))
        for name, value in model.state_dict().items():
            if frozen(name):
                assert torch.equal(value, imagenet[name]), name
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad is not frozen(name)
        last = model.get_parameter("features.17.conv.0.0.weight")
        assert not torch.equal(last, imagenet["features.17.conv.0.0.weight"])


def test_frozen_batch_norms_never_train() -> None:
    model = make("mobilenetv2(weights='random')", SHAPE)
    for mode in (True, False, True):
        model.train(mode)
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d | nn.Dropout):
                assert module.training is (mode and not frozen(name)), name
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = model(samples(SHAPE, 2)).square().sum()
    loss.backward()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]) is frozen(name), name
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) is frozen(name), name


def test_small_images_are_enlarged() -> None:
    model = make("mobilenetv2(weights='random')", SHAPE).eval()
    x = samples(SHAPE, 1)
    large = F.interpolate(x, size=(224, 224), mode="bilinear", align_corners=False)
    torch.testing.assert_close(model(x), model(large))


def test_missing(tmp_path: Path) -> None:
    names = "mobilenet_v2.safetensors or mobilenet_v2-b0353104.pth or mobilenet_v2.pth"
    with pytest.raises(
        ModelError, match=f"weights of mobilenetv2 are not on this machine: put {names} into {tmp_path}"
    ):
        make("mobilenetv2", with_files(SHAPE, tmp_path))
    with pytest.raises(ModelError, match=r"put mine\.pth into"):
        make("mobilenetv2(weights='mine.pth')", with_files(SHAPE, tmp_path))


def test_damaged_files(tmp_path: Path, imagenet: dict[str, Tensor]) -> None:
    torch.save(imagenet, tmp_path / "cut.pth")
    save_file(imagenet, tmp_path / "cut.safetensors")
    for name in ("cut.pth", "cut.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for length in (0, 100, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:length])
            with pytest.raises(ModelError, match=f"{name} is damaged or holds no weights"):
                make(f"mobilenetv2(weights='{name}')", with_files(SHAPE, tmp_path))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match="folder is no file with weights"):
        make("mobilenetv2(weights='folder')", with_files(SHAPE, tmp_path))


class Mischief:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of a weights file was run",)


def test_other_files(tmp_path: Path, imagenet: dict[str, Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    first = "features.0.0.weight"
    contents: dict[str, tuple[object, str]] = {
        "list": ([1, 2], "holds no tensors by name"),
        "code": (Mischief(), "is damaged or holds no weights"),
        "other": ({"layer1.weight": torch.zeros(2)}, f"it has no {first}"),
        "wide": ({**imagenet, first: torch.zeros(16, 3, 3, 3)}, rf"of shape \(16, 3, 3, 3\) instead of .* {first}"),
        "nan": ({**imagenet, first: imagenet[first] / 0}, f"NaN or an infinity in {first}"),
    }
    for name, (content, words) in contents.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(ModelError, match=words):
            make(f"mobilenetv2(weights='{name}')", with_files(SHAPE, tmp_path))
    assert "code of a weights file" not in capsys.readouterr().out
