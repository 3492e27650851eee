"""The settings of a mixture of experts, as ``config_parts`` has those of the other parts."""

from dataclasses import dataclass
from typing import Literal, get_args

from .checks import check_choice, check_not_negative, check_positive
from .config_tree import Part

RouterKind = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Part):
    """The settings of how experts are chosen, and how their outputs are weighed.

    Raises:
        ValueError: a setting is out of its range.
    """

    router: RouterKind = "softmax"
    """What weighs experts: a softmax over all of them, one over the chosen alone (gpt-oss), or a
    sigmoid of each by itself (DeepSeek-V3)."""
    normalize_expert_weights: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    expert_weight_scale: float = 1.0
    """What the weights of experts are multiplied by at last (DeepSeek-V3)."""
    router_bias: bool = False
    """Whether the router's projection has a bias (gpt-oss)."""
    choice_bias: bool = False
    """Whether each expert has a number that is added to its score for the choice alone, and that no
    gradient changes (DeepSeek-V3)."""
    expert_groups: int = 1
    """How many groups the experts are in, of which some are chosen first (DeepSeek-V3)."""
    groups_per_token: int = 1
    """How many of these groups a token's experts are chosen from."""
    balance_loss: float = 0.0
    """What the loss of unequally used experts is multiplied by and added to the training loss;
    Mixtral has 0.001 to 0.02."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "router", get_args(RouterKind))
        check_positive(self, "expert_weight_scale", "expert_groups", "groups_per_token")
        check_not_negative(self, "balance_loss")
        if self.groups_per_token > self.expert_groups:
            raise ValueError(
                "groups_per_token must be at most expert_groups: got "
                f"groups_per_token={self.groups_per_token}, expert_groups={self.expert_groups}"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Part):
    """The settings of a mixture of experts: feed-forwards of which a router chooses a few.

    Raises:
        ValueError: a setting is out of its range, or does not fit the others.
    """

    num_experts: int | None = None
    """How many experts take the place of a feed-forward (arXiv 1701.06538); default none."""
    experts_per_token: int = 2
    """How many of them compute each token."""
    expert_d_ff: int | None = None
    """The width of each expert; default that of a feed-forward."""
    shared_expert_d_ff: int | None = None
    """The width of one more expert that computes every token; default none."""
    shared_expert_gate: bool = False
    """Whether that one's output is multiplied by a gate of its own (Qwen2)."""
    router: RouterConfig = RouterConfig()
    """How experts are chosen, and how their outputs are weighed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_experts", "experts_per_token", "expert_d_ff")
        check_positive(self, "shared_expert_d_ff")
        if self.shared_expert_gate and self.shared_expert_d_ff is None:
            raise ValueError("shared_expert_gate needs a shared_expert_d_ff: got None")
        if self.num_experts is None:
            return
        groups, chosen = self.router.expert_groups, self.router.groups_per_token
        if self.num_experts % groups or (groups > 1 and self.num_experts < 2 * groups):
            raise ValueError(
                "expert_groups must divide num_experts into groups of two or more: got "
                f"expert_groups={groups}, num_experts={self.num_experts}"
            )
        if self.experts_per_token > self.num_experts // groups * chosen:
            raise ValueError(
                "experts_per_token must be at most the experts of the chosen groups: got "
                f"experts_per_token={self.experts_per_token}, num_experts={self.num_experts}, "
                f"expert_groups={groups}, groups_per_token={chosen}"
            )
