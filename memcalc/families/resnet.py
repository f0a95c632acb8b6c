"""ResNet (models/resnet/modeling_resnet.py, ResNetForImageClassification): stages of convolutions over shrinking images.

A configuration says nothing of the images' size: they are 224 × 224, as the published preprocessors make them. A batch has
no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.convolution import convolution
from memcalc.core.ops.elementwise import add_
from memcalc.core.ops.loss import cross_entropy
from memcalc.core.ops.norm import batch_norm
from memcalc.core.ops.pooling import adaptive_avg_pool2d, max_pool2d
from memcalc.core.ops.shape import view
from memcalc.families.base.blocks import act
from memcalc.families.base.config import Activation, Count, FamilyConfig, Labels, Layers
from memcalc.families.base.module import Buffer, Input, Module, Run, Weight, module
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor

IMAGE_SIZE: Final = 224
REDUCTION: Final = 4
KERNELS: Final = {size: Dim(str(size), size) for size in (3, 7)} | {1: ONE_DIM}


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(FamilyConfig):
    """The fields and defaults of models/resnet/configuration_resnet.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {
        "problem_type": (None, "single_label_classification"),
        "layer_types": (["basic", "bottleneck"],),  # what `layer_type` may be
    }

    num_channels: Count = 3
    embedding_size: Count = 64
    hidden_sizes: Sequence[Count] = (256, 512, 1024, 2048)
    depths: Sequence[Layers] = (3, 4, 6, 3)
    layer_type: Literal["basic", "bottleneck"] = "bottleneck"
    hidden_act: Activation = "relu"
    downsample_in_first_stage: bool = False
    downsample_in_bottleneck: bool = False
    num_labels: Labels = 2

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields with the number of labels, which is that of `id2label` (PreTrainedConfig.num_labels)."""
        named = super().renamed(config)
        names = named.get("id2label")
        if isinstance(names, dict):
            count = len(names)  # pyright: ignore[reportUnknownArgumentType]
            if named.get("num_labels") not in (None, count):
                raise ValueError(f"num_labels {named['num_labels']} is not the {count} labels of id2label")
            named["num_labels"] = count
        return named

    def check(self) -> None:
        super().check()
        if not self.depths or len(self.depths) != len(self.hidden_sizes):
            raise ValueError(f"depths has {len(self.depths)} entries, hidden_sizes {len(self.hidden_sizes)}")
        if self.layer_type == "bottleneck" and min(self.hidden_sizes) < REDUCTION:
            raise ValueError(
                f"hidden_sizes {min(self.hidden_sizes)} leaves a bottleneck no channels; allowed: 4 and more"
            )
        if self.downsamplings > 6:
            raise ValueError(f"depths has {len(self.depths)} stages, which leave one pixel of {IMAGE_SIZE}")

    @property
    def downsamplings(self) -> int:
        """Return how often pooling and stages halve an image's height and width after the first convolution."""
        return len(self.depths) + self.downsample_in_first_stage


@dataclass(frozen=True, slots=True)
class Convolution:
    """A ResNetConvLayer or ResNetShortCut: a convolution without a bias, then a batch norm."""

    name: str
    channels: tuple[Dim, Dim]
    kernel: Dim
    width: Dim
    activation: str | None


@dataclass(frozen=True, slots=True)
class Block:
    """A ResNetBasicLayer or ResNetBottleNeckLayer."""

    path: str
    number: int
    shortcut: Convolution | None
    convolutions: tuple[Convolution, ...]

    @property
    def all(self) -> Iterator[Convolution]:
        """Yield the block's convolutions in the order in which the module makes them."""
        if self.shortcut is not None:
            yield self.shortcut
        yield from self.convolutions


class ResNet(Program):
    """The program of ResNetForImageClassification."""

    cacheless = "does not generate"
    Config: type[FamilyConfig] = ResNetConfig
    attention_kinds = ("eager",)
    recomputes = False
    pads = False
    one_stack = False
    has_sequence = False
    loss_dtype = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.max_seq_len = 1
        self.image = Dim("image", IMAGE_SIZE)
        self.channels = Dim("image channels", config.num_channels)
        self.embed = Dim("embed", config.embedding_size)
        self.labels = Dim("labels", config.num_labels)
        channels = self.channels, self.embed
        self.stem = Convolution("embedder", channels, KERNELS[7], halved(self.image, 1), config.hidden_act)
        self.pooled = halved(self.image, 2)
        self.stages = tuple(self.made_stages())
        self.layers = sum(config.depths)

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        pixels = Input("pixel_values", (batch, self.channels, self.image, self.image))
        return pixels, Input("labels", (batch,), int64)

    def pattern(self) -> tuple[int, int] | None:
        """Return None: the stages differ in width, so all of them are run."""
        return None

    # --- what the configuration makes

    @property
    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of all stages."""
        for blocks in self.stages:
            yield from blocks

    def made_stages(self) -> Iterator[tuple[Block, ...]]:
        """Yield the blocks of each stage, as ResNetEncoder makes them. The first block of a stage downsamples, except in the
        first stage."""
        config, halvings, before = self.config, 2, self.embed
        for stage, (channels, depth) in enumerate(zip(config.hidden_sizes, config.depths, strict=True)):
            stage_channels = Dim("channels", channels)
            reduced = Dim("channels/4", channels // REDUCTION)
            blocks: list[Block] = []
            for number in range(depth):
                downsamples = number == 0 and (stage > 0 or config.downsample_in_first_stage)
                path = f"resnet.encoder.stages.{stage}.layers.*"
                through = before, reduced, stage_channels
                blocks.append(self.made_block(path, number, through, halvings, downsamples=downsamples))
                halvings += downsamples
                before = stage_channels
            yield tuple(blocks)

    def made_block(
        self, path: str, number: int, channels: tuple[Dim, Dim, Dim], halvings: int, *, downsamples: bool
    ) -> Block:
        before, reduced, after = channels
        wide, narrow = halved(self.image, halvings), halved(self.image, halvings + downsamples)
        shortcut = None
        if before.size != after.size or downsamples:
            shortcut = Convolution("shortcut", (before, after), KERNELS[1], narrow, None)
        if self.config.layer_type == "basic":
            kernels, through, widths = (3, 3), (before, after, after), (narrow, narrow)
        else:
            first = narrow if self.config.downsample_in_bottleneck else wide
            kernels, through, widths = (1, 3, 1), (before, reduced, reduced, after), (first, narrow, narrow)
        last = len(kernels) - 1
        convolutions = tuple(
            Convolution(
                f"layer.{i}", (through[i], through[i + 1]), KERNELS[size], widths[i], "relu" if i < last else None
            )
            for i, size in enumerate(kernels)
        )
        return Block(path, number, shortcut, convolutions)

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        yield from convolution_weights("resnet.embedder", self.stem, None)
        for block in self.blocks:
            for made in block.all:
                yield from convolution_weights(block.path, made, block.number)
        last = self.stages[-1][-1].convolutions[-1].channels[1]
        yield Weight("classifier.1.weight", (self.labels, last), "head")
        yield Weight("classifier.1.bias", (self.labels,), "head")

    def buffers(self) -> Iterator[Buffer]:
        yield from statistics("resnet.embedder", self.stem, None)
        for block in self.blocks:
            for made in block.all:
                yield from statistics(block.path, made, block.number)

    # --- forward

    def forward(self, run: Run, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Return ResNetForImageClassification.forward(pixel_values=pixel_values, labels=labels).loss."""
        root = Module(run, "")
        _last_hidden_state, pooled_output = self.model(root / "resnet", pixel_values)
        run.memory.scope = "classifier"
        logits = (root / "classifier.1").linear(view(pooled_output, *pooled_output.shape[:2]))
        run.memory.scope = "loss"
        return cross_entropy(view(logits, *logits.shape), view(labels, *labels.shape))

    @module
    def model(self, m: Module, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return ResNetModel.forward."""
        embedding_output = self.embedder(m / "embedder", pixel_values)
        last_hidden_state = self.encoder(m / "encoder", embedding_output)
        m.memory.scope = "resnet.pooler"
        return last_hidden_state, adaptive_avg_pool2d(last_hidden_state)

    @module
    def embedder(self, m: Module, pixel_values: Tensor) -> Tensor:
        embedding = self.convolved(m / "embedder", pixel_values, self.stem)
        return max_pool2d(embedding, self.pooled, self.pooled)

    @module
    def encoder(self, m: Module, hidden_state: Tensor) -> Tensor:
        for blocks in self.stages:
            hidden_state = self.stage(m, hidden_state, blocks)
        m.memory.enter(m.memory.phase, None)
        return hidden_state

    @module
    def stage(self, m: Module, hidden_state: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Return ResNetStage.forward."""
        for block in blocks:
            m.memory.enter(m.memory.phase, block.number)
            hidden_state = self.call(self.layer, Module(m.run, block.path, block.number), hidden_state, block)
        return hidden_state

    @module
    def layer(self, m: Module, hidden_state: Tensor, block: Block) -> Tensor:
        """Return ResNetBasicLayer.forward or ResNetBottleNeckLayer.forward."""
        residual = hidden_state
        for made in block.convolutions:
            hidden_state = self.convolved(m / made.name, hidden_state, made)
        if block.shortcut is not None:
            residual = self.convolved(m / "shortcut", residual, block.shortcut)
        hidden_state = add_(hidden_state, residual)
        return act(hidden_state, self.config.hidden_act)

    @module
    def convolved(self, m: Module, hidden_state: Tensor, made: Convolution) -> Tensor:
        """Return ResNetConvLayer.forward or ResNetShortCut.forward."""
        with m / "convolution" as conv:
            hidden_state = convolution(hidden_state, conv.weight(), None, made.width, made.width)
        with m / "normalization" as norm:
            running = norm.buffer("running_mean"), norm.buffer("running_var")
            hidden_state = batch_norm(hidden_state, norm.weight(), norm.weight("bias"), *running)
        return hidden_state if made.activation is None else act(hidden_state, made.activation)


@lru_cache(maxsize=1024)
def halved(image: Dim, times: int) -> Dim:
    """Return an image's height or width after so many convolutions or poolings of stride 2. Each rounds up."""
    size = image.size
    for _ in range(times):
        size = (size + 1) // 2
    return Dim(f"image/{2**times}", size)


def convolution_weights(path: str, made: Convolution, layer: int | None) -> Iterator[Weight]:
    """Yield the parameters of an nn.Conv2d without a bias and of an nn.BatchNorm2d."""
    before, after = made.channels
    name = f"{path}.{made.name}"
    yield Weight(f"{name}.convolution.weight", (after, before, made.kernel, made.kernel), "convolution", layer)
    for weight in norm_weights(f"{name}.normalization", after):
        yield weight._replace(layer=layer)


def statistics(path: str, made: Convolution, layer: int | None) -> Iterator[Buffer]:
    """Yield the buffers of an nn.BatchNorm2d."""
    name, channels = f"{path}.{made.name}.normalization", made.channels[1]
    yield Buffer(f"{name}.running_mean", (channels,), layer=layer)
    yield Buffer(f"{name}.running_var", (channels,), layer=layer)
    yield Buffer(f"{name}.num_batches_tracked", (), int64, layer=layer)


FAMILY: Final = Family(
    "resnet", ResNet, Support(tensor_parallel={}, auto_class="AutoModelForImageClassification", batch="images")
)
