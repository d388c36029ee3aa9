"""The proofs. Speculation is *lossless*: whatever the draft proposes, the text is distributed
exactly as if the target had written it alone. This file shows it, from the formulas up to two
processes, in the order of the paper:

    1  sampling          the algebra of accept and residual; Saguaro sampling (4.2); public noise
    2  the cache         Def. 4, Thm. 12; what it is worth (Thms. 7, 17, Cors. 8, 9, 16); backups
    3  KV slots, trees   what every branch sees; how rows end
    4  greedy decoding   token for token what `generate` writes
    5  sampled text      frequencies against the target's exact probabilities
    6  classic mistakes  each is planted, and each must be caught by the test of chapter 5
    7  ranks             bit for bit the text of one process

How does one test a *distribution*? With a vocabulary of 6 there are only 6^3 = 216 texts of three
tokens, and the target's probability of each is a product of three softmaxes. We let SSD write
120,000 texts and count (in one setting; 30,000 in three others). If the program is right, the count
O of a text differs from the expected E by chance alone, by about sqrt(E), and Pearson's

    chi-square = sum over texts of (O - E)^2 / E

comes out near its number of degrees of freedom (texts - 1). The p-value is the probability that
chance alone makes it as large. (Texts with E < 5 are pooled: `goodness_of_fit`.)

False alarms. The suite computes fewer than 500 p-values and calls one significant below ALPHA =
1e-6: a correct program fails with probability below 500 * 1e-6 = 5e-4 (Bonferroni). Seeds are
fixed: what has passed once goes on passing.

Power. If the texts had a distribution at total-variation distance d from the target's, chi-square
would grow by at least 4 N d^2 (Cauchy-Schwarz). For N = 120,000 and d = 0.02 that is 192, found
with a probability above 0.999 (`test_the_sample_is_large_enough_to_see_two_percent`).

Random models stand in for language models: small, in float64 (so that no tie is decided by
rounding), with large weights (so that their distributions are far from uniform). A draft is its
target plus noise. SSD runs in one process, where the draft pre-speculates just before it learns the
outcome (`Simulated`), unless a test says otherwise.

    python -m pytest                     all of it
    python -m pytest -m "not slow"       an edit loop
    python test_equivalence.py           the table of chapter 6
"""
import copy
import inspect
import itertools
import os
import random
import sys
import textwrap
from dataclasses import replace
from functools import lru_cache
from multiprocessing import forkserver

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import cache
import draft_worker
import sampling
from cache import BACKUP, FINISHED, PRIMARY, Outcome, Speculation, SpeculationCache
from draft_worker import MAX_MATCH, DraftWorker, prompt_lookup
from runtime.model import CausalLM
from runtime.placement import Models, Placement
from runtime.settings import Settings, UserError
from saguaro import Channel, Decoder, plan, workers
from sampling import PublicNoise, Sampler, UniformStream
from target_worker import TargetWorker

slow = pytest.mark.slow
ALPHA = 1e-6
RAGGED = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]]  # prompts
torch.set_num_threads(1)  # the models here are too small to share


# ---- helpers ----

@lru_cache(maxsize=None)
def random_model(family: str = "llama", seed: int = 0, **changes):
    """A random model of a Hugging Face architecture, in float64. Made once: to change it, copy
    it."""
    shape = dict(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                 num_key_value_heads=4, intermediate_size=48, max_position_embeddings=64,
                 initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **shape | changes)
    return AutoModelForCausalLM.from_config(config).double().eval()


def imitation(target, noise: float, seed: int = 1):
    """A draft: the target with noise on its weights, in units of each tensor's standard
    deviation."""
    draft, generator = copy.deepcopy(target), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.std() > 0:
                noise_here = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight += noise * weight.std() * noise_here
    return draft


class Simulated:
    """SSD in one process: the draft pre-speculates just before it learns the outcome."""

    def __init__(self, draft: DraftWorker):
        self.draft = draft
        self.lookahead = draft.lookahead
        self.start = draft.start
        self.report = draft.report

    def speculate(self, speculation: Speculation, outcome: Outcome) -> Speculation:
        cache = self.draft.pre_speculate(speculation)
        return self.draft.speculate(speculation, outcome, cache)


def settings(mode: str = "ssd", **choices) -> Settings:
    """Those of the command line, with our defaults."""
    ours = dict(lookahead=3, budget=7, acceptance_rate=0.7, dtype="float64", device="cpu")
    return Settings(mode=mode, **ours | choices)


def decoder(target, draft=None, mode: str = "ssd", **choices) -> Decoder:
    """One way of decoding, in this process; ssd simulated."""
    s = settings(mode, **choices)
    target = CausalLM(target)
    draft = CausalLM(draft, target.vocab_size) if mode != "ar" else None
    models = Models(target, draft, target.context, target.vocab_size)
    made = Decoder(replace(s, mode=mode.replace("ssd", "sd")), models)
    if mode == "ssd":
        made.target, draft_worker = workers(s, models)
        made.speculator = Simulated(draft_worker)
    return made


def texts_and_rounds(made: Decoder, prompts: list[list[int]]) -> tuple[list[list[int]], list]:
    """The new tokens of every prompt, and (row, new tokens, source) of every row and round."""
    record = []
    return made(prompts, lambda *new: record.append(new)), record


def run_rounds(made: Decoder, prompts: list[list[int]], rounds: int, ends: dict = {}) -> list:
    """Algorithm 1: the (speculation, outcome) of all rounds, round 0 first. Row r finishes in round
    `ends[r]`, the others never."""
    lookahead = made.speculator.lookahead
    max_length = max(map(len, prompts)) + 1 + (rounds + 2) * (lookahead + 1)
    made.speculator.start(prompts, max_length)
    speculation = Speculation.empty(len(prompts))
    record = [(speculation, made.target.prefill(prompts, max_length, lookahead))]
    for number in range(1, rounds + 1):
        speculation, outcome = record[-1]
        made.target.advance(outcome)
        speculation = made.speculator.speculate(speculation, outcome)
        k, bonus = made.target.verify(speculation)
        active = [number < ends.get(row, rounds + 1) for row in range(len(prompts))]
        record.append((speculation, Outcome(k.where(torch.tensor(active), FINISHED), bonus)))
    return record


def written(record: list) -> tuple[torch.Tensor, torch.Tensor]:
    """The new tokens `[B, longest]` of every row, and how many they are `[B]`."""
    longest = sum(speculation.tokens.shape[1] + 1 for speculation, _ in record)
    texts = torch.zeros(len(record[0][1].bonus), longest, dtype=torch.long)
    length = torch.zeros(len(texts), dtype=torch.long)
    for speculation, (k, bonus) in record:
        new = torch.cat([speculation.tokens, bonus[:, None]], 1)
        new = new.scatter(1, k.clamp(min=0)[:, None], bonus[:, None])
        texts.scatter_(1, length[:, None] + torch.arange(new.shape[1]), new)
        length += k + 1
    return texts, length


def sources(record: list) -> torch.Tensor:
    """Who drafted, in all rounds and rows."""
    return torch.cat([speculation.source for speculation, _ in record[1:]])


@lru_cache(maxsize=None)
def generated(net, prompt: tuple[int, ...], max_new_tokens: int, eos: tuple[int, ...]) -> list[int]:
    text = net.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
                        do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0,
                        eos_token_id=list(eos) or None)
    return text[0, len(prompt):].tolist()


def greedy_reference(net, prompts: list[list[int]], max_new_tokens: int, eos=()) -> list[list[int]]:
    """What transformers' own `generate` writes after each prompt."""
    return [generated(net, tuple(prompt), max_new_tokens, tuple(eos)) for prompt in prompts]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, within: float = 1e-12) -> None:
    """Whatever order a correct program adds up in."""
    torch.testing.assert_close(actual, expected, rtol=within, atol=within)


def random_distributions(*shape: int, seed: int = 0) -> torch.Tensor:
    """Peaked random distributions `[*shape[:-1], V]` in float64."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(-1)


def draw_uniforms(*shape: int, seed: int = 0) -> torch.Tensor:
    """Uniform random numbers in [0, 1)."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def goodness_of_fit(observed: torch.Tensor, probability: torch.Tensor) -> float:
    """p-value of Pearson's chi-square test for counts `[cells, bins]`, every cell with a
    distribution of its own. Bins with an expected count below 5 are pooled, cell by cell; an
    impossible observation has p-value 0."""
    if observed[probability == 0].any():
        return 0.0
    expected, order = (observed.sum(1, keepdim=True) * probability).sort(1)
    # as many of the smallest bins as make up an expected 5
    rare = (expected < 5) | (expected.cumsum(1) - expected < 5)
    observed, expected = (
        torch.cat([counts.where(~rare, 0), counts.where(rare, 0).sum(1, keepdim=True)], 1).double()
        for counts in (observed.gather(1, order), expected))
    used = expected > 0
    freedom = used.sum() - used.any(1).sum()
    chi_square = ((observed - expected).square() / expected)[used].sum()
    return float(torch.special.gammaincc(freedom / 2, chi_square / 2)) if freedom else 1.0


def noise_keys(seed: int, rows: torch.Tensor, length: torch.Tensor, lookahead: int):
    """Those of the rows of these numbers."""
    noise = PublicNoise(seed)
    noise.rows = rows
    return noise.keys(length, lookahead)


def count(cells: torch.Tensor, bins: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return torch.bincount(cells * shape[1] + bins, minlength=shape[0] * shape[1]).view(shape)


# ---- 1. sampling: the algebra of losslessness, Saguaro sampling (4.2), public noise ----

PROPOSALS = {
    "another distribution": lambda p, q: q,
    "the target itself": lambda p, q: p,
    "disjoint support": lambda p, q: torch.where(p < p.median(-1, keepdim=True).values, q, 0.0),
    "Saguaro, C = 0.5": lambda p, q: sampling.saguaro_distribution(q, 3, 0.5),
    "Saguaro, C = 0": lambda p, q: sampling.saguaro_distribution(q, 3, 0.0),
    "Saguaro from the target itself": lambda p, q: sampling.saguaro_distribution(p, 2, 0.3),
    "point mass": lambda p, q: sampling.point_mass(q.argmax(-1), like=p),
}


@pytest.mark.parametrize("kind", PROPOSALS)
def test_a_draft_from_any_q_becomes_a_token_from_p(kind):
    """sum_s q(s) [accept(s) delta_s + (1 - accept(s)) residual] = p."""
    p = random_distributions(500, 7)
    q = PROPOSALS[kind](p, random_distributions(500, 7, seed=1))
    q = q / q.sum(-1, keepdim=True)
    accept = torch.stack([sampling.acceptance_probability(p, q, torch.full((500,), token))
                          for token in range(7)], -1).nan_to_num(0)  # 0/0: never drafted
    rejected = (q * (1 - accept)).sum(-1, keepdim=True)
    assert_close(q * accept + rejected * sampling.residual(p, q), p)


@pytest.mark.parametrize("kind", PROPOSALS)
@pytest.mark.parametrize("rows_apart", (0, 1, 1000), ids=("paper", "noise", "noise, rows apart"))
def test_verify_ends_as_theory_says_whatever_q_is(kind, rows_apart):
    """The frequencies of (k, s_1, s_2, t*): accepted up to the first rejection, and t* from the
    residual there, drawn with a uniform number or with public noise."""
    rows, V = 60_000, 5
    p, q = random_distributions(3, V), random_distributions(3, V, seed=1)
    p[0, 3] = p[1, 1] = 0
    p = p / p.sum(-1, keepdim=True)
    q = PROPOSALS[kind](p, q)[:2]
    q = q / q.sum(-1, keepdim=True)
    tokens = sampling.inverse_cdf(q.expand(rows, 2, V), draw_uniforms(rows, 2, seed=2))
    given = (p.expand(rows, 3, V), tokens, q.expand(rows, 2, V)[..., :0 if "mass" in kind else V])
    keys = noise_keys(0, torch.arange(rows) * rows_apart, torch.full((rows,), 7), 2)
    k, bonus = sampling.verify(*given, draw_uniforms(rows, 3), keys if rows_apart else None)
    accepted, r = torch.minimum(p[:2], q), sampling.residual(p[:2], q)
    rejected = (q - accepted)[..., None]
    law = torch.stack([  # [k, s_1, s_2, t*]
        rejected[0, :, None] * q[1, :, None] * r[0],
        accepted[0, :, None, None] * rejected[1] * r[1],
        accepted[0, :, None, None] * accepted[1, :, None] * p[2]])
    observed = torch.bincount(code(torch.stack([k, *tokens.T, bonus], 1), V), minlength=3 * V ** 3)
    assert goodness_of_fit(observed[None], law.view(1, -1)) > ALPHA


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_in_a_large_vocabulary_every_token_is_drawn_with_its_probability_to_1e_9(dtype):
    """A token is drawn by an interval as long as its probability. 5e-10 before the end of such an
    interval no later token may be drawn, and 5e-10 behind it none that is not later; nowhere, not
    even by the least and the greatest number, one of probability 0. Of 151,936 tokens we try 120;
    numbers or sums in float32 miss by 1e-8 and more."""
    V, near = 151_936, 5e-10
    p = random_distributions(V).to(dtype)  # from here on not normalised
    p[::3] = p[-9:] = 0
    tokens = 1 + (draw_uniforms(120) * (V - 1000)).long()
    ends = (p.double().cumsum(0) / p.double().sum())[tokens]
    extremes = torch.tensor([0, 1 - 2.0 ** -53], dtype=torch.float64)
    uniforms = torch.cat([ends - near, ends + near, extremes])
    drawn = torch.cat([sampling.inverse_cdf(p.expand(len(part), -1), part)
                       for part in uniforms.split(40)])
    before, behind, _ = drawn.split([120, 120, 2])
    assert (before <= tokens).all() and (behind > tokens).all() and (p[drawn] > 0).all()


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (1.5, 20, 0.9), (0.3, 5, 0.5)])
def test_probabilities_are_those_that_generate_samples_from(temperature, top_k, top_p):
    logits = 3 * random_distributions(64, 40).log()
    config = GenerationConfig(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    processors = random_model()._get_logits_processor(config, input_ids_seq_length=1)
    for dtype, wide, within in ((torch.float64, torch.float64, 1e-12),
                                (torch.bfloat16, torch.float32, 1e-5)):
        given = logits.to(dtype)
        ours = Sampler(temperature, top_k, top_p).probabilities(given.view(4, 16, 40)).view(64, 40)
        assert_close(ours, processors(None, given.to(wide)).softmax(-1), within)


def test_saguaro_sampling_is_definition_14():
    q = random_distributions(100, 9)
    cached = torch.zeros_like(q, dtype=torch.bool).scatter_(-1, q.topk(4).indices, True)
    for downweight in (1.0, 0.2, 0.0):
        weights = torch.where(cached, downweight * q, q)
        weights = weights / weights.sum(-1, keepdim=True)
        assert_close(sampling.saguaro_distribution(q, 4, downweight), weights)
    assert_close(sampling.saguaro_distribution(q, 0, 0.2), q)
    for nothing_left in (q, sampling.point_mass(torch.full((100,), 3), like=q)):
        assert_close(sampling.saguaro_distribution(nothing_left, 9, 0.0), nothing_left)


@pytest.mark.parametrize("fan_out", (1, 3, 6))
def test_as_C_falls_the_bonus_token_moves_into_the_cache_whatever_p_is_and_acceptance_falls(
        fan_out):
    """Theorem 15, and its price where p = q."""
    p, q = random_distributions(2000, 9), random_distributions(2000, 9, seed=1)
    in_cache, acceptance = [], []
    for downweight in torch.linspace(1, 0, 21).tolist():
        bonus = sampling.residual(p, sampling.saguaro_distribution(q, fan_out, downweight))
        in_cache.append(bonus.gather(-1, q.topk(fan_out).indices).sum(-1))
        sigma = sampling.saguaro_distribution(p, fan_out, downweight)
        acceptance.append(torch.minimum(p, sigma).sum(-1))
    assert (torch.stack(in_cache).diff(dim=0) >= -1e-12).all()
    assert (torch.stack(acceptance).diff(dim=0) <= 1e-12).all()
    assert (in_cache[-1] - in_cache[0]).mean() > 0.1 < (acceptance[0] - acceptance[-1]).mean()


# public noise: exponential, independent for all seeds, rows, positions and tokens

def test_public_noise_is_exponential_to_its_last_bits_and_independent_of_all_its_neighbours():
    row, start = torch.arange(24), torch.zeros(24).long()
    noise = torch.stack([  # [seeds, rows, positions, V]
        sampling.exponential_noise(noise_keys(seed, row, start, 23), 40) for seed in range(4)])
    u, even = (-noise).exp(), torch.full((1, 64), 1 / 64, dtype=torch.float64)
    assert noise.dtype == torch.float64 and (noise > 0).all() and noise.isfinite().all()
    for part in (u, (u * 2.0 ** 20).frac(), (u * 2.0 ** 40).frac()):
        observed = torch.bincount((part * 64).long().flatten(), minlength=64)
        assert goodness_of_fit(observed[None], even) > ALPHA
    eighth = (u * 8).long()
    for offset in itertools.product((-1, 0, 1), repeat=4):
        if offset > (0, 0, 0, 0):  # seed, row, position, token; the others are the same pairs again
            here, there = (eighth[tuple(slice(max(0, sign * step), size + min(0, sign * step))
                                        for step, size in zip(offset, u.shape))].flatten()
                           for sign in (1, -1))
            assert goodness_of_fit(count(here, there, (8, 8)).view(1, -1), even) > ALPHA, offset


def test_no_two_rows_of_a_run_share_noise():
    """Not even of two batches."""
    made = decoder(random_model(), mode="ar", temperature=1.5, max_new_tokens=40, public_noise=True)
    assert len({tuple(text) for _ in range(2) for text in made([[1, 2, 3]] * 3)}) == 6


@pytest.mark.parametrize("warping", (dict(temperature=1),
                                     dict(temperature=0.7, top_k=8, top_p=0.9)), ids=str)
def test_a_draft_that_knows_the_noise_and_the_target_guesses_every_bonus_token(warping):
    """A draft that is the target: all it drafts is accepted, and one guess at "all accepted" is
    right, in every batch. Without public noise it is wrong at times."""
    net = random_model()
    hits = []
    draft = copy.deepcopy(net)
    draft.resize_token_embeddings(48, mean_resizing=False)  # a padded vocabulary
    for noise in (True, False):
        made = decoder(net, draft, fan_out="0,0,0,1", public_noise=noise, max_new_tokens=20,
                       **warping)
        rounds = [new for _ in range(2) for new in texts_and_rounds(made, RAGGED)[1]]
        hits.append([source == PRIMARY for _, _, source in rounds])
    assert sum(hits[0]) == len(hits[0]) - 2 * len(RAGGED), "all but round 0"
    assert made.stats.rejected == 0
    assert 0 < sum(hits[1]) < sum(hits[0])


# random numbers: streams that have nothing in common, as fine as float64

def test_streams_of_neighbouring_seeds_have_nothing_in_common():
    """Of every stream of seeds 0 to 3 and of three large ones: no number twice, each stream even,
    and every two of them independent at equal and at neighbouring places."""
    n = 20_000
    even = torch.full((1, 64), 1 / 64, dtype=torch.float64)
    seeds = (0, 1, 2, 3, 2 ** 32, 2 ** 32 + 1, 2 ** 63 - 1)
    streams = [UniformStream(seed, stream).draw(n) for seed in seeds for stream in range(3)]
    together = torch.cat(streams)
    assert len(together.unique()) == len(together)
    assert (together * 2.0 ** 40).frac().ne(0).double().mean() > 0.99, "as fine as float64"
    for numbers in streams:
        observed = torch.bincount((numbers * 64).long(), minlength=64)
        assert goodness_of_fit(observed[None], even) > ALPHA
    for one, other in itertools.combinations([(u * 8).long() for u in streams], 2):
        for shift in (0, 1):
            pairs = count(one[shift:], other[:n - shift], (8, 8))
            assert goodness_of_fit(pairs.view(1, -1), even) > ALPHA


def test_a_run_of_one_seed_shares_no_random_number_with_the_next(monkeypatch):
    """Nor do target, branches and backups with each other, nor one round with another."""
    net = random_model()
    drawn = []
    draw = UniformStream.draw
    monkeypatch.setattr(UniformStream, "draw", lambda stream, *shape: (
        drawn.append(draw(stream, *shape)), drawn[-1])[1])
    for seed in range(4):
        made = decoder(net, imitation(net, 0.3), temperature=0.8, seed=seed)
        assert set(sources(run_rounds(made, RAGGED, 15)).tolist()) == {PRIMARY, BACKUP}
    assert {numbers.dtype for numbers in drawn} == {torch.float64}
    together = torch.cat([numbers.flatten() for numbers in drawn])
    assert len(together.unique()) == len(together) > 4000


# ---- 2. the speculation cache (Def. 4, section 4.1) and its worth ----

@pytest.mark.parametrize("policy", ("geometric", "uniform"))
def test_fan_out_spends_exactly_the_budget_for_all_arguments(policy):
    for budget, K, a, r in itertools.product((0, 1, 3, 40, 257), (0, 1, 2, 8),
                                             (0.0, 0.01, 0.5, 0.999, 1.0), (1e-6, 0.3, 1.0, 30.0)):
        shape = cache.fan_out_shape(policy, budget, K, a, r)
        assert len(shape) == K + 1 and sum(shape) == budget and min(shape) >= 0, (budget, K, a, r)
        assert policy == "geometric" or max(shape) - min(shape) <= 1


def test_fan_out_is_the_closed_form_of_theorem_12_rounded():
    """By whatever rounding: every F_k is less than one and a half from it, where no F_k is to be 0;
    and is it where that is integral. At r = 1 it holds sqrt(a) and sqrt(1 - a), rational for
    (3/5)^2 and (4/5)^2."""
    tried, integral = 0, 0
    for budget, K, a, r in itertools.product((24, 35, 200, 205, 215, 1115, 1235), (0, 1, 2, 3, 7),
                                             (9 / 25, 0.5, 16 / 25, 0.8, 0.95), (0.3, 1.0, 2.0)):
        exact = a ** (torch.arange(K + 1).double() / (1 + r))
        exact[K] *= (1 - a) ** (-1 / (1 + r))
        exact *= budget / exact.sum()
        if exact.min() >= 1:
            rounded = torch.tensor(cache.fan_out_shape("geometric", budget, K, a, r))
            whole = (exact - exact.round()).abs().max() < 1e-9
            assert (rounded - exact).abs().max() < (1e-9 if whole else 1.5), (budget, K, a, r)
            tried, integral = tried + 1, integral + int(whole and K > 0)
    assert tried > 200 and integral >= 6


def test_fan_out_is_the_best_of_all_shapes():
    """Of integers: here the power law must also say something of F = 0, which counts as 2."""
    for budget, K, a, r in itertools.product((1, 3, 6, 9), range(4), (0.2, 0.6, 0.9), (0.5, 1, 2)):
        likelihood = cache.acceptance_distribution(a, K)

        def misses(shape) -> float:
            return sum(P * (F ** -r if F else 2.0) for P, F in zip(likelihood, shape))

        best = min(misses(shape) for shape in itertools.product(range(budget + 1), repeat=K + 1)
                   if sum(shape) == budget)
        ours = cache.fan_out_shape("geometric", budget, K, a, r)
        assert misses(ours) <= best + 1e-12, (budget, K, a, r, ours)


def test_look_up_hits_if_and_only_if_the_outcome_was_guessed_and_takes_what_was_prepared_for_it():
    rows, branches, K, vocab = 400, 6, 3, 7
    guessed = draw_uniforms(rows, (K + 1) * vocab).argsort()[:, :branches]  # k * vocab + t*
    tokens = (draw_uniforms(rows, branches, K) * vocab).long()
    q = draw_uniforms(rows, branches, K, vocab, seed=1)
    prepared = SpeculationCache(Outcome(guessed // vocab, guessed % vocab), tokens, q, None)
    actual = (draw_uniforms(rows, seed=2) * (K + 1) * vocab).long()
    outcome, match = Outcome(actual // vocab, actual % vocab), guessed == actual[:, None]
    taken, taken_q, hit = prepared.look_up(outcome)
    assert hit.equal(match.any(1)) and 20 < hit.sum() < rows - 20
    assert taken[hit].equal(tokens[match]) and taken_q[hit].equal(q[match])
    tokens, q, hit = SpeculationCache.empty(rows, K, q[0, 0, 0]).look_up(outcome)
    assert not hit.any() and tokens.shape == (rows, K) and q.shape == (rows, K, vocab)


# what a cache is worth (Thms. 7 and 17, Cors. 8, 9 and 16)

def accept(rows: int, lookahead: int, rate: float, seed: int = 0) -> torch.Tensor:
    """Accepted tokens `[rows]`, each token with probability `rate`."""
    return (draw_uniforms(rows, lookahead, seed=seed) < rate).long().cumprod(1).sum(1)


@pytest.mark.parametrize("rows, T_p", ((1, 0.8), (1, 1.6), (4, 0.8), (4, 1.6)))
def test_throughput_is_that_of_simulated_rows_in_lock_step(rows, T_p):
    """Theorem 7, and Corollary 16; E by Leviathan et al. In 100,000 rounds each row hits with
    probability 0.8, and of its 4 drafted tokens each is accepted with 0.9; after a miss with
    0.5."""
    hit = draw_uniforms(100_000, rows) < 0.8
    accepted = [accept(hit.numel(), 4, a, seed=1).view(hit.shape) for a in (0.9, 0.5)]
    tokens, seconds = 1 + torch.where(hit, *accepted), torch.where(hit.all(1), max(1, T_p), 1.5)
    expected = (cache.expected_tokens(a, 4) for a in (0.9, 0.5))
    simulated = float(tokens.sum() / rows / seconds.sum())
    assert cache.throughput(0.8, *expected, T_p, 0.5, rows) == pytest.approx(simulated, rel=0.01)


def test_ssd_that_falls_back_to_its_primary_is_as_fast_over_sd_as_corollaries_8_and_9_say():
    """A backup that drafts as the primary does (E_miss = E_hit), or better by what it costs."""
    for hit_rate, T_sd, tokens_hit, tokens_sd, better in draw_uniforms(2000, 5).tolist():
        T_sd, tokens_hit, tokens_sd = 2 * T_sd, 1 + 4 * tokens_hit, 1 + 4 * tokens_sd
        sd = cache.throughput(0, tokens_sd, tokens_sd, 1, T_sd)
        least, most = cache.speedup_over_sd_bounds(hit_rate, tokens_hit, tokens_sd, T_sd)
        slow, fast = (cache.throughput(hit_rate, tokens_hit, tokens_miss, 0.9, T_sd) / sd
                      for tokens_miss in (tokens_hit, tokens_hit * (1 + T_sd * better)))
        assert least == pytest.approx(slow) and slow <= fast <= most + 1e-9, "Corollary 9"
        assert slow >= tokens_hit / tokens_sd - 1e-9, "Corollary 8: never slower"


def test_the_critical_batch_size_is_right_for_all_arguments():
    """Theorem 17: it is where the two backups change places in Corollary 16."""
    bounds = []
    for p, neural, fast, T_p, T_neural, T_fast in draw_uniforms(2000, 6).tolist():
        p, T_p, T_neural, neural = round(p, 1), 2 * T_p, 2 * T_neural, 1 + 3 * neural
        fast, T_fast = 1 + (neural - 1) * fast, T_neural * T_fast  # worse and faster
        bounds.append(cache.critical_batch_size(p, 4.0, neural, fast, T_p, T_neural, T_fast))
        for batch_size in (1, 2, 8, 64):
            gain = (cache.throughput(p, 4.0, neural, T_p, T_neural, batch_size)
                    - cache.throughput(p, 4.0, fast, T_p, T_fast, batch_size))
            assert (gain > 0) == (batch_size < bounds[-1]) or abs(gain) < 1e-12
    assert {0.0, float("inf")} < set(bounds) and sum(1 < b < 64 for b in bounds) > 20


@pytest.mark.parametrize("a, chosen", ((0.9, {"neural", "lookup"}), (0.15, {"lookup"})))
def test_backup_auto_is_the_better_one_at_every_batch_size(a, chosen):
    """By Corollary 16 with T_p = 1 and T_b = K / (K + 1), from the given a and r."""
    shape = cache.geometric_fan_out(20, 4, a, 0.3)
    hit_rate = cache.power_law_hit_rate(shape, a, 0.3)
    E = cache.expected_tokens(a, 4)
    E_fast = cache.expected_tokens(0.2, 4)
    backups = []
    for rows in (1, 2, 4, 8, 16, 32, 64):
        made = plan(settings(lookahead=4, budget=20, backup="auto", acceptance_rate=a,
                             miss_exponent=0.3, batch_size=rows))
        backups.append(made.backup)
        speed = {"neural": cache.throughput(hit_rate, E, E, 1.0, 0.8, rows),
                 "lookup": cache.throughput(hit_rate, E, E_fast, 1.0, 0.0, rows)}
        assert speed[made.backup] == max(speed.values()), rows
        after = {"neural": a, "lookup": 0.2}[made.backup]
        assert made.fan_out == [shape, cache.geometric_fan_out(20, 4, after, 0.3)]
    assert set(backups) == chosen


# what is counted on the way

@pytest.mark.parametrize("a, r", ((0.9, 0.6), (0.2, 1.5)))
def test_the_table_of_ranks_tells_a_r_and_the_hits_of_every_shape(a, r):
    """400,000 outcomes by the paper's model: k of 5 tokens accepted, rank >= F with F^-r / 2."""
    shape, rows, depth = [6, 4, 0, 3, 1, 2], 400_000, 16
    accepted = accept(rows, 5, a)
    ranks = ((2 * draw_uniforms(rows, seed=1)) ** (-1 / r)).clamp(max=1e6).long()
    hits = (ranks < torch.tensor(shape)[accepted]).double().mean()
    table = count(accepted, ranks.clamp(max=depth), (6, depth + 1))
    assert cache.counted_hit_rate(table, shape) == pytest.approx(float(hits))
    assert cache.power_law_hit_rate(shape, a, r) == pytest.approx(float(hits), abs=0.005)
    assert cache.counted_acceptance_rate(table) == pytest.approx(a, abs=0.005)
    assert cache.fit_power_law(cache.counted_miss_rates(table)) == pytest.approx(r, abs=0.05)
    assert cache.fit_power_law([0.0] * 8) == 1.0, "nothing missed, nothing to fit"


@pytest.mark.parametrize("mode", ("ssd", "sd"))
def test_the_draft_counts_the_rank_of_every_bonus_token(mode):
    """By who drafted and by k; and the table says how often the cache hit."""
    net, shape = random_model(), [3, 2, 1, 2]
    made = decoder(net, imitation(net, 0.2), mode, temperature=0.8, fan_out="3,2,1,2",
                   backup="random", backup_acceptance_rate=0.5)
    record = run_rounds(made, RAGGED, 15)
    tables = made.speculator.report()["bonus_ranks"]
    for source, table in zip((PRIMARY, BACKUP), tables):
        k = torch.cat([k[s.source == source] for s, (k, _) in record[1:-1]])
        expected = torch.bincount(k, minlength=4) if mode == "ssd" else torch.zeros(4).long()
        assert table.sum(1).equal(expected)
    if mode == "ssd":
        hits = sources(record[1:]).eq(PRIMARY).double().mean()
        assert cache.counted_hit_rate(sum(tables), shape) == pytest.approx(float(hits))
        assert 0.2 < hits < 0.98


# prompt look-up (section 4.3)

def prompt_lookup_plainly(text: list[int], count: int) -> list[int] | None:
    """What followed the longest and then most recent match of the end of the text, by two loops;
    where the text ends it begins again."""
    for length in range(min(MAX_MATCH, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length:end] == text[-length:]:
                return (text[end:] * count)[:count]
    return None


def test_prompt_lookup_continues_the_longest_and_then_most_recent_match():
    """In random texts, in periodic ones, and where a longer match lies before one of
    MAX_MATCH tokens."""
    choose, texts, found = random.Random(0), [], []
    for _ in range(400):
        period = choose.choices(range(choose.randint(1, 40)), k=choose.randint(1, 40))
        texts.append((period * 30)[:choose.randint(1, 120)])
    for shared in (MAX_MATCH - 1, MAX_MATCH, MAX_MATCH + 1, MAX_MATCH + 5):
        end = choose.choices(range(9), k=MAX_MATCH + 9)
        texts.append(end + [20, 21, 22, 23] + end[-shared:] + [30, 31, 32, 33] + end)
    length, width = torch.tensor([len(text) for text in texts]), max(map(len, texts)) + 5
    padded = torch.tensor([(text + text[-1:] * width)[:width] for text in texts])
    for text, proposed in zip(texts, prompt_lookup(padded, length, 6, 50).tolist()):
        expected = prompt_lookup_plainly(text, 6)
        found.append(expected is not None)
        assert proposed == expected or not found[-1], text
        assert len(proposed) == 6 and all(0 <= token < 50 for token in proposed)
    assert 20 < found.count(False) < 200


# ---- 3. KV slots, tree attention, and how rows end ----

def assert_kv_is_fresh(model: CausalLM, texts: list[list[int]], missing: int) -> None:
    """But for the `missing` last tokens, the slots of every row hold what a plain pass over its
    text computes."""
    for row, text in enumerate(texts):
        length = len(text) - missing
        with torch.inference_mode():
            fresh = model.model(torch.tensor([text[:length]])).past_key_values.layers
        for number, plain in enumerate(fresh):
            for slots, wanted in zip(model.kv.layers[number], (plain.keys, plain.values)):
                assert_close(slots[row, :, :length], wanted[0], 1e-9)


@pytest.mark.parametrize("mode, backup, temperature", (
    ("ssd", "neural", 0), ("ssd", "neural", 0.7), ("ssd", "lookup", 0.7),
    pytest.param("sd", "neural", 0.7, marks=slow), pytest.param("ssd", "random", 0, marks=slow)))
@pytest.mark.parametrize("ends", (pytest.param({}, id="none ends", marks=slow),
                                  pytest.param({1: 6, 3: 13}, id="two rows end")))
def test_after_twenty_rounds_of_hits_and_misses_all_KV_equals_a_fresh_prefill(
        mode, backup, temperature, ends):
    """A row that is finished stands still, and the others go on."""
    net = random_model(num_hidden_layers=2, max_position_embeddings=128)
    made = decoder(net, imitation(net, 0.15), mode, temperature=temperature, backup=backup)
    target = made.target
    draft = made.speculator.draft if mode == "ssd" else made.speculator
    record = run_rounds(made, RAGGED, 20, ends)
    texts = [prompt + text[:count].tolist()
             for prompt, text, count in zip(RAGGED, *written(record))]
    target.advance(record[-1][1])
    assert target.length.tolist() == list(map(len, texts))
    assert_kv_is_fresh(target.model, texts, 1)  # of the last token nothing is known yet
    speculation = made.speculator.speculate(*record[-1])
    if mode == "ssd":
        draft.pre_speculate(speculation)
        assert set(sources(record).tolist()) == {PRIMARY, BACKUP}
    assert draft.length.tolist() == list(map(len, texts))
    assert_kv_is_fresh(draft.model, texts, 1 if ends else 0)  # a finished row rewrites its last


@pytest.mark.parametrize("family, temperature, public_noise", [
    ("llama", 0, False), ("llama", 0.8, True), ("gpt2", 0.8, False), ("gpt_neox", 0.8, False)])
def test_the_tree_grows_from_the_likeliest_outcomes_as_if_each_were_the_text(
        family, temperature, public_noise):
    """By plain passes. The outcomes: for each k, after the text and s_1..s_k, the likeliest tokens
    but for s_{k+1}; with public noise, after division by that of the bonus token's position. Each
    branch: q of every step is what follows the text, s_1..s_k, t* and the branch's own tokens; and
    a backup's, what follows the text and its own; both by Saguaro sampling."""
    net, shape, fan_out = random_model(family, num_hidden_layers=2), [3, 2, 1, 2], "3,2,1,2"
    made = decoder(net, imitation(net, 0.2), temperature=temperature, fan_out=fan_out,
                   public_noise=public_noise, seed=5, downweight=0.5)
    draft, record = made.speculator.draft, run_rounds(made, RAGGED, 4)
    speculation = made.speculator.speculate(*record[-1])
    prepared = draft.pre_speculate(speculation)

    def plainly(text: list[int], last: int) -> torch.Tensor:
        with torch.no_grad():
            logits = draft.model.model(torch.tensor([text])).logits[0, -last:]
        return Sampler(temperature or 1).probabilities(logits)

    def assert_follows(text: list[int], tokens: torch.Tensor, q: torch.Tensor) -> None:
        follows = plainly(text + tokens.tolist(), 4)[:-1]
        if temperature:
            assert_close(q, torch.stack([sampling.saguaro_distribution(each, F, 0.5)
                                         for each, F in zip(follows, shape)]), 1e-9)
        else:
            assert tokens.equal(follows.argmax(-1))

    for row, drafted in enumerate(speculation.tokens):
        text = draft.text[row, :draft.length[row]].tolist()
        guesses = list(zip(*(part[row].tolist() for part in prepared.guesses)))
        scores = plainly(text + drafted.tolist(), 4)
        if public_noise:
            keys = noise_keys(5, torch.tensor([row]), torch.tensor([len(text)]), 3)
            scores = scores / sampling.exponential_noise(keys, 40)[0]
        scores[range(3), drafted] = -1
        assert set(guesses) == {(k, token) for k, F in enumerate(shape)
                                for token in scores[k].topk(F).indices.tolist()}
        for (k, bonus), *branch in zip(guesses, prepared.tokens[row], prepared.q[row]):
            assert_follows([*text, *drafted[:k].tolist(), bonus], *branch)
        assert_follows(text, drafted, speculation.q[row])


# ---- 4. greedy decoding: token for token what `generate` writes ----

@pytest.mark.parametrize("family, changes", (
    ("llama", {}), ("llama", dict(num_key_value_heads=2)),
    ("llama", dict(tie_word_embeddings=True)),
    ("qwen2", dict(num_key_value_heads=1)), ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    ("mistral", dict(sliding_window=64, num_key_value_heads=2)), ("gpt2", {}), ("gpt_neox", {})))
def test_greedy_text_is_that_of_generate(family, changes):
    """In hits and misses, and after full, partial and no acceptance."""
    net = random_model(family, num_hidden_layers=2, **changes)
    made = decoder(net, imitation(net, 0.1), max_new_tokens=24)
    texts, rounds = texts_and_rounds(made, RAGGED)
    assert texts == greedy_reference(net, RAGGED, 24)
    rounds = rounds[len(RAGGED):]
    assert {1, 4} < {len(new) for _, new, _ in rounds}, "K = 3"
    assert {source for *_, source in rounds} == {PRIMARY, BACKUP}


@pytest.mark.parametrize("family, changes", (
    ("bloom", {}), ("mamba", {}),
    ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=0))))
def test_an_architecture_that_does_not_fit_into_slots_is_refused(family, changes):
    """ALiBi, recurrence, a window shorter than the text."""
    with pytest.raises(UserError, match=family):
        decoder(random_model(family, **changes), mode="ar", max_new_tokens=30)(RAGGED)


@lru_cache
def half_pair(dtype: str):
    net = random_model(num_hidden_layers=2)
    return [copy.deepcopy(each).to(getattr(torch, dtype)) for each in (net, imitation(net, 0.1))]


@pytest.mark.parametrize("mode, dtype", (
    ("ssd", "bfloat16"), *(pytest.param(*case, marks=slow) for case in (
        ("ar", "bfloat16"), ("sd", "bfloat16"), ("ssd", "float16")))))
def test_in_half_precision_text_is_the_targets_within_rounding(mode, dtype):
    """A pass over K+1 tokens rounds otherwise than one over all, so near-ties may fall otherwise:
    the logit of every greedy token is within rounding of the largest."""
    net, draft = half_pair(dtype)
    for temperature in (0, 1.0):
        made = decoder(net, draft, mode, max_new_tokens=30, dtype=dtype, temperature=temperature)
        texts = made(RAGGED)
        assert mode == "ar" or made.stats.accepted and made.stats.rejected
        if temperature:
            assert long_text_p_value(net, Sampler(temperature), RAGGED, texts) > ALPHA
        for prompt, text in zip(RAGGED, texts if not temperature else []):
            with torch.inference_mode():
                logits = net(torch.tensor([prompt + text])).logits[0, len(prompt) - 1:-1].double()
            short = logits.amax(-1) - logits[range(len(text)), text]
            assert (short <= 4 * torch.finfo(net.dtype).eps * logits.abs().amax()).all()
            assert (short == 0).double().mean() > 0.9


@pytest.mark.parametrize("mode, overflows", (("ar", "target"), ("ssd", "target"), ("ssd", "draft")))
@pytest.mark.parametrize("choices", (dict(temperature=0), dict(temperature=1.0),
                                     dict(temperature=1.0, public_noise=True)), ids=str)
def test_logits_that_overflow_are_said_in_one_sentence(mode, choices, overflows):
    """Not at load time, where no probe could find it. A greedy draft is verified as if nothing
    was."""
    net, draft = map(copy.deepcopy, half_pair("float16"))
    made = decoder(net, draft, mode, dtype="float16", max_new_tokens=8, **choices)
    broken = net if overflows == "target" else draft
    broken.lm_head.weight.data *= 4e4
    if overflows == "draft" and choices["temperature"] == 0:
        assert all(0 <= token < 40 for text in made(RAGGED) for token in text)
    else:
        with pytest.raises(UserError, match="float16.*--dtype float32"):
            made(RAGGED)


# ---- 5. sampled text: frequencies against the target's exact probabilities ----

VOCAB, K, PROMPT, SAMPLES = 6, 2, [1, 2], 120_000
EXACT = dict(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
             num_key_value_heads=1, intermediate_size=8, max_position_embeddings=32,
             initializer_range=0.7)


def code(tokens: torch.Tensor, base: int = VOCAB) -> torch.Tensor:
    """Texts `[N, n]` as numbers `[N]`: their digits, in the order of `itertools.product`."""
    return (tokens * base ** torch.arange(tokens.shape[1]).flip(0)).sum(1)


@lru_cache
def exact_pair():
    target = random_model(seed=2, **EXACT)
    return target, imitation(target, 0.3)


def sampler_of(temperature=1.0, top_k=0, top_p=1.0, **_) -> Sampler:
    return Sampler(temperature, top_k, top_p)


def following(net, n: int, sampler: Sampler) -> torch.Tensor:
    """The next-token distributions `[VOCAB^n, VOCAB]` after the prompt and every text of n tokens,
    by plain passes."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=n))).long().view(VOCAB ** n, n)
    texts = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)
    with torch.inference_mode():
        return sampler.probabilities(net(texts, use_cache=False).logits[:, -1])


@lru_cache(maxsize=None)
def exact_joint(**choices) -> torch.Tensor:
    """`[1, VOCAB^3]`: the target's probability of every text of three tokens."""
    probability = torch.ones(1, dtype=torch.float64)
    for length in range(3):
        after = following(exact_pair()[0], length, sampler_of(**choices))
        probability = (probability[:, None] * after).flatten()
    return probability[None]


@lru_cache(maxsize=None)
def simulate(samples: int = SAMPLES, **choices):
    """Two rounds of SSD after round 0, in many rows with the same prompt: [(speculation, outcome)],
    q left out. Every chunk begins anew, with seeds of its own."""
    chunk = min(samples, 10_000)
    torch.set_num_threads(2)  # so many rows are worth sharing
    chunks = [run_rounds(decoder(*exact_pair(), lookahead=K, budget=4, seed=seed, **choices),
                         [PROMPT] * chunk, 2) for seed in range(0, 10 * samples // chunk, 10)]
    torch.set_num_threads(1)
    return [(Speculation(torch.cat([s.tokens for s, _ in parts]), None,
                         torch.cat([s.source for s, _ in parts])),
             Outcome(*map(torch.cat, zip(*(o for _, o in parts))))) for parts in zip(*chunks)]


def joint_p_value(record: list, **choices) -> float:
    """The central statistic: the first three tokens against the target's exact joint
    distribution."""
    observed = torch.bincount(code(written(record)[0][:, :3]), minlength=VOCAB ** 3)
    return goodness_of_fit(observed[None], exact_joint(**choices))


SETTINGS = [
    dict(temperature=1.4, top_k=4, downweight=0.5, samples=30_000),  # also in the edit loop
    *(pytest.param(choices, marks=slow) for choices in (
        dict(temperature=0.7, downweight=0.0, backup="lookup", samples=30_000),
        dict(temperature=1.0, downweight=0.5),
        dict(temperature=1.0, top_p=0.9, backup="random", fan_out="2,1,1", samples=30_000)))]


def test_the_sample_is_large_enough_to_see_two_percent():
    """The chi-square of N samples from a distribution at total variation d is noncentral, with a
    noncentrality of at least 4 N d^2: the sum of squares of that many normal variables, one of them
    shifted. We draw a hundred thousand."""
    freedom = int((exact_joint() * SAMPLES >= 5).sum())
    torch.manual_seed(0)
    shifted = torch.randn(100_000) + (4 * SAMPLES * 0.02 ** 2) ** 0.5
    chi_square = torch.distributions.Chi2(freedom - 1).sample((100_000,)) + shifted.square()
    p_values = torch.special.gammaincc(torch.tensor(freedom / 2).double(), chi_square.double() / 2)
    assert (p_values < ALPHA).double().mean() > 0.999


def test_the_statistic_accepts_the_truth_and_rejects_a_distribution_at_two_percent():
    probability, uniforms = exact_joint()[0], draw_uniforms(SAMPLES)

    def p_value(distribution):
        texts = torch.searchsorted(distribution.cumsum(0), uniforms).clamp(max=VOCAB ** 3 - 1)
        return goodness_of_fit(torch.bincount(texts, minlength=VOCAB ** 3)[None], probability[None])

    assert p_value(probability) > 0.001
    sign = torch.where(probability.argsort().argsort() % 2 == 0, 1.0, -1.0).double()
    moved = probability * sign / (probability * sign).abs().sum()
    moved = probability + 0.04 * (moved - probability * moved.sum())  # all off by the same share
    assert 0.019 < (moved - probability).abs().sum() / 2 < 0.021
    assert p_value(moved / moved.sum()) < ALPHA


@pytest.mark.parametrize("choices", SETTINGS, ids=str)
def test_the_first_three_tokens_have_exactly_the_targets_joint_distribution(choices):
    record = simulate(**choices)
    accepted = torch.cat([outcome.num_accepted for _, outcome in record[1:]])
    rate = accepted.sum() / (accepted.sum() + (accepted < K).sum())
    assert 0.3 < rate < 0.8, f"draft and target must differ, and agree at times: {rate}"
    assert joint_p_value(record, **choices) > ALPHA


@pytest.mark.parametrize("choices", SETTINGS, ids=str)
def test_given_k_and_given_a_hit_or_miss_the_token_after_is_the_targets(choices):
    """The first token of round 2, given everything before it, k of round 1 included: branch by
    branch of the cache."""
    record = simulate(**choices)
    (_, outcome), (speculation, _), (texts, _) = record[1], record[2], written(record)
    for k, source in itertools.product(range(K + 1), (PRIMARY, BACKUP)):
        rows = (outcome.num_accepted == k) & (speculation.source == source)
        probability = following(exact_pair()[0], k + 2, sampler_of(**choices))
        observed = count(code(texts[rows, :k + 2]), texts[rows, k + 2], probability.shape)
        assert observed.sum() > 100 and goodness_of_fit(observed, probability) > ALPHA, (k, source)


# every setting at once, over long texts

def long_text_p_value(net, sampler: Sampler, prompts: list, texts: list) -> float:
    """Were these texts drawn from the target? Replays them through it: which uniform number has
    drawn each token, if the likeliest tokens come first? Any of an interval as long as the token's
    probability p; we draw one of these, and such numbers are uniform and independent whatever the
    text before."""
    numbers = []
    for prompt, text in zip(prompts, texts):
        with torch.inference_mode():
            logits = net(torch.tensor([prompt + text])).logits[0, len(prompt) - 1:-1]
        p, order = sampler.probabilities(logits).double().sort(-1, descending=True)
        drawn = order == torch.tensor(text)[:, None]
        if (p[drawn] == 0).any():
            return 0.0
        within = draw_uniforms(len(text), 1, seed=len(numbers))
        numbers.append((p.cumsum(-1) - within * p)[drawn])
    eighth = (torch.cat(numbers) * 8).long().clamp(max=7)
    even = torch.full((1, 8), 1 / 8, dtype=torch.float64)
    return goodness_of_fit(torch.bincount(eighth, minlength=8)[None], even)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=slow if n > 3 else ()) for n in range(24)])
def test_in_random_settings_all_texts_are_the_targets(seed):
    """Every setting at once; greedy, if the seed is even, and equal to `generate`. The vocabulary
    has 40 tokens, the draft's embedding and head have 33 or 48 rows; or the draft is unrelated, and
    its context short. Texts end with a token, at their length, or at the end of the context."""
    choose = random.Random(seed)
    K, rows, greedy = choose.randint(1, 6), choose.randint(3, 8), seed % 2 == 0
    by_hand = ",".join(str(choose.randint(0, 4)) for _ in range(K + 1))
    choices = dict(
        lookahead=K, budget=choose.choice((0, 1, 7, 100)), seed=seed,
        fan_out=choose.choice(("geometric", "uniform", by_hand)),
        backup=choose.choice(("neural", "lookup", "random", "auto")),
        downweight=choose.choice((0.0, 0.5, 1.0)), public_noise=choose.random() < 0.3,
        max_new_tokens=choose.choice((1, 5, 40)) if greedy else 60,
        temperature=0 if greedy else choose.choice((0.7, 1)), top_k=choose.choice((0, 6)),
        top_p=choose.choice((0.95, 1.0)))
    net = random_model(seed=seed, initializer_range=0.2, max_position_embeddings=128)
    draft = imitation(net, 0.2)
    draft.resize_token_embeddings(choose.choice((33, 48)), mean_resizing=False)
    draft = choose.choice((draft, draft, random_model("gpt2", max_position_embeddings=24)))
    mode = choose.choice(("ar", "sd", "ssd", "ssd", "ssd"))
    made = decoder(net, draft, mode, **choices)
    made.eos = choose.sample(range(40), choose.choice((0, 1, 4)))
    prompts = [[choose.randrange(40)] * choose.choice((1, 2, 7, 60, 120)) for _ in range(rows)]
    texts, rounds = texts_and_rounds(made, prompts)
    max_new = [min(choices["max_new_tokens"], 128 - len(prompt)) for prompt in prompts]
    for row, (prompt, text, room) in enumerate(zip(prompts, texts, max_new)):
        assert text == [token for number, new, _ in rounds if number == row for token in new]
        assert not set(text[:-1]) & set(made.eos), "nothing follows an ending"
        assert len(text) == room or len(text) < room and text[-1] in made.eos
        assert not greedy or [text] == greedy_reference(net, [prompt], room, made.eos)
    assert greedy or long_text_p_value(net, sampler_of(**choices), prompts, texts) > ALPHA
    stats, rounds = made.stats, rounds[rows:]  # without round 0
    hits = [len(new) for _, new, source in rounds if source == PRIMARY]
    assert (stats.tokens, stats.prefill_tokens) == (sum(map(len, texts)), rows)
    assert (stats.row_rounds, stats.hits, stats.hit_tokens) == (len(rounds), len(hits), sum(hits))
    assert stats.tokens - rows <= stats.accepted + stats.row_rounds  # less what follows an ending
    assert stats.accepted + stats.rejected <= K * stats.row_rounds >= K * stats.rejected


# ---- 6. classic mistakes: each must be caught by the statistic of chapter 5 ----

def replace_line(monkeypatch, owner, name: str, right: str, wrong: str) -> None:
    """Plant a mistake: rewrite one line of a function of the program."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{name} no longer holds {right!r}: adapt this mistake"
    planted = {}
    exec(source.replace(right, wrong), vars(sys.modules[function.__module__]), planted)
    monkeypatch.setattr(owner, name, planted[name])
    for backup, registered in draft_worker.BACKUPS.items():
        if registered is function:
            monkeypatch.setitem(draft_worker.BACKUPS, backup, planted[name])


DRAWN = "return inverse_cdf(q, uniforms), q"
P = "p = self.sampler.probabilities(logits)"
MISTAKES = {
    "q reported without the C-rescaling":
        (Sampler, "sample", DRAWN,
         "return inverse_cdf(q, uniforms), self.probabilities(logits)"),
    "temperature applied to p and to the draw, but not to the reported q":
        (Sampler, "sample", DRAWN, "return inverse_cdf(q, uniforms), logits.softmax(-1)"),
    "temperature applied to q only":
        (TargetWorker, "verify", P, "p = logits.softmax(-1)"),
    "greedy drafts reported as if drawn from q":
        (Sampler, "sample", DRAWN, "return q.argmax(-1), q"),
    "look-ups reported as if drawn at random":
        (draft_worker, "lookup_backup", "one_hot(tokens, vocab_size)[..., :len(q_like)]",
         "one_hot(tokens, vocab_size) * 0 + 1.0 / vocab_size"),
    "after a miss, tokens accepted if and only if they equal the argmax":
        (TargetWorker, "verify", P, P +
         "; wrong = (drafted != p[:, :-1].argmax(-1)).double()"
         "; uniforms[:, :-1] = uniforms[:, :-1].where(speculation.source[:, None] == 0, wrong)"),
    "tokens accepted if p > q, else rejected":
        (sampling, "acceptance_probability", ".clamp(max=1)", ".floor()"),
    "tokens after a rejection counted as accepted":
        (sampling, "verify", "accepted.long().cumprod(1).sum(1)", "accepted.long().sum(1)"),
    "residual not renormalised (what is missing falls to the last token)":
        (sampling, "residual", "excess / total",
         "torch.cat([excess[..., :-1], 1 - excess[..., :-1].sum(-1, keepdim=True)], -1)"),
    "residual taken at the wrong position":
        (sampling, "verify", "q[row, num_accepted])", "q[row, num_accepted - 1])"),
    "bonus token drawn from p instead of the residual":
        (sampling, "verify", "residual(p[row, num_accepted], q[row, num_accepted])",
         "p[row, num_accepted]"),
    "bonus token drawn with the uniform number that rejected":
        (sampling, "verify", "uniforms[:, lookahead])", "uniforms[row, num_accepted])"),
    "drafted token possible as the bonus token of its own rejection":
        (sampling, "residual", "excess = (p - q).clamp", "excess = (p - 0.5 * q).clamp"),
    "a hit served with the tokens of another row":
        (SpeculationCache, "look_up", "self.tokens[row,", "self.tokens[row.roll(1),"),
    "a hit served with the tokens of another branch":
        (SpeculationCache, "look_up", "self.tokens[row, branch]", "self.tokens[row, branch - 1]"),
    "a speculation that was verified already served again":
        (DraftWorker, "speculate", "self.count_ranks(",
         "tokens, q = self.served = getattr(self, 'served', (tokens, q)); self.count_ranks("),
    "all tokens of a branch drawn with the same uniform number":
        (DraftWorker, "pre_speculate", "uniforms[step]", "uniforms[0]"),
    "the target's uniform numbers the same in every round":
        (TargetWorker, "verify", "self.uniforms.draw(", "sampling.UniformStream(7, 0).draw("),
    "drafts drawn with the public noise of the bonus token at their position":
        (DraftWorker, "pre_speculate", "branches.append((tokens, q))", """keys = torch.cat([
                self.noise.keys(at, 0) for at in (tree.positions + step + 1).unbind(1)], 1)
            tokens = (q / sampling.exponential_noise(keys, q.shape[-1])).argmax(-1)
            branches.append((tokens, q))"""),
    "public noise the same at all positions":
        (PublicNoise, "keys", "^ position)", "^ 0 * position)"),
    "public noise the same in all rows":
        (PublicNoise, "keys", "^ self.rows)", "^ 0 * self.rows)"),
}
# Wrong, and yet lossless: whatever is proposed for whatever reason, it is verified against the q it
# was drawn from.
HARMLESS = {
    "a hit served with the tokens and the q of another row":
        (SpeculationCache, "look_up", "torch.arange(len(match))",
         "torch.arange(len(match)).roll(1)"),
    "a hit served though the bonus token is another":
        (cache, "matches", "return same_k & same_bonus", "return same_k"),
    "branches that see each other":
        (draft_worker, "tree_layout", "torch.eye(n, dtype=torch.bool)",
         "torch.ones(n, n, dtype=torch.bool)"),
    "branches that overwrite the trunk's KV":
        (draft_worker, "tree_layout", "trunk + torch.arange(lookahead * n)",
         "1 + torch.arange(lookahead * n)"),
    "a draft that guesses at random":
        (Sampler, "sample", "self.probabilities(logits)",
         "torch.full_like(logits, 1 / logits.shape[-1])"),
    "a draft that mistakes the public noise":
        (DraftWorker, "trunk_pass", "keys(self.length", "keys(self.length + 1"),
}
CONTROL = dict(temperature=0.7, downweight=0.5)


def p_value_with(name: str, change: tuple, samples: int = 20_000) -> float:
    """Mistakes about public noise are planted where it is on, and those about look-ups where these
    are the backup."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_line(monkeypatch, *change)
        choices = CONTROL | {"public_noise": "public noise" in name,
                             "backup": "lookup" if "look-ups" in name else "neural"}
        return joint_p_value(simulate.__wrapped__(samples, **choices), **CONTROL)


@slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_classic_mistake_is_caught(mistake):
    assert any(p_value_with(mistake, MISTAKES[mistake], n) < ALPHA for n in (5_000, 20_000))


@slow
@pytest.mark.parametrize("change", HARMLESS)
def test_it_is_lossless_whatever_the_cache_holds(change):
    assert p_value_with(change, HARMLESS[change], 10_000) > ALPHA


tree = test_the_tree_grows_from_the_likeliest_outcomes_as_if_each_were_the_text
look_up_hits = (
    test_look_up_hits_if_and_only_if_the_outcome_was_guessed_and_takes_what_was_prepared_for_it)
CAUGHT_BY = dict(zip(HARMLESS, (  # in the order above
    (look_up_hits,), (look_up_hits,), (tree, "llama", 0.8, True),
    (test_after_twenty_rounds_of_hits_and_misses_all_KV_equals_a_fresh_prefill,
     "ssd", "neural", 0, {}),
    (tree, "llama", 0.8, True),
    (test_a_draft_that_knows_the_noise_and_the_target_guesses_every_bonus_token,
     dict(temperature=1)))))


@pytest.mark.parametrize("change", HARMLESS)
def test_what_is_lossless_and_yet_wrong_is_caught_elsewhere(monkeypatch, change):
    claim, *arguments = CAUGHT_BY[change]
    replace_line(monkeypatch, *HARMLESS[change])
    with pytest.raises(AssertionError):
        claim(*arguments)


def detection_table() -> None:
    print(f"p-value of the first three tokens of 20,000 texts, {CONTROL}; caught below {ALPHA:g}")
    for noise in (False, True):
        p_value = joint_p_value(simulate(20_000, public_noise=noise, **CONTROL), **CONTROL)
        print(f"{p_value:9.1e}  the program as it is, public noise {'on' if noise else 'off'}")
    for title, changes in (("mistakes", MISTAKES), ("wrong, and yet lossless", HARMLESS)):
        print(f"\n{title}")
        for name, change in changes.items():
            print(f"{p_value_with(name, change):9.1e}  {name}", flush=True)


# ---- 7. ranks: bit for bit the text of one process ----

@lru_cache
def forks():
    """Processes that begin with all imports done."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    return context


@pytest.fixture(scope="session", autouse=True)
def import_beforehand():
    """On the core that the first tests leave idle."""
    forks()


def one_rank(given: tuple) -> tuple:
    rank, environment, job, arguments = given
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        return rank, job(*arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def in_ranks(count: int, job, *arguments, seconds: float = 200) -> list:
    """What `job(*arguments)` returns (no tensors) in each of `count` processes with the environment
    of torchrun's ranks. `job` is a function of a module; each rank must import it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with forks().Pool(count, maxtasksperchild=1) as pool:  # who is left at the end is killed
        answers = pool.imap_unordered(
            one_rank, [(rank, environment, job, arguments) for rank in range(count)])
        results = dict(answers.next(seconds) for _ in range(count))  # the first failure at once
    return [results[rank] for rank in range(count)]


def decode_here(jobs: list[Settings], target, draft, batches: list) -> list:
    """One rank's part in every job: the rounds of all batches that it saw, and the hit rate."""
    placement = Placement(jobs[0], "ssd")
    placement.join()
    torch.set_num_threads(1)
    context, vocab_size = target.config.max_position_embeddings, target.config.vocab_size
    held = Models(CausalLM(target) if placement.holds_target else None,
                  CausalLM(draft, vocab_size) if placement.holds_draft else None,
                  context, vocab_size)
    found = []
    for s in jobs:
        made = Decoder(s, held, placement)
        rounds = [texts_and_rounds(made, prompts) for prompts in batches]
        found.append((rounds, made.stats.summary()["hit_rate"]))
    return found


@pytest.mark.parametrize("count, jobs", (
    (2, [dict(temperature=0), dict(temperature=1, downweight=0.7, public_noise=True)]),
    pytest.param(2, [
        dict(temperature=1, downweight=0.7, budget=0),
        dict(temperature=1, backup="lookup"),
        dict(temperature=0.8, top_p=0.9, backup="random", fan_out="3,2,1,1")], marks=slow),
    pytest.param(3, [dict(temperature=1, downweight=0.7, budget=3)], marks=slow)))
def test_ranks_write_bit_for_bit_the_text_of_one_process_with_the_same_hits(count, jobs):
    """With three ranks two hold the whole target each, here: they compute the same."""
    net, batches = random_model(), [RAGGED, RAGGED[:1]]
    draft = imitation(net, 0.15)
    given = [settings(max_new_tokens=40, **choices) for choices in jobs]
    apart = in_ranks(count, decode_here, given, net, draft, batches)[0]
    for s, found, choices in zip(given, apart, jobs, strict=True):
        here = decoder(net, draft, max_new_tokens=40, **choices)
        rounds = [texts_and_rounds(here, prompts) for prompts in batches]
        hit_rate = here.stats.summary()["hit_rate"]
        assert found == (rounds, hit_rate) and (0 < hit_rate < 1) == (s.budget > 0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_the_channel_carries_every_bit(dtype):
    """Above all of q, which must be what the tokens were drawn from, not what it is rounded to."""
    found = in_ranks(2, through_the_channel, dtype)
    assert found[0] == found[1]
    assert found[0][2][0][0] == 2 ** 40 + 1 and found[0][3][0][0] == Q.to(dtype)[0, 0].tolist()


Q = draw_uniforms(4, 3, 11)


def through_the_channel(dtype: torch.dtype) -> list:
    """A rank's job: an outcome from rank 0, a speculation from rank 1; as this rank has them."""
    placement = Placement(settings(), "ssd")
    placement.join()
    channel = Channel(placement, 3, 11, dtype)
    tokens = torch.arange(12).view(4, 3) + 2 ** 40 + 1  # larger than any vocabulary
    speculation = Speculation(tokens, Q.to(dtype), torch.tensor([PRIMARY, BACKUP] * 2))
    outcome = Outcome(torch.tensor([2, FINISHED, 0, 3]), torch.tensor([1, 5, 10, 0]))
    if placement.rank == 0:
        channel.send_outcome(outcome)
        speculation = channel.receive_speculation(4)
    else:
        outcome = channel.receive_outcome(4)
        channel.send_speculation(speculation)
    assert speculation.q.dtype == dtype
    return [part.tolist() for part in (*outcome, *speculation)]


if __name__ == "__main__":
    detection_table()
