"""Models by name, one file per family. The `build` of a frozen `Architecture` makes the module for a dataset."""

from rayfl.models.base import Architecture
from rayfl.models.convolutional import EMNISTCNN, VGG11, AlexNetMCEPL, ConvNet2
from rayfl.models.dense import MLP, Logistic
from rayfl.models.residual import ResNet18, ResNet20
from rayfl.models.text import CharLSTM, MeanEmbedding

__all__ = [
    "EMNISTCNN",
    "MLP",
    "VGG11",
    "AlexNetMCEPL",
    "Architecture",
    "CharLSTM",
    "ConvNet2",
    "Logistic",
    "MeanEmbedding",
    "ResNet18",
    "ResNet20",
]
