"""Distributions: how the target decides without a trace of the draft, and what the draft draws from (section 4.2).

Speculative decoding is lossless because of two formulas (Leviathan et al. 2023; Chen et al. 2023). A token s drawn
from q is

    accepted with probability   min(1, p(s) / q(s)),        else replaced by a draw from the
    residual                    r(x) = max(p(x) - q(x), 0) / sum_y max(p(y) - q(y), 0),

and then q(s) accept(s) + P(reject) r(s) = p(s), *whatever q is*, as long as q is what s was really drawn from. Two
special cases need no code of their own: greedy decoding is p = point mass at the argmax, and a proposal that was
not drawn at all (greedy drafts, look-ups) is q = point mass at the proposal.

Saguaro sampling (Def. 14) bends q so that the residual, and with it the bonus token, falls among the tokens that
the draft caches anyway:  sigma_{F,C}(z)_t  proportional to  C exp(z_t) if t in top_F(z), else exp(z_t).

Here `p` and `q` are probabilities, float32 or wider; logits are called logits. V is the vocabulary size.
"""
import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def logits_warpers(temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[LogitsProcessor] | None:
    """transformers' own, in the order in which `generate` applies them; None, for greedy, at temperature 0."""
    if temperature == 0:
        return None
    warpers: list[LogitsProcessor] = []
    if temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


def probabilities(logits: torch.Tensor, warpers: list[LogitsProcessor] | None) -> torch.Tensor:
    """Next-token distribution for logits `[..., V]`, same shape: softmax of the warped logits, or, for greedy
    decoding (`warpers` None), the point mass at the argmax."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if warpers is None:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    warped = logits.flatten(0, -2)
    for warp in warpers:
        warped = warp(None, warped)
    return warped.view_as(logits).softmax(-1)


def inverse_cdf(p: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One token `[...]` for every distribution `[..., V]` (not necessarily normalised) and coin `[...]` in [0, 1).

    The token is the first whose cumulative probability exceeds the coin, so a token of probability 0 is never
    drawn. Unlike `torch.multinomial`, what is drawn for one row does not depend on which other rows are drawn
    beside it, and only one random number a row is needed."""
    cdf = p.cumsum(-1)
    return torch.searchsorted(cdf, coins.unsqueeze(-1).to(cdf.dtype) * cdf[..., -1:], right=True).squeeze(-1)


def saguaro_distribution(q: torch.Tensor, fan_out: int, downweight: float) -> torch.Tensor:
    """Saguaro sampling, sigma_{F,C} (Def. 14): the `fan_out` likeliest tokens of q `[..., V]` keep only the share
    C = `downweight` in [0, 1] of their weight. (C exp(z_t) and C q_t are the same once normalised.)

    The result is both what the draft must draw from and what it must report to the verifier. Where C = 0 would
    leave nothing (all of q's mass is in the top F, as with a point mass), q stays as it is."""
    if downweight == 1 or fan_out == 0:
        return q
    cached = q.topk(min(fan_out, q.shape[-1])).indices
    sigma = q.scatter(-1, cached, downweight * q.gather(-1, cached))
    total = sigma.sum(-1, keepdim=True)
    return torch.where(total > 0, sigma / total, q)


def acceptance_probability(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """min(1, p(s) / q(s)) for tokens s `[...]` drawn from q `[..., V]`, as `[...]`."""
    tokens = tokens.unsqueeze(-1)
    return (p.gather(-1, tokens) / q.gather(-1, tokens)).squeeze(-1).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0) normalised, `[..., V]`: what replaces a rejected token. Where p = q nothing can be rejected,
    and p is returned."""
    excess = (p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total, p)


def point_mass(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The distribution `[..., V]` of proposals `[...]` that were not drawn at random."""
    return torch.zeros(*tokens.shape, like.shape[-1], dtype=like.dtype, device=like.device).scatter_(
        -1, tokens.unsqueeze(-1), 1.0)


def verify(p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor | None,
           coins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lossless verification of a speculation: `(num_accepted [B], bonus [B])`.

    p `[B, K+1, V]`: the target's distributions before each drafted token and after the last; tokens `[B, K]`: the
    speculation, K = 0 included; q `[B, K, V]`: what they were drawn from, None for point masses; coins `[B, K+1]`
    in [0, 1). Tokens are accepted up to the first rejection; the bonus token comes from the residual there, or, if
    all were accepted, from the last p: the residual against q = 0."""
    rows, lookahead = tokens.shape
    if q is None:
        q = point_mass(tokens, like=p)
    accepted = coins[:, :lookahead] < acceptance_probability(p[:, :lookahead], q, tokens)
    num_accepted = accepted.long().cumprod(1).sum(1)
    q = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)
    row = torch.arange(rows, device=p.device)
    bonus = inverse_cdf(residual(p[row, num_accepted], q[row, num_accepted]), coins[:, lookahead])
    return num_accepted, bonus
