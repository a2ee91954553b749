import subprocess
import sys

from rayfl.data.torchvision import _operators_load


def in_a_fresh_process(program: str) -> str:
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_datasets_transforms_and_models_work_beside_any_torch_once_they_are_needed():
    program = """
import sys, rayfl.choices.kinds, rayfl.experiment.experiment
rayfl.choices.kinds.named(rayfl.data.datasets.Source)
print("torchvision" in sys.modules, "matplotlib" in sys.modules)
import torch
from rayfl.data.torchvision import torchvision
vision = torchvision()
assert torchvision() is vision
image = vision.transforms.ToTensor()(vision.transforms.ToPILImage()(torch.ones(3, 4, 4)))
logits = vision.models.resnet18().eval()(torch.zeros(1, 3, 32, 32))
print(issubclass(vision.datasets.CIFAR10, torch.utils.data.Dataset), image.sum().item(), tuple(logits.shape))
"""
    assert in_a_fresh_process(program) == "False False\nTrue 48.0 (1, 1000)"


def test_it_may_come_after_somebody_elses_cure():
    program = """
import importlib.util, torch
from pathlib import Path
try:
    folder = Path(importlib.util.find_spec("torchvision").origin).parent
    torch.ops.load_library(folder / "_C.so")
except OSError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import torchvision as plain
from rayfl.data.torchvision import torchvision
print(torchvision() is plain)
"""
    assert in_a_fresh_process(program) == "True"


def test_a_library_that_does_not_load_is_noticed(tmp_path):
    assert not _operators_load(tmp_path)
    (tmp_path / "_C.so").write_bytes(b"not a library")
    assert not _operators_load(tmp_path)


def test_a_users_file_imports_it_at_its_top(tmp_path):
    (tmp_path / "mine.py").write_text("from torchvision.models import resnet18 as net")
    program = f"""
import sys
from rayfl.choices.kinds import resolve
from rayfl.models.base import Architecture
assert "torchvision" not in sys.modules
for name in ("{tmp_path}/mine.py:net", "torchvision.models:resnet18"):
    print(resolve(Architecture, {{"name": name, "weights": None}}).build((3, 32, 32), 7).fc.out_features)
"""
    assert in_a_fresh_process(program) == "7\n7"
