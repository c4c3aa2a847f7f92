"""What bench_step.py trains: models that return the loss of a batch, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedshard.demo.model import GPT, Batches, load_corpus, standard_library

Batch = tuple[Tensor, ...]


class Bottleneck(nn.Module):
    """A residual block of ResNet-50, its stride in the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.branch = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, outputs, 1),
        )
        # Begun as the identity, as is usual: without that, of a few images, a change of rounding
        # soon makes another loss.
        nn.init.zeros_(self.branch[-1].get_parameter("weight"))
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.extend(_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Without a bias, normalized."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(outputs)


class ResNet(nn.Module):
    """ResNet-50 by default: the mean cross-entropy of images (batch, 3, height, width)."""

    def __init__(
        self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        self.blocks, channels = nn.Sequential(), width
        for stage, depth in enumerate(depths):
            for place in range(depth):
                stride = 2 if stage and not place else 1
                self.blocks.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * width << stage
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean(dim=(2, 3))
        return F.cross_entropy(self.head(features), labels)


class SmallLayer(nn.Module):
    """Two small parameters, and next to nothing to compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.linear(x))


class SmallTensors(nn.Module):
    """Many layers of two small parameters each, in blocks: the mean square error."""

    def __init__(self, blocks: int = 10, layers: int = 50, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(*(SmallLayer(width) for _ in range(layers))) for _ in range(blocks))
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(inputs), targets)


@cache
def _text() -> bytes:
    return load_corpus(standard_library())


def text_batches(batch: int, window: int, rank: int, ranks: int) -> Iterator[Batch]:
    source = Batches(_text(), rank, ranks, 0, batch, window)
    while True:
        yield source.next()


def image_batches(batch: int, pixels: int, classes: int, rank: int, ranks: int) -> Iterator[Batch]:
    """Noise, with labels that mean nothing."""
    values = torch.Generator().manual_seed(rank)
    while True:
        images = torch.randn(batch, 3, pixels, pixels, generator=values)
        yield images, torch.randint(classes, (batch,), generator=values)


def vector_batches(batch: int, width: int, rank: int, ranks: int) -> Iterator[Batch]:
    """To be reversed."""
    values = torch.Generator().manual_seed(rank)
    while True:
        inputs = torch.randn(batch, width, generator=values)
        yield inputs, inputs.flip(1)


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        build: the model, whose `blocks` FSDP2 shards one by one.
        batches: of a rank, given its number and theirs.
        learning_rate: so small that rounding is not amplified to another loss.
        steps: of a variant's turn in a round.
        repeats: rounds.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]
    learning_rate: float
    steps: int
    repeats: int

    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())


MODELS = ("gpt17m", "gpt124m", "resnet50", "small_tensors")


def workloads(device: str = "cpu") -> dict[str, Workload]:
    """The real ones: on CPUs with batches so small that communication and update weigh most."""
    gpu = device != "cpu"
    texts, window = (8, 512) if gpu else (1, 32)
    images, pixels = (64, 224) if gpu else (4, 64)
    return {
        "gpt17m": Workload(
            partial(GPT, width=448, depth=7, heads=7, context=window),
            partial(text_batches, texts, window),
            learning_rate=1e-3,
            steps=3,
            repeats=15,
        ),
        "gpt124m": Workload(
            partial(GPT, width=768, depth=12, heads=12, context=1024, vocabulary=50257),
            partial(text_batches, texts, window),
            learning_rate=1e-4,
            steps=1,
            repeats=7,
        ),
        "resnet50": Workload(
            ResNet,
            partial(image_batches, images, pixels, 1000),
            learning_rate=1e-4,
            steps=2,
            repeats=9,
        ),
        "small_tensors": Workload(
            SmallTensors, partial(vector_batches, 8, 16), learning_rate=1e-3, steps=3, repeats=15
        ),
    }


def small_workloads() -> dict[str, Workload]:
    """The same kinds of models, small enough to see within a second whether they run."""
    brief = {"steps": 2, "repeats": 2}
    return {
        "gpt17m": Workload(
            partial(GPT, width=64, depth=2, heads=2, context=16),
            partial(text_batches, 1, 16),
            learning_rate=1e-3,
            **brief,
        ),
        "gpt124m": Workload(
            partial(GPT, width=64, depth=1, heads=1, context=32, vocabulary=1000),
            partial(text_batches, 1, 16),
            learning_rate=1e-4,
            **brief,
        ),
        "resnet50": Workload(
            partial(ResNet, (1, 1), width=8, classes=10),
            partial(image_batches, 4, 16, 10),
            learning_rate=1e-4,
            **brief,
        ),
        "small_tensors": Workload(
            partial(SmallTensors, blocks=2, layers=5),
            partial(vector_batches, 8, 16),
            learning_rate=1e-3,
            **brief,
        ),
    }
