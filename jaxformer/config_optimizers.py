"""The settings of optimizers, and the one table of those that there are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from .checks import check_choice, check_not_negative, check_numbers, check_positive, check_rate

Optimizer = Literal["adamw", "muon", "lion", "adafactor", "sgd"]
Schedule = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of an optimizer beside its formula.

    Attributes:
        title: its name, for people.
        moments: what it keeps of parameters: optax's name, and torch's.
        least: how many numbers it keeps of each number of a matrix, at least.
        momentum: the default of ``momentum``; None if it has none.
    """

    title: str
    moments: Mapping[str, str]
    least: int
    momentum: float | None = None


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind("AdamW", {"mu": "exp_avg", "nu": "exp_avg_sq"}, 2),
    # The second moment is AdamW's, of the parameters that Muon leaves to it.
    "muon": OptimizerKind("Muon", {"mu": "exp_avg", "nu": "exp_avg_sq"}, 1, momentum=0.95),
    "lion": OptimizerKind("Lion", {"mu": "exp_avg"}, 1),
    "adafactor": OptimizerKind(
        "Adafactor", {"v_row": "row_var", "v_col": "col_var", "v": "variance"}, 0
    ),
    "sgd": OptimizerKind("SGD", {"trace": "momentum_buffer"}, 1, momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of an update: the loss, the optimizer, its schedule, clipping and averages.

    The defaults are nanoGPT's for a character model. With ``decay_steps`` None the rate stays as it
    is after warm-up.

    Raises:
        ValueError: a setting is out of its range or not finite, or the optimizer has no use for it.
    """

    optimizer: Optimizer = "adamw"
    """What makes updates of gradients. Muon is for the matrices of the blocks, and AdamW for the
    rest. Lion wants a learning rate 3 to 10 times smaller than AdamW, Adafactor and SGD a much
    larger one."""
    learning_rate: float = 1e-3
    """The learning rate after warm-up."""
    schedule: Schedule = "cosine"
    """How the rate falls after warm-up: along half a cosine, along a line, not at all, or along a
    line in the last steps (warm-up, stable, decay; see decay_share)."""
    decay_share: float = 0.2
    """With the schedule wsd: the share of the steps after warm-up in which the rate falls."""
    min_learning_rate: float = 1e-4
    """The learning rate at the end of the cosine."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    decay_steps: int | None = None
    """The step at which the cosine ends; train.py takes the number of steps."""
    weight_decay: float = 0.1
    """On matrices and embeddings only; decoupled, but for SGD, which adds it to the gradient."""
    beta1: float = 0.9
    """The decay of AdamW's first moment; of Lion, the weight of its moment in an update."""
    beta2: float = 0.99
    """The decay of AdamW's second moment, and of Lion's moment."""
    momentum: float | None = None
    """The momentum of Muon (default 0.95) and of SGD (default 0.9)."""
    eps: float = 1e-8
    """What is added to the root of AdamW's second moment, and to the norm of Muon's matrices."""
    clip_norm: float | None = 1.0
    """The bound on the norm of all gradients together; None clips nothing."""
    z_loss: float = 0.0
    """What the square of log Σ exp(logits) is multiplied by and added to the training loss; PaLM
    has 1e-4."""
    label_smoothing: float = 0.0
    """The share of the training targets' distribution that is spread over the whole vocabulary."""
    ema: float | None = None
    """The decay of an exponential moving average of the weights, such as 0.999, which is evaluated,
    sampled from and ported in their place; None keeps none."""
    noise_scale: bool = False
    """Measure the gradient noise scale: the batch size up to which twice the batch nearly halves
    the steps. Needs micro-batches, or devices under pmap."""

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "learning_rate", "eps", "clip_norm", "decay_steps")
        check_not_negative(self, "min_learning_rate", "warmup_steps", "weight_decay")
        check_not_negative(self, "z_loss")
        for name in ("beta1", "beta2", "label_smoothing"):
            check_rate(self, name)
        check_choice(self, "schedule", get_args(Schedule))
        check_choice(self, "optimizer", get_args(Optimizer))
        if not 0 < self.decay_share <= 1:
            raise ValueError(f"decay_share must be in (0, 1]: got {self.decay_share}")
        if self.momentum is not None:
            if self.kind.momentum is None:
                raise ValueError(
                    "momentum must be left out but with muon and sgd: got "
                    f"{self.momentum}, optimizer={self.optimizer!r}"
                )
            check_rate(self, "momentum")
        if self.ema is not None:
            check_rate(self, "ema")

    @property
    def kind(self) -> OptimizerKind:
        """What is known of its optimizer."""
        return OPTIMIZERS[self.optimizer]

    @property
    def momentum_rate(self) -> float:
        """``momentum`` where it is given, else the optimizer's default; 0 if it has none."""
        return (self.kind.momentum or 0.0) if self.momentum is None else self.momentum
