"""A round of generation with a draft: which of its proposals a model accepts.

Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192,
section 2.3.
"""

import torch


def accept_proposals(
    model_BLV: torch.Tensor, draft_BKV: torch.Tensor, tokens_BK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how likely each proposal is accepted, and what is drawn where the first is not.

    Proposal x of a draft with probabilities q is accepted with probability min(1, p(x) / q(x)), p
    being the model's; else a token is drawn from max(0, p - q), normalised. A token made in this
    way has the probabilities p (arXiv 2211.17192, appendix A.1).

    Args:
        model_BLV: p of the tokens at the K places, and at one more: L = K + 1.
        draft_BKV: q of those at the K places.
        tokens_BK: the proposals, drawn from q.

    Returns:
        Probabilities of acceptance (B, K), and at each place (B, L, V) those of the token that is
        drawn there if it is the first without an accepted proposal; after the last, p itself.
    """
    p_BK, q_BK = (
        x.gather(-1, tokens_BK[..., None])[..., 0] for x in (model_BLV[:, :-1], draft_BKV)
    )
    rest_BKV = (model_BLV[:, :-1] - draft_BKV).clamp(min=0)
    sum_BK1 = rest_BKV.sum(dim=-1, keepdim=True)
    # Where p = q nothing is rejected, and nothing is left to draw from.
    rest_BKV = torch.where(sum_BK1 > 0, rest_BKV / sum_BK1, model_BLV[:, :-1])
    return (p_BK / q_BK).clamp(max=1), torch.cat((rest_BKV, model_BLV[:, -1:]), dim=1)
