"""Layers against their definitions, computed beside them."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.models.convolutional import (
    VGG11,
    AlexNetMCEPL,
    LocalResponseNorm,
    ResNet18,
    ResNet20,
    Subsampled,
    pooled_relu,
)
from rayfl.models.text import CharLSTM, MeanEmbedding
from rayfl.models.transformers import EncoderBlock, ViTTiny
from tests.models.examples import EXAMPLES
from tests.models.paper_resnet import PaperResNet18

COLOUR = (3, 32, 32)


def test_resnet18_computes_what_the_paper_s_does():
    """With the same numbers in the same places, which both have in the order of the layers."""
    ours, paper = ResNet18().build(COLOUR, 10), PaperResNet18()
    with torch.no_grad():
        ours_named = dict(ours.named_parameters())
        for (name, value), ours_name in zip(paper.named_parameters(), matching_names(), strict=True):
            assert value.shape == ours_named[ours_name].shape, (name, ours_name)
            value.copy_(0.5 * ours_named[ours_name] + 0.1 * torch.randn(value.shape))
            ours_named[ours_name].copy_(value)
        images = torch.randn(2, *COLOUR)
        torch.testing.assert_close(ours(images), paper(images), rtol=1e-4, atol=1e-4)


def matching_names() -> list[str]:
    """torchvision's names in the order of PaperResNet18's parameters."""
    names = ["conv1.weight", "bn1.weight", "bn1.bias"]
    for stage in range(1, 5):
        for block in range(2):
            lead = f"layer{stage}.{block}"
            names += [f"{lead}.conv{layer}.weight" for layer in (1, 2)]
            names += [f"{lead}.bn{layer}.{part}" for layer in (1, 2) for part in ("weight", "bias")]
            if stage > 1 and block == 0:
                names += [f"{lead}.downsample.{part}" for part in ("0.weight", "1.weight", "1.bias")]
    return [*names, "fc.weight", "fc.bias"]


def test_every_norm_is_a_group_norm_of_the_groups_asked_for():
    for model, groups, count in (
        (ResNet18(), 32, 20),
        (ResNet18(groups=4), 4, 20),
        (VGG11(), 32, 8),
        (ResNet20(), 8, 19),
    ):
        norms = [layer for layer in model.build(COLOUR, 10).modules() if "Norm" in type(layer).__name__]
        assert [type(norm) for norm in norms] == [nn.GroupNorm] * count
        assert {norm.num_groups for norm in norms if isinstance(norm, nn.GroupNorm)} == {groups}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pooling_before_relu_has_the_bits_of_pooling_after_it(memory_format: torch.memory_format):
    """Also where a window has equal maxima, zeros, or nothing above zero."""
    numbers = torch.randint(-3, 3, (4, 8, 10, 10), generator=torch.Generator().manual_seed(1)).float()
    images = numbers.contiguous(memory_format=memory_format).requires_grad_()
    factors = torch.randn(4, 8, 5, 5, generator=torch.Generator().manual_seed(2))
    found = []
    for layers in (pooled_relu(), (nn.ReLU(), nn.MaxPool2d(2))):
        outputs = nn.Sequential(*layers)(images)
        found.append((outputs, *torch.autograd.grad((outputs * factors).sum(), images)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert found[0][1].count_nonzero() > 100


def test_option_a_takes_every_second_pixel_and_adds_zeros():
    images = torch.arange(2 * 3 * 5, dtype=torch.float32).reshape(1, 2, 3, 5)
    small = Subsampled(3)(images)
    assert small.shape == (1, 5, 2, 3)
    assert small[0, 1].tolist() == [[15, 17, 19], [25, 27, 29]]
    assert not small[0, 2:].any()


def test_vgg11_has_its_eight_convolutions():
    convolutions = [layer for layer in VGG11().build(COLOUR, 10).modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [64, 128, 256, 256, 512, 512, 512, 512]
    assert all(layer.bias is not None and layer.kernel_size == (3, 3) for layer in convolutions)
    # Normal with variance 2 / (9 out_channels): over 294,912 and more numbers the estimate is good to a percent.
    for layer in convolutions[3:]:
        assert layer.weight.var().item() == pytest.approx(2 / (9 * layer.out_channels), rel=0.02)
        assert layer.bias is not None and not layer.bias.any()


def test_alexnet_s_first_stage_by_hand():
    """ELU, then x / (1 + 2e-5 / 4 sum x^2)^0.75 over channels c - 2 to c + 1, then the maximum of 3x3 every 2."""
    network = AlexNetMCEPL().build(COLOUR, 10)
    assert isinstance(network, nn.Sequential)
    images = torch.randn(1, *COLOUR, generator=torch.Generator().manual_seed(0)) * 50
    with torch.no_grad():
        x = network[0](images)[0].double().numpy()
        found = network[:4](images)[0].numpy()
    x = np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)
    squares = np.pad(x**2, ((2, 1), (0, 0), (0, 0)))
    x = x / (1 + 2e-5 / 4 * sum(squares[shift : shift + 64] for shift in range(4))) ** 0.75
    wanted = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2].max(axis=(3, 4))
    assert found.shape == wanted.shape == (64, 14, 14)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_alexnet_s_logits_end_in_elu_unless_told_otherwise():
    kinds = {
        flag: [type(layer) for layer in AlexNetMCEPL(elu_logits=flag).build(COLOUR, 10).children()]
        for flag in (True, False)
    }
    assert kinds[True][-2:] == [nn.Linear, nn.ELU] and kinds[False] == kinds[True][:-1]
    norms = [layer for layer in AlexNetMCEPL().build(COLOUR, 10).children() if isinstance(layer, LocalResponseNorm)]
    assert [(norm.size, norm.alpha, norm.beta) for norm in norms] == [(4, 2e-5, 0.75), (4, 1e-4, 0.75), (4, 1e-4, 0.75)]


@pytest.mark.parametrize(("size", "channels"), [(4, 64), (5, 7), (1, 3), (4, 2)])
def test_local_response_normalisation_is_torch_s(size: int, channels: int):
    """Values and gradients to the rounding of float32; alphas large enough to be seen."""
    images = torch.randn(2, channels, 5, 3, generator=torch.Generator().manual_seed(0)).mul_(4)
    found = []
    for norm in (LocalResponseNorm(size, 0.5, 0.75), nn.LocalResponseNorm(size, 0.5, 0.75)):
        leaf = images.clone().requires_grad_()
        value = norm(leaf)
        (gradient,) = torch.autograd.grad((value * images.flip(0)).sum(), leaf)
        found.append((value, gradient))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    assert not torch.allclose(found[0][0], images)


def test_local_response_normalisation_of_one_pixel_by_hand():
    """Channels 1, 2, 3 with size 4: two channels before and one after, so m = 5/4, 14/4, 14/4."""
    images = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    wanted = [x / (1 + 0.5 * m) ** 0.75 for x, m in zip((1, 2, 3), (1.25, 3.5, 3.5), strict=True)]
    assert LocalResponseNorm(4, 0.5, 0.75)(images).flatten().tolist() == pytest.approx(wanted, rel=1e-6)


def test_no_model_of_ours_uses_torch_s_local_response_normalisation():
    """Its backward pass has no deterministic algorithm on a GPU."""
    for name, (model, shape, classes) in EXAMPLES.items():
        layers = model.build(shape, classes).modules()
        assert not any(isinstance(layer, nn.LocalResponseNorm) for layer in layers), name


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_the_lstm_by_its_gates():
    """i, f, o = sigmoid, g = tanh of W x + U h + b; c <- f c + i g; h <- o tanh(c); the last layer's last h."""
    network = CharLSTM(vocabulary=5, embedding=3, hidden=4, layers=2).build((6,), 7).double()
    numbers = {name: value.detach().numpy() for name, value in network.named_parameters()}
    tokens = torch.tensor([[0, 3, 1, 4, 4, 2], [1, 1, 0, 2, 3, 0]])
    sequence = numbers["embedding.weight"][tokens.numpy()]
    for layer in range(2):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w, u, b, more = (numbers[f"lstm.{name}_l{layer}"] for name in names)
        h = c = np.zeros((2, 4))
        states = []
        for t in range(6):
            i, f, g, o = np.split(sequence[:, t] @ w.T + h @ u.T + b + more, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            states.append(h)
        sequence = np.stack(states, axis=1)
    wanted = sequence[:, -1] @ numbers["head.weight"].T + numbers["head.bias"]
    np.testing.assert_allclose(network(tokens).detach().numpy(), wanted, rtol=1e-9, atol=1e-12)


def filled(num_classes: int = 2) -> nn.Module:
    network = MeanEmbedding(vocabulary=4, embedding=2).build((4,), num_classes)
    with torch.no_grad():
        vectors = network.get_parameter("embedding.weight")
        vectors.copy_(torch.tensor([[8.0, -8.0], [1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]))
        network.get_parameter("head.weight").copy_(torch.tensor([[1.0, 10.0]] * (1 if num_classes == 2 else 3)))
        network.get_parameter("head.bias").fill_(0.5)
    return network


def test_the_mean_is_over_what_is_no_padding():
    # (1, 0) and (3, 4) have the mean (2, 2): 2 + 20 + 0.5.
    texts = torch.tensor([[1, 3, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]])
    assert filled()(texts).tolist() == [[0.0, 22.5], [0.0, 20.5], [0.0, 0.5]]
    assert filled(3)(texts)[0].tolist() == [22.5] * 3


def test_two_classes_have_the_loss_of_one_sigmoid():
    z = 0.7
    logits = torch.tensor([[0.0, z]])
    for label, wanted in ((1, math.log(1 + math.exp(-z))), (0, math.log(1 + math.exp(z)))):
        loss = nn.functional.cross_entropy(logits, torch.tensor([label])).item()
        assert loss == pytest.approx(wanted, rel=1e-6)


def test_a_block_of_the_vision_transformer_is_torchs():
    """torch's layer has queries, keys and values in one matrix."""
    torch.manual_seed(2)
    ours = EncoderBlock(width=12, heads=3, hidden=20).double()
    theirs = nn.TransformerEncoderLayer(12, 3, 20, 0.0, "gelu", batch_first=True, norm_first=True).double()
    parts = dict(ours.named_parameters())
    for kind in ("weight", "bias"):
        fused = torch.cat([parts[f"attention.{name}.{kind}"] for name in ("query", "key", "value")])
        getattr(theirs.self_attn, f"in_proj_{kind}").data = fused
    for mine, other in (
        ("attention.output", theirs.self_attn.out_proj), ("hidden", theirs.linear1), ("output", theirs.linear2),
        ("norm_attention", theirs.norm1), ("norm_mlp", theirs.norm2),
    ):  # fmt: skip
        other.load_state_dict(ours.get_submodule(mine).state_dict())
    tokens = torch.randn(4, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_patches_of_the_vision_transformer_are_in_reading_order():
    network = ViTTiny(patch=2, width=4, depth=1, heads=1).build((1, 4, 6), 3)
    seen = []
    network.get_submodule("blocks").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    image = torch.randn(1, 1, 4, 6)
    network(image)
    parts = dict(network.named_parameters())
    for row in range(2):
        for column in range(3):
            patch = image[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            expected = (parts["patches.weight"] * patch).sum((1, 2, 3)) + parts["patches.bias"]
            place = 1 + 3 * row + column
            torch.testing.assert_close(seen[0][0, place], expected + parts["positions"][place])
    torch.testing.assert_close(seen[0][0, 0], parts["class_token"] + parts["positions"][0])
