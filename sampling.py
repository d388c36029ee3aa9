"""Distributions and random numbers: lossless verification, Saguaro sampling (section 4.2).

Speculative decoding is lossless because of two formulas (Leviathan et al. 2023; Chen et al. 2023).
A token s drawn from q is

    accepted with probability   min(1, p(s) / q(s)),      else replaced by a draw from the
    residual(x)             =   max(p(x) - q(x), 0) / sum_y max(p(y) - q(y), 0).

Then q(s) accept(s) + P(reject) residual(s) = p(s), *whatever q is*, as long as s was really drawn
from q. A token may also be verified as if q were the point mass at s. That is exact however s was
drawn, but accepts less: sum p q instead of sum min(p, q). Two special cases need no formula of
their own. Greedy decoding has the point mass at the argmax as p. A proposal that was not drawn at
random, by a greedy draft or by look-up, has a point mass as q.

Saguaro sampling (Def. 14) changes q so that the residual, and with it the bonus token, falls among
the draft's F likeliest tokens, the more the smaller C is (Thm. 15). With the draft's logits z it is

    sigma_{F,C}(z)_t  proportional to  C exp(z_t) if t in top_F(z), else exp(z_t).

Here `p` and `q` are probabilities, float32 or wider; logits are called logits. V is the vocabulary
size. Uniform random numbers and cumulative sums are float64: in float32 the smallest step, 2^-24,
leaves thousands of the tokens of a large vocabulary undrawable.
"""
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


class Sampler:
    """Turns logits into the distribution that is sampled from, by transformers' own warpers in the
    order of `generate`. Temperature 0 is `greedy`: the point mass at the argmax."""

    def __init__(self, temperature: float, top_k: int = 0, top_p: float = 1.0,
                 downweight: float = 1.0):
        """`top_k` 0 and `top_p` 1 are off. `downweight` is C of Saguaro sampling; only `sample`,
        which the target never calls, uses it."""
        self.greedy = temperature == 0
        self.downweight = downweight
        self.warpers = []
        if temperature not in (0, 1):
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return next-token distributions `[..., V]`, float32 or wider, for logits `[..., V]`."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.greedy:
            return point_mass(logits.argmax(-1), like=logits)
        warped = logits.flatten(0, -2)
        for warp in self.warpers:
            warped = warp(None, warped)
        return warped.view_as(logits).softmax(-1)

    def q_template(self, vocab_size: int, dtype: torch.dtype, device) -> torch.Tensor:
        """Return zeros of the width and type of each q, `[V]`, or `[0]` for a greedy draft's, where
        models have this `dtype`."""
        width = 0 if self.greedy else vocab_size
        return torch.zeros(width, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def sample(self, logits: torch.Tensor, uniforms: torch.Tensor,
               F: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the draft's proposals after logits `[..., V]` with `uniforms` `[...]`. Returns the
        tokens `[...]` and q `[..., V]`, what they were drawn from. A greedy draft returns the
        likeliest tokens, and a q of width 0.

        F is Definition 14's. For token s_i it is F_{i-1}, the number of bonus tokens that the next
        cache guesses where s_i is verified."""
        if self.greedy:
            return logits.argmax(-1), logits[..., :0]
        q = saguaro_distribution(self.probabilities(logits), F, self.downweight)
        return inverse_cdf(q, uniforms), q


def inverse_cdf(p: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw a token `[...]` from each distribution `[..., V]`, normalised or not, by its uniform
    number `[...]` in [0, 1), float64.

    The token is the first whose cumulative probability exceeds the number, so a token of
    probability 0 is never drawn. Unlike `torch.multinomial`, what is drawn for one row does not
    depend on the rows beside it."""
    cdf = p.cumsum(-1, dtype=torch.float64)                              # [..., V]
    threshold = uniforms[..., None] * cdf[..., -1:]                      # [..., 1]
    tokens = torch.searchsorted(cdf, threshold, right=True).squeeze(-1)  # [...]
    return tokens.clamp(max=p.shape[-1] - 1)  # beyond is NaN, which the verifier reports


def saguaro_distribution(q: torch.Tensor, F: int, downweight: float) -> torch.Tensor:
    """Return sigma_{F,C} (Def. 14) of distributions q `[..., V]`: the F likeliest tokens keep only
    the share C = `downweight` in [0, 1] of their weight, and 1 changes nothing.
    C exp(z_t) and C q_t are the same once normalised. The draft must draw from the result and
    report it to the verifier. Where C = 0 would leave nothing, q stays as it is.

    >>> saguaro_distribution(torch.tensor([1/2, 1/4, 1/4]), F=1, downweight=1/2)
    tensor([0.3333, 0.3333, 0.3333])

    Definition 14 counts the drafted token among the top F. The cache leaves it out, as it cannot be
    the bonus token once rejected, and guesses the next likeliest, which keeps its weight. So the
    residual has no less mass on the cache than on the top F; Theorem 15 holds for the latter."""
    if downweight == 1 or F == 0:
        return q
    cached = q.topk(min(F, q.shape[-1])).indices
    sigma = q.scatter(-1, cached, downweight * q.gather(-1, cached))
    total = sigma.sum(-1, keepdim=True)
    return torch.where(total > 0, sigma / total, q)


def acceptance_probability(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return min(1, p(s) / q(s)), `[...]`, for tokens s `[...]` drawn from q `[..., V]`.

    >>> acceptance_probability(torch.tensor([1/2, 1/4, 1/4]), torch.tensor([1/8, 3/4, 1/8]),
    ...                        torch.tensor(1))
    tensor(0.3333)
    """
    tokens = tokens[..., None]
    ratio = p.gather(-1, tokens) / q.gather(-1, tokens)
    return ratio.squeeze(-1).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return max(p - q, 0) normalised, `[..., V]`, from which the replacement of a rejected token
    is drawn. Where p = q nothing can be rejected, and p is returned.

    >>> residual(torch.tensor([1/2, 1/4, 1/4]), torch.tensor([1/8, 3/4, 1/8])).tolist()
    [0.75, 0.0, 0.25]
    """
    excess = (p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total, p)


def point_mass(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the distributions `[..., V]` of proposals `[...]` that were not drawn at random. V,
    type and device are those of `like` `[..., V]`."""
    vocabulary = torch.arange(like.shape[-1], device=like.device)
    return (tokens[..., None] == vocabulary).to(like.dtype)


def verify(p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor,
           uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify a speculation losslessly. Returns `(num_accepted [B], bonus [B])`.

    p `[B, K+1, V]` are the target's distributions before each drafted token and after the last.
    tokens `[B, K]` were drawn from q `[B, K, V]`; K may be 0, and so may q's width. uniforms
    `[B, K+1]` are float64, in [0, 1). Tokens are accepted up to the first rejection. There the
    bonus token is drawn from the residual. If all were accepted, it is drawn from the last p, which
    is the residual against q = 0. The last uniform number draws it.

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
    acceptance = acceptance_probability(p[:, :lookahead], q, tokens)  # [B, K]
    accepted = uniforms[:, :lookahead] < acceptance                   # [B, K]
    num_accepted = accepted.long().cumprod(1).sum(1)                  # [B]
    q = torch.cat([q, torch.zeros_like(p[:, :1])], 1)                 # [B, K+1, V]
    row = torch.arange(len(p), device=p.device)
    r = residual(p[row, num_accepted], q[row, num_accepted])          # [B, V]
    return num_accepted, inverse_cdf(r, uniforms[:, lookahead])       # [B], [B]


# ---- random numbers: a stream each for the verifier, the branches and the backups ----

VERIFIER_STREAM, BRANCH_STREAM, BACKUP_STREAM = range(3)


class UniformStream:
    """Draws the numbers of one `stream` of a `seed` (0 to 2^30 - 1), by a generator of its own."""

    def __init__(self, seed: int, stream: int):
        self.generator = torch.Generator().manual_seed(3 * seed + stream)  # it takes 32 bits

    def draw(self, *shape: int) -> torch.Tensor:
        """Return the next numbers `[*shape]`, float64, in [0, 1), in host memory."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)
