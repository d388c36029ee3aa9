"""Distributions: how the target decides without a trace of the draft; what the draft draws from
(4.2).

Speculative decoding is lossless because of two formulas (Leviathan et al. 2023; Chen et al. 2023).
A token s drawn from q is

    accepted with probability   min(1, p(s) / q(s)),      else replaced by a draw from the
    residual                    r(x) = max(p(x) - q(x), 0) / sum_y max(p(y) - q(y), 0),

and then q(s) accept(s) + P(reject) r(s) = p(s), *whatever q is*, as long as q is what s was really
drawn from. Two special cases need no code of their own: greedy decoding is p = point mass at the
argmax, and a proposal that was not drawn at all (greedy drafts, look-ups) is q = point mass.

Saguaro sampling (Def. 14) bends q so that the residual, and with it the bonus token, falls among
the tokens that the draft caches anyway:

    sigma_{F,C}(z)_t  proportional to  C exp(z_t) if t in top_F(z), else exp(z_t).

Here `p` and `q` are probabilities, float32 or wider; logits are called logits. V is the vocabulary
size. Coins and cumulative sums are float64: the smallest step of float32 coins, 2^-24, leaves
thousands of the tokens of a large vocabulary undrawable.
"""
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


class Warping:
    """How logits become the distribution that is sampled from: by transformers' own warpers, in the
    order of `generate`. Temperature 0 is `greedy`: the point mass at the argmax."""

    def __init__(self, temperature: float, top_k: int = 0, top_p: float = 1.0):
        """`top_k` 0 and `top_p` 1 are off."""
        self.greedy, self.warpers = temperature == 0, []
        if temperature not in (0, 1):
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Next-token distribution for logits `[..., V]`, same shape, float32 or wider."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.greedy:
            return point_mass(logits.argmax(-1), like=logits)
        warped = logits.flatten(0, -2)
        for warp in self.warpers:
            warped = warp(None, warped)
        return warped.view_as(logits).softmax(-1)

    def draw(self, logits: torch.Tensor, coins: torch.Tensor, fan_out: int,
             downweight: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What the draft draws with coins `[...]` for logits `[..., V]`: tokens `[...]`, and the
        distributions `[..., V]` they were drawn from; when greedy the likeliest tokens, and V = 0.
        `fan_out` and `downweight` are Definition 14's F and C: for token s_i F_{i-1}, the guesses
        that the cache will hold at the position that verifies it."""
        if self.greedy:
            return logits.argmax(-1), logits[..., :0]
        q = saguaro_distribution(self.probabilities(logits), fan_out, downweight)
        return inverse_cdf(q, coins), q


def inverse_cdf(p: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One token `[...]` for every distribution `[..., V]`, normalised or not, and float64 coin
    `[...]`.

    The token is the first whose cumulative probability exceeds the coin in [0, 1), so a token of
    probability 0 is never drawn. Unlike `torch.multinomial`, what is drawn for one row does not
    depend on which other rows are drawn beside it, and only one random number a row is needed."""
    cdf = p.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, coins[..., None] * cdf[..., -1:], right=True).squeeze(-1)
    return tokens.clamp(max=p.shape[-1] - 1)  # beyond is NaN, which the verifier reports


def saguaro_distribution(q: torch.Tensor, fan_out: int, downweight: float) -> torch.Tensor:
    """Saguaro sampling, sigma_{F,C} (Def. 14), of distributions q `[..., V]`: the F = `fan_out`
    likeliest tokens keep only the share C = `downweight` in [0, 1] of their weight. (C exp(z_t) and
    C q_t are the same once normalised.) The draft must draw from the result and report it to the
    verifier. Where C = 0 would leave nothing, q stays as it is.

    >>> saguaro_distribution(torch.tensor([1/2, 1/4, 1/4]), fan_out=1, downweight=1/2)
    tensor([0.3333, 0.3333, 0.3333])

    The top F are Definition 14's, the drafted token among them. The cache leaves that token out of
    its F guesses and so guesses one token that is not downweighted: the residual's mass on what is
    cached is still at least its mass on the top F, for the drafted token cannot be the bonus
    token."""
    if downweight == 1 or fan_out == 0:
        return q
    cached = q.topk(min(fan_out, q.shape[-1])).indices
    sigma = q.scatter(-1, cached, downweight * q.gather(-1, cached))
    total = sigma.sum(-1, keepdim=True)
    return torch.where(total > 0, sigma / total, q)


def acceptance_probability(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """min(1, p(s) / q(s)), `[...]`, for tokens s `[...]` drawn from q `[..., V]`.

    >>> acceptance_probability(torch.tensor([1/2, 1/4, 1/4]), torch.tensor([1/8, 3/4, 1/8]),
    ...                        torch.tensor(1))
    tensor(0.3333)
    """
    tokens = tokens[..., None]
    return (p.gather(-1, tokens) / q.gather(-1, tokens)).squeeze(-1).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0) normalised, `[..., V]`: what replaces a rejected token. Where p = q nothing can
    be rejected, and p is returned.

    >>> residual(torch.tensor([1/2, 1/4, 1/4]), torch.tensor([1/8, 3/4, 1/8])).tolist()
    [0.75, 0.0, 0.25]
    """
    excess = (p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total, p)


def point_mass(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The distribution `[..., V]` of proposals `[...]` that were not drawn at random; V, type and
    device are those of `like` `[..., V]`."""
    mass = torch.zeros(*tokens.shape, like.shape[-1], dtype=like.dtype, device=like.device)
    return mass.scatter_(-1, tokens[..., None], 1.0)


# ---- public noise (ours, not the paper's) ----

def mixed(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of int64 `[...]`: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # masked, because >> keeps the sign
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def noise_keys(seed: int, row: torch.Tensor, length: torch.Tensor, lookahead: int) -> torch.Tensor:
    """A hash `[B, K+1]` of (seed, row, position) for the positions that a bonus token may have,
    after 0 to K accepted tokens, in rows number `row` `[B]` whose texts have `length` `[B]`
    tokens."""
    position = length[:, None] + torch.arange(lookahead + 1)
    return mixed(mixed(mixed(torch.full_like(row, seed)) ^ row)[:, None] ^ position)


def public_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponentially distributed noise `[..., V]`, float64, made from keys `[...]`: the same on
    every rank. argmax_x r(x) / noise(x) is a draw from r: the first to ring of V exponential
    clocks, x at the rate r(x). (It is the Gumbel trick with one logarithm less.) Who knows the
    keys can guess it."""
    token = torch.arange(vocab_size, device=keys.device)
    bits = mixed(keys[..., None] - token * 0x61C8864680B583EB) >> 12 & (1 << 52) - 1
    return -((bits.double() + 0.5) * 2.0 ** -52).log()


def verify(p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor, coins: torch.Tensor,
           keys: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Lossless verification of a speculation: `(num_accepted [B], bonus [B])`.

    p `[B, K+1, V]`: the target's distributions before each drafted token and after the last;
    tokens `[B, K]`: the speculation, K = 0 included; q `[B, K, V]`: what they were drawn from, V =
    0 for point masses; coins `[B, K+1]`, float64, in [0, 1). Tokens are accepted up to the first
    rejection; the bonus token comes from the residual there, or, if all were accepted, from the
    last p: the residual against q = 0. It is drawn with the last coin, or, given `keys` `[B, K+1]`
    of the positions that it may have, with public noise.

    >>> p = torch.tensor([[[1/2, 1/4, 1/4], [0.0, 0.0, 1.0]]])
    >>> q = torch.tensor([[[1/8, 3/4, 1/8]]])  # token 1 is accepted with probability 1/3
    >>> verify(p, torch.tensor([[1]]), q, torch.tensor([[0.3, 0.5]]))
    (tensor([1]), tensor([2]))
    >>> verify(p, torch.tensor([[1]]), q, torch.tensor([[0.4, 0.5]]))
    (tensor([0]), tensor([0]))
    """
    lookahead = tokens.shape[1]
    if not q.shape[-1]:
        q = point_mass(tokens, like=p)
    accepted = coins[:, :lookahead] < acceptance_probability(p[:, :lookahead], q, tokens)
    num_accepted = accepted.long().cumprod(1).sum(1)
    q = torch.cat([q, torch.zeros_like(p[:, :1])], 1)
    row = torch.arange(len(p), device=p.device)
    r = residual(p[row, num_accepted], q[row, num_accepted])
    if keys is None:
        return num_accepted, inverse_cdf(r, coins[:, lookahead])
    return num_accepted, (r / public_noise(keys[row, num_accepted], r.shape[-1])).argmax(-1)
