"""An architecture states how the images lie that its network gets, and nothing else of a run lies otherwise."""

import pytest
import torch
from torch import nn

from rayfl.data.batches import Batch
from rayfl.models.base import FromFactory, laid_out
from rayfl.models.convolutional import VGG11, ConvNet2
from tests.bound_tasks import classification
from tests.refusals import refused


@pytest.mark.parametrize("channels", [1, 3])
def test_images_lie_channels_last_with_any_number_of_channels(channels: int) -> None:
    images = torch.arange(2.0 * channels * 20).reshape(2, channels, 4, 5)
    found = laid_out(images, "channels_last")
    assert torch.equal(found, images)
    assert found.stride() == (channels * 20, 1, channels * 5, channels), "torch chooses its kernels by the strides"
    assert laid_out(images, "contiguous") is images


def test_what_is_no_image_stays_as_it_is() -> None:
    rows = torch.ones(3, 4)
    assert laid_out(rows, "channels_last") is rows


@pytest.mark.parametrize(("model", "stride"), [(ConvNet2(), 1), (VGG11(), 32 * 32)])
def test_the_network_gets_images_as_its_architecture_states(model: ConvNet2 | VGG11, stride: int) -> None:
    task = classification(model.builder((3, 32, 32), 10), (3, 32, 32), model.memory_format)
    seen = []
    task.network.module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].stride(1)))
    batch = Batch(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    gradient = task.grad(task.init(0), batch)
    assert seen == [stride]
    assert all(each.is_contiguous() for each in gradient.values()), "a checkpoint would not keep other strides"


class Own(nn.Sequential):
    """Somebody's own model."""

    memory_format = "channels_last"


def test_an_own_model_says_it_in_an_attribute() -> None:
    assert FromFactory(factory=Own, options={}).memory_format == "channels_last"
    assert FromFactory(factory=nn.Sequential, options={}).memory_format == "contiguous"


class Wrong(nn.Sequential):
    """Somebody's own model, with a word that there is not."""

    memory_format = "channels_first"


def test_another_word_is_refused() -> None:
    with refused(names=["Wrong", "memory_format='channels_first'", "channels_last"]):
        _ = FromFactory(factory=Wrong, options={}).memory_format
