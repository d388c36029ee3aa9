"""Were these texts written by the target? The statistics, and what they can see."""
import math
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList

from audit.replay import Replayed, Text, members, precision_of, replay, target_logits

ALPHA = 1e-6          # a p-value below it is significant
RANDOM = 1952         # seeds the audit's own random numbers, which no engine shares
NONCENTRALITY = 86    # at which the chi-square over 20 bins is below ALPHA 99 times of a hundred
EXPECTED = 20         # numbers in a bin: with fewer, p-values below ALPHA are still likelier
MAX_SKEWNESS = 0.25   # of a sum whose distribution three moments still describe
TESTS = ("bins", "pairs", "place", "ids", "next id", "next nth", "argmax", "log p")


class Finding(NamedTuple):
    """Holds what the audit finds in the texts, or in a group of their tokens."""
    tokens: int
    impossible: int             # tokens of probability 0
    near_ties: int              # tokens that count as the last ones inside top-k or top-p
    deviations: dict[str, float]  # of the sums, in standard deviations, by name
    nats: float                 # log-probability of a token, on average, less what is expected
    p_values: dict[str, float]  # by name, see TESTS; NaN: too few tokens to tell


def audit(texts: Replayed) -> Finding:
    """Were these texts written by the target? (Rosenblatt 1952; Smith 1985; for discrete
    distributions Brockwell 2007.)

    Lay a token's distribution p out on a line of length 1, the likeliest token first: each token
    has an interval as long as its probability. Draw u at random from the interval of the token
    that was written. If the token was drawn from p, then u is uniform on (0, 1), whatever p was,
    and so whatever came before: the u of a text are uniform and independent. And only then: if u
    is uniform given all before it, it falls into each interval with just its probability. So one
    question is left, for any vocabulary and any length: are these numbers uniform and independent?

        bins     u in 20 bins: 19 degrees of freedom
        pairs    u in 10 bins, for each of 10 bins of the u before it in the text
        place    u in 10 bins, for each range of places in the text: 0, 1-2, 3-6, 7-14, ...
        ids      how many tokens have an id in each sixteenth of the vocabulary; the sum of the
                 probabilities is expected
        next id  what id stands behind which: how many times more than expected it stood behind the
                 same id in earlier texts, summed over all tokens; 0 is expected
        next nth the same of its place in the order of likelihood: the likeliest, the second, ...
        argmax   how many tokens are the target's argmax; the sum of p_max is expected
        log p    the texts' log-likelihood; the sum of p log p over all tokens is expected

    The first four are chi-square tests. Their expectations hold *given the past*, so pairs may
    overlap: what is summed is a martingale, and only what has too few tokens is left out. Ids and
    sums see what hides from bins of u, such as a special case that favours the argmax, or, behind
    each id, a set of ids of its own. The p-values of the four sums are two-sided, by a gamma
    distribution with the sum's variance and skewness (Pearson's type III; the normal distribution
    if that is 0). A token of probability 0 has p-value 0, and no part in log p.

    Stopping does no harm: a text may end with an end-of-sequence token or at any length, because
    whether it goes on was settled before the next token was drawn. But the token that ended it
    belongs to it, and a text that was cut off or left out for what it held is missed. For the same
    reason a *group* must be settled before its token is drawn ("the round began with a miss",
    "third of its round"; ideas/block.py says why this one is allowed in block verification, too).
    "Accepted" and "bonus" are not: accepted tokens are likelier than drawn ones, and a correct
    program would fail. Texts must be independent: two of one seed are one.

    False alarms: a correct program fails with probability below 16 ALPHA = 1.6e-5 per group. With
    small counts p-values below ALPHA come too often: with 20 in each of 10 or 20 bins 1.5 to 1.8
    times (30,000,000 samples each; with 5 in each 4.5 to 5 times), and in ids, if only one count
    varies, with variance 40, 6.2 times (computed). So eight tests together stay below 16.

    Power: if the u of N tokens have a distribution at total-variation distance d from the uniform
    one, as the bins see it, the chi-square over bins has a non-centrality of at least 4 N d^2
    (Cauchy-Schwarz). At 86 it is significant 99 times of a hundred, so what would have shown is

        d = sqrt(86 / (4 N)):   4.6% for 10,000 tokens, 1.5% for 100,000, 0.5% for a million.

    Biases that cancel, token against token, may hide from the bins. Those that depend on the id
    before show in the next ids and their places if that id comes often enough.
    """
    u = texts.uniform
    follows = texts.place > 0
    bin_before = (10 * texts.previous[follows]).long()
    place_range = (texts.place + 1).double().log2().long()
    p_values = {
        "bins": evenness(u, bins=20),
        "pairs": evenness(u[follows], given=bin_before),
        "place": evenness(u, given=place_range),
        "ids": counts_p_value(texts.ids, texts.p_ids)}
    log_p = texts.log_p[texts.possible]
    sums = {"next id": texts.next_id, "next nth": texts.next_nth, "argmax": texts.argmax,
            "log p": log_p}
    deviations = {}
    for name, surprises in sums.items():
        deviations[name], p_values[name] = sum_p_value(surprises)
    impossible = int((~texts.possible).sum())
    near_ties = int(texts.near_tie.sum())
    nats = float(log_p[:, 0].mean())
    return Finding(len(u), impossible, near_ties, deviations, nats, p_values)


def would_have_shown(tokens: int) -> float:
    """Return the smallest bias in total variation that so many tokens show: see `audit`."""
    return min(1.0, (NONCENTRALITY / 4 / tokens) ** 0.5)


def evenness(numbers: torch.Tensor, bins: int = 10, given: torch.Tensor | int = 0) -> float:
    """Return the p-value of the hypothesis that numbers `[N]` in (0, 1) are uniform whatever their
    class `given` `[N]` (0, 1, ...). Classes with fewer than `EXPECTED` in a bin are left out. It is
    NaN if all are."""
    number = (numbers * bins).long().clamp(max=bins - 1)
    counts = torch.bincount(given * bins + number)
    empty = -len(counts) % bins  # bins of the last class
    table = torch.nn.functional.pad(counts, (0, empty)).view(-1, bins)  # [classes, bins]
    enough = table.sum(1) >= EXPECTED * bins
    observed = table[enough].double()
    if not len(observed):
        return math.nan
    expected = observed.mean(1, keepdim=True)
    deviations = (observed - expected).square() / expected
    return chi_square_p_value(deviations.sum(), len(observed) * (bins - 1))


def chi_square_p_value(chi_square: torch.Tensor, freedom: int) -> float:
    """Return how likely chance alone is to make a chi-square, float64, of so many degrees of
    `freedom` as large."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, chi_square / 2))


def counts_p_value(surprises: torch.Tensor, p: torch.Tensor) -> float:
    """Return the p-value of the hypothesis that each token falls into a class with its
    probabilities `p` `[N, classes]`. `surprises` are 1 for the class it fell into and 0 for others,
    less p. Directions in which the counts hardly vary are left out. It is NaN if all are."""
    covariance = p.sum(0).diag() - p.T @ p
    variance, directions = torch.linalg.eigh(covariance)
    enough = variance >= 2 * EXPECTED
    if not enough.any():
        return math.nan
    along = surprises.sum(0) @ directions
    deviations = along.square() / variance
    return chi_square_p_value(deviations[enough].sum(), int(enough.sum()))


def sum_p_value(surprises: torch.Tensor) -> tuple[float, float]:
    """Return how far a sum `[N, 3]` (see `surprise`) is from its expectation, in standard
    deviations, and its two-sided p-value. It is NaN if the sum varies too little to tell."""
    total, variance, third = surprises.sum(0).tolist()
    if variance <= 0:
        return math.nan, math.nan
    deviation = total / variance ** 0.5
    skewness = third / variance ** 1.5
    if abs(skewness) > MAX_SKEWNESS:
        return deviation, math.nan
    shape = 4 / max(skewness ** 2, 1e-6)  # 1e-6: as good as normal
    along = math.copysign(deviation, deviation * skewness)
    quantile = max(0.0, shape + along * shape ** 0.5)
    gamma = torch.tensor([shape, quantile], dtype=torch.float64)
    above = float(torch.special.gammaincc(*gamma))
    below = float(torch.special.gammainc(*gamma))
    return deviation, min(1.0, 2 * min(above, below))


def audit_groups(model, texts: list[Text], warpers: LogitsProcessorList,
                 batch_size: int) -> dict[str, Finding]:
    """Return the finding of all tokens ("all") and of each group."""
    generator = torch.Generator().manual_seed(RANDOM)
    precision = precision_of(model)
    memory = []
    replayed = []
    for text, logits in zip(texts, target_logits(model, texts, batch_size)):
        tokens = torch.tensor(text.tokens, device=logits.device)
        within = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
        within = within.to(logits.device)
        replayed.append(replay(logits, tokens, warpers, within, memory, text.prompt[-1], precision))
    whole = Replayed(*map(torch.cat, zip(*replayed)))
    findings = {}
    for name, chosen in members(texts).items():
        findings[name] = audit(whole.where(chosen))
    return findings


def p_text(p: float) -> str:
    """Return a p-value as people read it.

    >>> p_text(0.25), p_text(3.4e-11), p_text(math.nan)
    ('0.25', '3e-11', '-')
    """
    if math.isnan(p):
        return "-"
    return f"{p:.2f}" if p >= 0.005 else f"{p:.0e}"
