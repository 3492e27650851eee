"""The settings of a training run, free of JAX."""

import dataclasses
import math
import os
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from jaxformer.checks import check_integers, check_types
from jaxformer.config import EncoderDecoderConfig, OptimizerConfig, TransformerLMConfig
from jaxformer.config_tree import flatten, from_dict, setting_types
from jaxformer.errors import suggest

# Writing so many takes minutes; a larger number is likely a typing error.
MAX_SAMPLE_TOKENS = 100_000
# A source of a mixture and its share.
MIXED = re.compile(r"(.+):(\d+\.?\d*|\.\d+)")


def depends_on_other_documents(model: TransformerLMConfig) -> str | None:
    """Returns why a document's numbers would depend on those beside it in a row, if they would."""
    position = model.position
    scaling = position.rotary.scaling
    grows = scaling.rotary_scaling in ("dynamic", "longrope")
    if (
        position.positions == "rotary"
        and grows
        and model.context_length > scaling.rotary_original_context_length
    ):
        return (
            f"rotary_scaling={scaling.rotary_scaling!r} follows the length of the longest document"
        )
    if position.positions == "alibi" and position.alibi_in_bfloat16:
        return "alibi_in_bfloat16 rounds by a key's place in the row"
    return None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run: model, optimizer, data, devices and intervals.

    Lengths are in optimizer steps. ``batch_size`` counts the windows of one step over all devices
    and micro-batches.

    Raises:
        ValueError: a setting is out of its range or does not fit the others.
    """

    model: TransformerLMConfig
    """The model: GPT, LLaMA, BERT and character models are values of its settings."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """An update: the loss, the optimizer, its schedule, clipping and averages."""
    data: str = "python-docs"
    """A corpus by name (python-docs, tiny-shakespeare), a text file by path, or a folder of tokens
    (of jaxformer tokenize or nanoGPT). Several folders, each with its share, are mixed:
    --data A:0.7 --data B:0.3."""
    encoding: str = "utf-8"
    """The encoding of a text file."""
    tokenizer: str | None = None
    """What makes tokens of a text: a tokenizer.json, a folder of Hugging Face, chars, or bytes;
    default its characters, or the tokenizer of the model that a run starts from."""
    block_size: int | None = None
    """Tokens in a window; default the model's context length."""
    steps: int = 2000
    """How many optimizer steps to make."""
    resident_tokens: int = 1 << 24
    """Tokens of a folder that may lie on every device, in four bytes each; more are read from the
    disk as they are needed, which changes no number."""
    sampling: Literal["random", "epoch"] = "random"
    """How windows are drawn: at random, or each once in every epoch."""
    packing: bool = False
    """Fill windows with whole documents, each of which is trained on as if it were alone; with
    --sampling epoch, on a folder of jaxformer tokenize."""
    seed: int = 1337
    """Seed of initial weights, batches and dropout."""
    batch_size: int = 12
    """Windows per step, over all devices and micro-batches."""
    accumulation: int = 1
    """Micro-batches per step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forward and backward pass; parameters and optimizer are float32."""
    remat: Literal["none", "dots", "full"] = "none"
    """What each block recomputes for its gradient to save memory: nothing, all but the products
    with its weights, or everything."""
    scan_layers: bool = False
    """Run the blocks by one loop, so that a deep model compiles as fast as a shallow one."""
    attention_kernel: Literal["auto", "plain", "cudnn", "splash"] = "auto"
    """What computes attention: the fastest that can, or the one named."""
    products: Literal["auto", "xla", "jaxformer", "torch"] = "auto"
    """What computes products with the model's matrices on a CPU: XLA, jaxformer's own code (needs a
    C compiler), the library that torch brings along (needs torch too), or the fastest of them,
    which is measured once. A resumed run keeps what it began with."""
    devices: int | None = None
    """How many devices of each process to use; default all."""
    strategy: Literal["pmap", "mesh"] = "pmap"
    """How devices share the work: each holds the whole model and a part of the batch, or they form
    a mesh of data x fsdp x tensor, over which model and batch are split."""
    fsdp: int = 1
    """Devices in a row of the mesh that each hold a part of every matrix and of the batch."""
    tensor: int = 1
    """Devices in a row of the mesh that share attention's heads and the feed-forward's width. What
    fsdp, expert and tensor leave of the devices is the mesh's data axis."""
    expert: int = 1
    """Devices in a row of the mesh that each hold some of the experts, whole, and a part of the
    batch."""
    steps_per_call: int = 50
    """Steps that one call of the compiled function makes at most, in about a second. On a GPU
    a call costs some milliseconds beside its steps."""
    eval_interval: int = 250
    """Steps between evaluations, each over the whole validation split, with a text sample."""
    eval_tokens: int | None = None
    """Tokens of the validation split to evaluate, from its beginning; default all of them."""
    eval_batch_size: int | None = None
    """Windows that one call of the evaluation takes on each device; default what suits it."""
    sample_tokens: int = 200
    """Characters written at every evaluation; 0 writes none."""
    checkpoint_interval: int = 250
    """Steps between checkpoints."""
    keep: int = 3
    """How many of the latest checkpoints stay, beside the best."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data must name a corpus, a text file or a folder of tokens: got ''")
        for name in (
            "steps", "batch_size", "accumulation", "devices", "steps_per_call", "eval_interval",
            "eval_batch_size", "checkpoint_interval", "keep", "fsdp", "tensor", "expert",
            "block_size", "eval_tokens", "resident_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive: got {value}")
            check_integers(self, name)
        if not 0 <= self.sample_tokens <= MAX_SAMPLE_TOKENS:
            must = (
                "not be negative" if self.sample_tokens < 0 else f"be at most {MAX_SAMPLE_TOKENS}"
            )
            raise ValueError(f"sample_tokens must {must}: got {self.sample_tokens}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2^63): got {self.seed}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16: got {self.dtype!r}")
        if self.sampling not in ("random", "epoch"):
            raise ValueError(f"sampling must be random or epoch: got {self.sampling!r}")
        if self.remat not in ("none", "dots", "full"):
            raise ValueError(f"remat must be none, dots or full: got {self.remat!r}")
        if self.attention_kernel not in ("auto", "plain", "cudnn", "splash"):
            raise ValueError(
                "attention_kernel must be auto, plain, cudnn or splash: got "
                f"{self.attention_kernel!r}"
            )
        if self.products not in ("auto", "xla", "jaxformer", "torch"):
            raise ValueError(
                f"products must be auto, xla, jaxformer or torch: got {self.products!r}"
            )
        if self.model.head.head == "none":
            raise ValueError("training needs a model with a head: got head='none'")
        if self.batch_size % self.accumulation:
            raise ValueError(
                "batch_size must be divisible by accumulation: got "
                f"batch_size={self.batch_size}, accumulation={self.accumulation}"
            )
        if self.window > self.model.context_length:
            raise ValueError(
                "block_size must be at most the model's context_length: got "
                f"block_size={self.block_size}, context_length={self.model.context_length}"
            )
        if any(share <= 0 for _, share in self.mixture):
            raise ValueError(f"the shares of data must be positive: got {self.data!r}")
        if self.packing:
            self._check_packing()
        self._check_mesh()

    @property
    def window(self) -> int:
        """How many tokens a window has."""
        return self.block_size or self.model.context_length

    @property
    def mixture(self) -> tuple[tuple[str, float], ...]:
        """The folders of a mixture, each with its share; empty if there is one source.

        They stand in ``data`` as ``A:0.7, B:0.3``.
        """
        parts = [MIXED.fullmatch(part) for part in self.data.split(", ")]
        if len(parts) < 2 or None in parts:
            return ()
        return tuple((part[1], float(part[2])) for part in parts if part is not None)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """How many tokens a row has room for: those of a window; of pairs of target and source."""
        return (self.window,)

    @property
    def tokens_per_row(self) -> int:
        """How many tokens a row of a batch has room for, in all."""
        return sum(self.row_lengths)

    @property
    def data_is_tokens(self) -> bool:
        """Whether ``data`` is a folder of tokens or several, and not a text."""
        if self.mixture:
            return True
        files = ("index.json", "train.bin", "val.bin")
        return any(os.path.isfile(os.path.join(self.data, file)) for file in files)

    def _check_packing(self) -> None:
        if self.sampling != "epoch":
            raise ValueError(f"packing needs sampling='epoch': got sampling={self.sampling!r}")
        if self.attention_kernel not in ("auto", "plain"):
            raise ValueError(
                "packing needs attention_kernel='auto' or 'plain', as the others keep attention in "
                f"no documents: got {self.attention_kernel!r}"
            )
        reason = depends_on_other_documents(self.model)
        if reason is not None:
            raise ValueError(f"packing cannot keep this model's attention in documents: {reason}")

    def _check_mesh(self) -> None:
        if self.strategy not in ("pmap", "mesh"):
            raise ValueError(f"strategy must be pmap or mesh: got {self.strategy!r}")
        if self.strategy == "pmap" and (self.fsdp, self.tensor, self.expert) != (1, 1, 1):
            more = f", expert={self.expert}" if self.expert != 1 else ""
            raise ValueError(
                f"fsdp and tensor{' and expert' if more else ''} need strategy='mesh': got "
                f"strategy='pmap', fsdp={self.fsdp}, tensor={self.tensor}{more}"
            )
        experts = self.model.feed_forward.experts.num_experts
        if self.expert > 1 and (experts is None or experts % self.expert):
            raise ValueError(
                f"num_experts must be divisible by expert: got num_experts={experts}, "
                f"expert={self.expert}"
            )
        heads, widths = self.model.attention.num_heads, self._widths()
        if any(number % self.tensor for number in (heads, *widths)):
            common = math.gcd(heads, *widths)
            choices = [n for n in range(1, common + 1) if common % n == 0]
            raise ValueError(
                "num_heads and the feed-forward's width must be divisible by tensor: got "
                f"num_heads={heads}, width {' and '.join(map(str, widths))}, "
                f"tensor={self.tensor}; use " + ", ".join(map(str, choices))
            )

    def _widths(self) -> list[int]:
        """Returns the widths of the model's feed-forwards and experts, each once."""
        model, experts = self.model, self.model.feed_forward.experts
        layers = model.num_layers if isinstance(model, TransformerLMConfig) else 1
        kinds = {model.has_experts(layer) for layer in range(layers)}
        widths = [model.feed_forward_width] if False in kinds else []
        if True in kinds:
            shared = experts.shared_expert_d_ff
            widths += [model.expert_width, *([] if shared is None else [shared])]
        return list(dict.fromkeys(widths))

    def with_model(self, model: TransformerLMConfig | EncoderDecoderConfig) -> "TrainConfig":
        """Returns the same settings with another model, which decides of which class they are."""
        cls = class_of(model.settings())
        names = [field.name for field in dataclasses.fields(cls)]
        own: dict[str, Any] = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return cls(**{**own, "model": model})

    def replace(self, **settings: Any) -> "TrainConfig":
        """Returns a copy in which these settings differ, each by its own name.

        Those of the model and of the optimizer are taken too, as the command line takes them:
        ``replace(steps=50, num_layers=2, learning_rate=1e-3, optimizer="muon")``.

        Raises:
            ValueError: a setting is unknown, of another type, out of its range or does not fit the
                others.
        """
        own = {field.name for field in dataclasses.fields(self)}
        parts: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        chosen: dict[str, Any] = {}
        for name, given in settings.items():
            value = tuple(given) if isinstance(given, list) else given
            value = str(value) if isinstance(value, PurePath) else value
            # A name of an optimizer is a setting of the part of the same name.
            if name in own and not (name == "optimizer" and isinstance(value, str)):
                chosen[name] = value
            elif name in setting_types(OptimizerConfig):
                parts["optimizer"][name] = value
            else:
                parts["model"][name] = value
        types = typing.get_type_hints(type(self)) | {"model": object, "optimizer": object}
        unknown = parts["model"].keys() - setting_types(type(self.model))
        if unknown:
            known = {*types, *setting_types(OptimizerConfig), *setting_types(type(self.model))}
            raise _unknown_settings(unknown, known)
        check_types(types, {n: value for n, value in chosen.items() if types[n] is not object})
        check_types(setting_types(OptimizerConfig), parts["optimizer"])
        check_types(setting_types(type(self.model)), parts["model"])
        model = chosen.pop("model", self.model).replace(**parts["model"])
        optimizer = chosen.pop("optimizer", self.optimizer)
        optimizer = dataclasses.replace(optimizer, **parts["optimizer"])
        return dataclasses.replace(self, model=model, optimizer=optimizer, **chosen)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as a plain dict, for JSON: those of the model by name, in one."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own, "model": self.model.settings(), "optimizer": flatten(self.optimizer)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Returns the settings that ``to_dict`` has made a dict of.

        Raises:
            ValueError: a key is unknown or missing, or a value is not valid.
        """
        if not isinstance(values, dict):
            raise ValueError(f"TrainConfig must be an object: got {type(values).__name__}")
        cls = class_of(values.get("model"))
        types = typing.get_type_hints(cls)
        model = from_dict(types["model"], values.get("model", {}))
        optimizer = from_dict(OptimizerConfig, values.get("optimizer", {}))
        own = {name: value for name, value in values.items() if name not in ("model", "optimizer")}
        own = {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()}
        if unknown := own.keys() - types.keys():
            raise _unknown_settings(unknown, types)
        check_types(types, own)
        return cls(model=model, optimizer=optimizer, **own)


@dataclass(frozen=True, kw_only=True)
class PairTrainConfig(TrainConfig):
    """The settings of a run that fine-tunes an encoder and decoder on sources and targets.

    A window is here a target, and ``batch_size`` counts pairs.

    Raises:
        ValueError: a setting is out of its range or does not fit the others.
    """

    model: EncoderDecoderConfig  # type: ignore[assignment]
    """The model: T5, BART and their kin are values of its settings."""
    block_size: int | None = None
    """Tokens of a target in a row; default as many as the longest has."""
    source_length: int | None = None
    """Tokens of a source in a row; default as many as the longest has."""
    target_begin: tuple[int, ...] = ()
    """The id that the decoder starts with, and perhaps the one that always follows it, such as that
    of a language; default those that the model's files name."""
    truncate: bool = False
    """Cut sources and targets that are longer than a row; by default they are rejected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source_length is not None and self.source_length <= 0:
            raise ValueError(f"source_length must be positive: got {self.source_length}")
        check_integers(self, "source_length")
        if self.source_room > self.model.context_length:
            raise ValueError(
                "source_length must be at most the model's context_length: got "
                f"source_length={self.source_length}, context_length={self.model.context_length}"
            )
        if self.packing:
            raise ValueError("packing is of language models: got an encoder and decoder")
        if not self.model.causal:
            raise ValueError("training needs a causal decoder: got causal=False")
        if self.model.feed_forward.experts.num_experts is not None:
            raise ValueError("experts are trained in language models: got an encoder and decoder")
        if len(self.target_begin) > 2:
            raise ValueError(f"target_begin must be one id or two: got {self.target_begin}")
        size = self.model.target_vocab_size
        if wrong := [i for i in self.target_begin if not 0 <= i < size]:
            raise ValueError(f"target_begin must be ids in [0, {size}): got {wrong[0]}")

    @property
    def source_room(self) -> int:
        """How many tokens of a source a row has room for."""
        return self.source_length or self.model.context_length

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """See ``TrainConfig``."""
        return self.window, self.source_room

    def _check_mesh(self) -> None:
        super()._check_mesh()
        if self.model.encoder is not self.model:
            # Its encoder has heads or a width of its own.
            dataclasses.replace(self, model=self.model.encoder)


def class_of(model: Any) -> type[TrainConfig]:
    """Returns the class of the settings of a run.

    Args:
        model: the settings of its model by name.
    """
    is_pairs = isinstance(model, Mapping) and "source_vocab_size" in model
    return PairTrainConfig if is_pairs else TrainConfig


def _unknown_settings(unknown: Iterable[str], known: Iterable[str]) -> ValueError:
    """Returns the error for settings that do not exist, each with the one that it is most like."""
    named = (f"{name}{suggest(name, known)}" for name in sorted(unknown))
    return ValueError(f"unknown TrainConfig settings: {', '.join(named)}")
