"""Block verification (`--verification block`): all K tokens together (Sun et al. 2024,
arXiv:2403.10444). It keeps the target's distribution, too, and accepts more tokens.

P(k) is then no a^k (1 - a), so there is no a to report, and Theorem 12's shape and `--backup auto`
are those of the paper's rule. A token's place in its round is not settled before it is drawn. Yet
the tokens of each place are distributed as the target's, because where a round ended earlier, the
next one begins with a fresh draw.
"""
import torch

from ideas import VERIFICATIONS
from sampling import inverse_cdf, point_mass, residual


def block_verify(p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor,
                 uniforms: torch.Tensor, draw=inverse_cdf) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify as `sampling.verify` does, whose arguments and results these are; `draw` draws
    the bonus token, as `inverse_cdf` does. With w_0 = 1 and

        w_i = min(1, w_(i-1) p_i(s_i) / q_i(s_i))
        S_i = sum_x max(w_i p_(i+1)(x) - q_(i+1)(x), 0),   where q_(K+1) = 0, so that S_K = w_K

    k is the *largest* i whose uniform number is below S_i / (S_i + 1 - w_i), or 0. The bonus token
    is drawn in proportion to max(w_k p_(k+1) - q_(k+1), 0). So after s_1..s_i at least i tokens are
    accepted with probability w_i, which is never less than by `sampling.verify`.

    >>> p = torch.tensor([1/2, 1/4, 1/4]).expand(100_000, 3, 3)
    >>> q = torch.tensor([1/8, 3/4, 1/8]).expand(100_000, 2, 3)
    >>> uniforms = torch.rand(100_000, 5, generator=torch.Generator().manual_seed(0)).double()
    >>> tokens = inverse_cdf(q, uniforms[:, :2])
    >>> for rule in VERIFICATIONS["token"], block_verify:  # 1/2, 1/4, 1/4 and 1/2, 5/32, 11/32
    ...     k, bonus = rule(p, tokens, q, uniforms[:, 2:])
    ...     print([round(n / 100_000, 2) for n in k.bincount().tolist()])
    [0.5, 0.25, 0.25]
    [0.5, 0.16, 0.34]
    """
    lookahead = tokens.shape[1]
    if not q.shape[-1]:
        q = point_mass(tokens, like=p)
    w = weights(p, tokens, q)                          # [B, K+1]
    q = torch.cat([q, torch.zeros_like(p[:, :1])], 1)  # [B, K+1, V]
    weighted = w[..., None] * p                        # [B, K+1, V]
    excess = (weighted - q).clamp_(min=0)              # [B, K+1, V]
    S = excess.sum(-1)                                 # [B, K+1]
    h = S / (S + 1 - w)
    h = torch.where(w < 1, h, 1.0)                     # it is 0 / 0 where p = q
    # the number of place i stands at i - 1; place 0 is accepted always, because h_0 = 1
    accepted = uniforms.roll(1, 1) < h                 # [B, K+1]
    place = torch.arange(lookahead + 1, device=p.device)
    num_accepted = (accepted * place).amax(1)          # [B]
    row = torch.arange(len(p), device=p.device)
    end = (row, num_accepted)  # of each row's round
    r = residual(weighted[end], q[end])                # [B, V]
    bonus = draw(r, uniforms[:, lookahead])            # [B]
    return num_accepted, bonus


def weights(p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return w_0..w_K of `block_verify`, `[B, K+1]`, whose p, tokens and q these are."""
    drafted = tokens[..., None]
    p_drafted = p[:, :-1].gather(-1, drafted)
    q_drafted = q.gather(-1, drafted)
    ratio = (p_drafted / q_drafted).squeeze(-1)  # [B, K]
    w = [p.new_ones(len(p))]                     # K+1 of [B]
    for each in ratio.unbind(1):
        w.append((w[-1] * each).clamp(max=1))
    return torch.stack(w, 1)


VERIFICATIONS["block"] = block_verify
