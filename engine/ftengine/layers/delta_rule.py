"""The gated delta rule, token by token and in chunks.

Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464. Per head, with state S [Dk, Dv] and, for token t,
query q, key k, value v, decay g <= 0 (in log space) and rate b:

    S <- exp(g) S;   S <- S + k (b (v - k^T S))^T;   o = q^T S

Everything is float32. Queries and keys arrive normalised and queries scaled.
"""

from __future__ import annotations

import torch

CHUNK = 64


def recurrent_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token of B independent states, each updated in place.

    query, key [B, Dk]; value [B, Dv]; decay, rate [B]; state [B, Dk, Dv]. Returns [B, Dv].
    """
    state.mul_(decay.exp()[:, None, None])
    recalled = torch.bmm(key.unsqueeze(1), state)
    correction = (value.unsqueeze(1) - recalled).mul_(rate[:, None, None])
    state.baddbmm_(key.unsqueeze(2), correction)
    return torch.bmm(query.unsqueeze(1), state).squeeze(1)


def chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """T tokens of N heads. Within a chunk the corrections of all tokens solve one triangular system (the paper's
    WY form), so that the state is touched once a chunk.

    query, key [N, T, Dk]; value [N, T, Dv]; decay, rate [N, T]; state [N, Dk, Dv], updated in place.
    Returns [N, T, Dv].
    """
    tokens = query.shape[1]
    out = torch.empty_like(value)
    for start in range(0, tokens, CHUNK):
        rows = slice(start, min(start + CHUNK, tokens))
        out[:, rows] = _chunk(query[:, rows], key[:, rows], value[:, rows], decay[:, rows], rate[:, rows], state)
    return out


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    total = decay.cumsum(1)  # log of the decay from the chunk's start through each token, [N, C]
    between = (total.unsqueeze(2) - total.unsqueeze(1)).tril_()  # from token j (column) to token i >= j (row)
    between = between.exp_().tril_()
    from_start = total.exp().unsqueeze(2)

    # Token i corrects by u_i = b_i (v_i - what k_i recalls from the old state and from the corrections before it).
    recalled = torch.bmm(key * from_start, state)
    system = torch.bmm(key, key.transpose(1, 2)).mul_(between).mul_(rate.unsqueeze(2))
    wanted = (value - recalled).mul_(rate.unsqueeze(2))
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)

    attention = torch.bmm(query, key.transpose(1, 2)).mul_(between)
    out = torch.bmm(query * from_start, state).baddbmm_(attention, corrections)
    to_end = (total[:, -1:] - total).exp().unsqueeze(2)
    state.mul_(total[:, -1].exp()[:, None, None]).baddbmm_((key * to_end).transpose(1, 2), corrections)
    return out
