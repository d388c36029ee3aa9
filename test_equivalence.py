"""The proofs. Speculation is *lossless*: whatever the draft proposes, the text is distributed
exactly as if the target had written it alone. This file shows it, from the formulas up to two
processes, in the order of the paper:

    1  sampling          the algebra of accept and residual; Saguaro sampling (4.2); random numbers
    2  the cache         Def. 4, Thm. 12; what it is worth (Thms. 7, 17, Cors. 8, 9, 16); backups
    3  KV slots, trees   what every branch sees; how rows end
    4  greedy decoding   token for token what `generate` writes
    5  sampled text      frequencies against the target's exact probabilities
    6  classic mistakes  each is planted, and each must be caught by the test of chapter 5
    7  ranks             bit for bit the text of one process
    8  the audit         is a text of any engine, any model and any length distributed as it should?

How does one test a *distribution*? With a vocabulary of 6 there are only 6^3 = 216 texts of three
tokens, and the target's probability of each is a product of three softmaxes. We let SSD write
120,000 texts and count (in one setting; 30,000 in three others). If the program is right, the count
O of a text differs from the expected E by chance alone, by about sqrt(E), and Pearson's

    chi-square = sum over texts of (O - E)^2 / E

comes out near its number of degrees of freedom (texts - 1). The p-value is the probability that
chance alone makes it as large. (Texts with E < 5 are pooled: `goodness_of_fit`.)

False alarms. The suite computes fewer than 600 p-values and calls one significant below ALPHA =
1e-6: a correct program fails with probability below 600 * 1e-6 = 6e-4 (Bonferroni). Seeds are
fixed: what has passed once goes on passing.

Power. If the texts had a distribution at total-variation distance d from the target's, chi-square
would grow by at least 4 N d^2 (Cauchy-Schwarz). For N = 120,000 and d = 0.02 that is 192, and is
found each time of a thousand (`test_the_statistic_accepts_the_truth_and_sees_two_percent`).

Random models stand in for language models: small, in float64 (so that no tie is decided by
rounding), with large weights (so that their distributions are far from uniform). A draft is its
target plus noise. SSD runs in one process (`saguaro.TakingTurns`), unless a test says otherwise.

    python -m pytest                     all of it
    python -m pytest -m "not slow"       an edit loop
    python test_equivalence.py           the table of chapter 6
    python test_equivalence.py FILE      the audit of FILE (--help)
"""
import argparse
import copy
import inspect
import itertools
import json
import math
import os
import random
import sys
import textwrap
from functools import lru_cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Iterator, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from tqdm import tqdm
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig,
                          LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper,
                          TopPLogitsWarper)
from transformers.utils import logging

import cache
import draft_worker
import sampling
from cache import BACKUP, PRIMARY, Outcome, Speculation, SpeculationCache
from draft_worker import DraftWorker
from runtime.job import Models
from runtime.model import CausalLM
from runtime.noise import PublicNoise, UniformStream, exponential_noise
from runtime.placement import Placement
from runtime.settings import TINY, Settings, UserError, first_line
from runtime.stats import (counted_acceptance_rate, counted_hit_rate, counted_miss_rates,
                           fit_power_law)
from saguaro import Decoder, plan
from sampling import Sampler
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


def imitation(target, noise: float):
    """A draft: the target with noise on its weights, in units of each tensor's standard
    deviation."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.std() > 0:
                normal = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight += noise * weight.std() * normal
    return draft


def settings(mode: str = "ssd", **choices) -> Settings:
    """Those of the command line, with our defaults."""
    ours = dict(lookahead=3, budget=7, acceptance_rate=0.7, dtype="float64", device="cpu")
    return Settings(mode=mode, **ours | choices)


def decoder(target, draft=None, mode: str = "ssd", **choices) -> Decoder:
    """One way of decoding, in this process."""
    target = CausalLM(target)
    draft = CausalLM(draft, target.vocab_size) if mode != "ar" else None
    models = Models(target, draft, target.context, target.vocab_size)
    return Decoder(settings(mode, **choices), models)


def texts_and_rounds(made: Decoder, prompts: list[list[int]]) -> tuple[list[list[int]], list]:
    """The new tokens of every prompt, and (row, new tokens, source) of every row and round."""
    rounds = []
    texts = made(prompts, lambda *new: rounds.append(new))
    return texts, rounds


def run_rounds(made: Decoder, prompts: list[list[int]], rounds: int) -> list:
    """Algorithm 1: the (speculation, outcome) of all rounds, round 0 first. No row finishes."""
    lookahead = made.lookahead
    max_length = max(map(len, prompts)) + 1 + (rounds + 2) * (lookahead + 1)
    made.speculator.start(prompts, max_length)
    speculation = Speculation.empty(len(prompts))
    outcome = made.target.prefill(prompts, max_length, lookahead)
    record = [(speculation, outcome)]
    for _ in range(rounds):
        made.target.advance(outcome)
        speculation = made.speculator.speculate(speculation, outcome)
        speculation, outcome = made.target.verify(speculation)
        record.append((speculation, outcome))
    return record


def written(record: list) -> torch.Tensor:
    """The new tokens `[B, W]` of every row; behind its last they mean nothing."""
    width = sum(speculation.tokens.shape[1] + 1 for speculation, _ in record)
    texts = torch.zeros(len(record[0][1].bonus), width, dtype=torch.long)
    length = torch.zeros(len(texts), dtype=torch.long)
    for speculation, (k, bonus) in record:
        new = torch.cat([speculation.tokens, bonus[:, None]], 1)
        new.scatter_(1, k[:, None], bonus[:, None])
        texts.scatter_(1, length[:, None] + torch.arange(new.shape[1]), new)
        length += k + 1
    return texts


def greedy_reference(net, prompts: list[list[int]], max_new_tokens: int, eos=()) -> list[list[int]]:
    """What transformers' own `generate` writes after each prompt."""
    texts = []
    for prompt in prompts:
        text = net.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=max_new_tokens,
                            attention_mask=torch.ones(1, len(prompt)).long(), pad_token_id=0,
                            eos_token_id=list(eos) or None)
        texts.append(text[0, len(prompt):].tolist())
    return texts


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
    """p-value of Pearson's chi-square test for counts `[bins]`. The smallest bins are pooled, until
    no expected count is below 5; an impossible observation has p-value 0."""
    if observed[probability == 0].any():
        return 0.0
    expected, order = (observed.sum() * probability).sort()
    rare = int(((expected < 5) | (expected.cumsum(0) - expected < 5)).sum())
    bins = torch.stack([expected, observed[order]])
    expected, observed = torch.cat([bins[:, :rare].sum(1, keepdim=True), bins[:, rare:]], 1)
    freedom = torch.tensor(len(expected) - 1)
    chi_square = ((observed - expected).square() / expected).sum()
    return float(torch.special.gammaincc(freedom / 2, chi_square / 2))


# ---- 1. sampling: the algebra of losslessness, Saguaro sampling (4.2), random numbers ----

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


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_in_a_large_vocabulary_every_token_is_drawn_with_its_probability_to_1e_9(dtype):
    """A token is drawn by an interval as long as its probability. 5e-10 before the end of such an
    interval no later token may be drawn, and 5e-10 behind it none that is not later; nowhere, not
    even by the least and the greatest number, one of probability 0. Of 151,936 tokens we try 120;
    numbers or sums in float32 miss by 1e-8 and more."""
    V, near = 151_936, 5e-10
    p = random_distributions(V).to(dtype)  # from here on not normalised
    p[::3] = 0
    p[-9:] = 0
    tokens = 1 + (draw_uniforms(120) * (V - 1000)).long()
    ends = (p.double().cumsum(0) / p.double().sum())[tokens]
    extremes = torch.tensor([0, 1 - 2.0 ** -53], dtype=torch.float64)
    uniforms = torch.cat([ends - near, ends + near, extremes])
    drawn = torch.cat([sampling.inverse_cdf(p.expand(len(part), -1), part)
                       for part in uniforms.split(40)])
    before, behind, _ = drawn.split([120, 120, 2])
    assert (before <= tokens).all()
    assert (behind > tokens).all()
    assert (p[drawn] > 0).all()


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
    p = random_distributions(2000, 9)
    q = random_distributions(2000, 9, seed=1)
    in_cache = []
    acceptance = []
    for downweight in torch.linspace(1, 0, 21).tolist():
        bonus = sampling.residual(p, sampling.saguaro_distribution(q, fan_out, downweight))
        in_cache.append(bonus.gather(-1, q.topk(fan_out).indices).sum(-1))
        sigma = sampling.saguaro_distribution(p, fan_out, downweight)
        acceptance.append(torch.minimum(p, sigma).sum(-1))
    assert (torch.stack(in_cache).diff(dim=0) >= -1e-12).all()
    assert (torch.stack(acceptance).diff(dim=0) <= 1e-12).all()
    assert (in_cache[-1] - in_cache[0]).mean() > 0.1
    assert (acceptance[0] - acceptance[-1]).mean() > 0.1


@pytest.mark.parametrize("warping", ({}, dict(temperature=0.7, top_k=8, top_p=0.9)), ids=str)
def test_a_draft_that_knows_the_noise_and_the_target_guesses_every_bonus_token(warping):
    """A draft that is the target: all it drafts is accepted, and one guess at "all accepted" is
    right, in every batch. Without public noise it is wrong at times."""
    net = random_model()
    draft = copy.deepcopy(net)
    draft.resize_token_embeddings(48, mean_resizing=False)  # a padded vocabulary
    hit_rates = []
    for noise in (True, False):
        choices = dict(temperature=1, fan_out="0,0,0,1", public_noise=noise, max_new_tokens=20)
        made = decoder(net, draft, **choices | warping)
        made(RAGGED)
        made(RAGGED)
        assert made.stats.rejected == 0
        hit_rates.append(made.stats.summary()["hit_rate"])
    assert hit_rates[0] == 1
    assert 0 < hit_rates[1] < 1


def test_a_run_of_one_seed_shares_no_random_number_with_the_next(monkeypatch):
    """Nor do target, branches and backups with each other, nor one round with another."""
    drawn = []
    draw = UniformStream.draw

    def record(stream: UniformStream, *shape: int) -> torch.Tensor:
        drawn.append(draw(stream, *shape))
        return drawn[-1]

    monkeypatch.setattr(UniformStream, "draw", record)
    net = random_model()
    for seed in range(4):
        made = decoder(net, imitation(net, 0.3), temperature=0.8, seed=seed, max_new_tokens=30)
        made(RAGGED)
        assert 0 < made.stats.summary()["hit_rate"] < 1
    assert {numbers.dtype for numbers in drawn} == {torch.float64}
    together = torch.cat([numbers.flatten() for numbers in drawn])
    assert len(together.unique()) == len(together) > 4000


# ---- 2. the speculation cache (Def. 4, section 4.1) and its worth ----

def test_fan_out_is_the_closed_form_of_theorem_12_rounded():
    """By whatever rounding, where no F_k is to be 0."""
    for budget, K, a, r in itertools.product((35, 200, 1115, 1235), (0, 1, 2, 3, 7),
                                             (9 / 25, 0.5, 16 / 25, 0.8), (0.3, 1.0, 2.0)):
        exact = a ** (torch.arange(K + 1).double() / (1 + r))
        exact[K] *= (1 - a) ** (-1 / (1 + r))
        exact *= budget / exact.sum()
        shape = torch.tensor(cache.fan_out_shape("geometric", budget, K, a, r))
        assert exact.min() < 1 or (shape - exact).abs().max() < 1.5, (budget, K, a, r)


def test_fan_out_is_the_best_of_all_shapes_of_the_budget():
    """Of integers: here the power law must also say something of F = 0, which counts as 2. And the
    uniform one is as even as these can be."""
    for budget, K, a, r in itertools.product((0, 1, 3, 6, 9), range(4), (0, 0.2, 0.6, 0.9, 1),
                                             (1e-6, 0.5, 1.0, 2.0, 30.0)):
        likelihood = cache.acceptance_distribution(a, K)

        def misses(shape) -> float:
            return sum(P * (F ** -r if F else 2.0) for P, F in zip(likelihood, shape))

        shapes = itertools.product(range(budget + 1), repeat=K + 1)
        shapes = [list(shape) for shape in shapes if sum(shape) == budget]
        ours = cache.geometric_fan_out(budget, K, a, r)
        assert ours in shapes
        assert misses(ours) <= min(map(misses, shapes)) + 1e-12, (budget, K, a, r)
        uniform = cache.uniform_fan_out(budget, K, a, r)
        assert uniform in shapes and max(uniform) - min(uniform) <= 1


def test_look_up_hits_if_and_only_if_the_outcome_was_guessed():
    """And takes what was prepared for it."""
    rows, branches, K, vocab = 400, 6, 3, 7
    guessed = draw_uniforms(rows, (K + 1) * vocab).argsort()[:, :branches]  # k * vocab + t*
    tokens = (draw_uniforms(rows, branches, K) * vocab).long()
    q = draw_uniforms(rows, branches, K, vocab, seed=1)
    prepared = SpeculationCache(Outcome(guessed // vocab, guessed % vocab), tokens, q)
    actual = (draw_uniforms(rows, seed=2) * (K + 1) * vocab).long()
    outcome = Outcome(actual // vocab, actual % vocab)
    match = guessed == actual[:, None]
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
    after_hit = accept(hit.numel(), 4, 0.9, seed=1).view(hit.shape)
    after_miss = accept(hit.numel(), 4, 0.5, seed=1).view(hit.shape)
    tokens = 1 + after_hit.where(hit, after_miss)
    seconds = torch.where(hit.all(1), max(1, T_p), 1.5)
    simulated = float(tokens.sum() / rows / seconds.sum())
    E_hit = cache.expected_tokens(0.9, 4)
    E_miss = cache.expected_tokens(0.5, 4)
    assert cache.throughput(0.8, E_hit, E_miss, T_p, 0.5, rows) == pytest.approx(simulated, 0.01)


def test_ssd_that_falls_back_to_its_primary_is_as_fast_over_sd_as_corollaries_8_and_9_say():
    """A backup that drafts as the primary does (E_miss = E_hit), or better by what it costs."""
    for hit_rate, *numbers, better in draw_uniforms(2000, 6).tolist():
        T_sd = 2 * numbers[0]
        tokens_hit = 1 + 4 * numbers[1]
        tokens_sd = 1 + 4 * numbers[2]
        sd = cache.throughput(0, tokens_sd, tokens_sd, 1, T_sd)
        for T_b in (T_sd, 2 * numbers[3]):
            tokens_miss = tokens_hit * (1 + T_b * better)
            slow = cache.throughput(hit_rate, tokens_hit, tokens_hit, 0.9, T_b) / sd
            fast = cache.throughput(hit_rate, tokens_hit, tokens_miss, 0.9, T_b) / sd
            least, most = cache.speedup_over_sd_bounds(hit_rate, tokens_hit, tokens_sd, T_sd, T_b)
            assert least == pytest.approx(slow) and slow <= fast <= most + 1e-9, "Corollary 9"
            if T_b == T_sd:
                assert slow >= tokens_hit / tokens_sd - 1e-9, "Corollary 8: never slower"


def test_the_critical_batch_size_is_right_for_all_arguments():
    """Theorem 17: it is where the two backups change places in Corollary 16."""
    bounds = []
    for numbers in draw_uniforms(2000, 6).tolist():
        p = round(numbers[0], 1)
        neural = 1 + 3 * numbers[1]
        fast = 1 + (neural - 1) * numbers[2]  # worse
        T_p = 2 * numbers[3]
        T_neural = 2 * numbers[4]
        T_fast = T_neural * numbers[5]  # and faster
        bounds.append(cache.critical_batch_size(p, 4.0, neural, fast, T_p, T_neural, T_fast))
        for batch_size in (1, 2, 8, 64):
            gain = (cache.throughput(p, 4.0, neural, T_p, T_neural, batch_size)
                    - cache.throughput(p, 4.0, fast, T_p, T_fast, batch_size))
            assert (gain > 0) == (batch_size < bounds[-1]) or abs(gain) < 1e-12
    assert {0.0, float("inf")} < set(bounds) and sum(1 < b < 64 for b in bounds) > 20


@pytest.mark.parametrize("a, pace, chosen", (
    (0.9, (0, 0), {"neural", "random"}), (0.05, (0, 0), {"random"}),
    (0.15, (100, 30), {"random"}), (0.15, (1000, 1), {"neural"})))
def test_backup_auto_is_the_better_one_at_every_batch_size(a, pace, chosen):
    """By Corollary 16 from the given a and r, and from T_p and T_b by the pace, else T_p = 1 and
    T_b = K / (K + 1)."""
    shape = cache.geometric_fan_out(20, 4, a, 0.3)
    hit_rate = cache.power_law_hit_rate(shape, a, 0.3)
    E, E_random = cache.expected_tokens(a, 4), cache.expected_tokens(0.1, 4)
    draft_pass = pace[1] / pace[0] if any(pace) else 1 / 5
    T_p = max(1.0, 5 * draft_pass)
    backups = []
    for rows in (1, 2, 4, 8, 16, 32, 64):
        made = plan(settings(lookahead=4, budget=20, backup="auto", acceptance_rate=a,
                             miss_exponent=0.3, batch_size=rows, pace=pace))
        backups.append(made.backup)
        speed = {"neural": cache.throughput(hit_rate, E, E, T_p, 4 * draft_pass, rows),
                 "random": cache.throughput(hit_rate, E, E_random, T_p, 0.0, rows)}
        assert speed[made.backup] == max(speed.values()), rows
    assert set(backups) == chosen


@pytest.mark.parametrize("a, r", ((0.9, 0.6), (0.2, 1.5)))
def test_the_counts_of_guesses_tell_a_r_and_the_hits_of_every_shape(a, r):
    """400,000 outcomes: k of 5 tokens accepted, F guesses miss with probability F^-r / 2."""
    shape, rows, depth = [6, 4, 0, 3, 1, 2], 400_000, 16
    accepted = accept(rows, 5, a)
    number = ((2 * draw_uniforms(rows, seed=1)) ** (-1 / r)).clamp(max=1e6).long()
    hits = float((number < torch.tensor(shape)[accepted]).double().mean())
    cells = accepted * (depth + 1) + number.clamp(max=depth)
    table = torch.bincount(cells, minlength=6 * (depth + 1)).view(6, depth + 1)
    assert counted_hit_rate(table, shape) == pytest.approx(hits)
    assert cache.power_law_hit_rate(shape, a, r) == pytest.approx(hits, abs=0.005)
    assert counted_acceptance_rate(table) == pytest.approx(a, abs=0.005)
    miss_rates = counted_miss_rates(table)
    assert fit_power_law(miss_rates) == pytest.approx(r, abs=0.05)
    assert fit_power_law([0.0] * 8) == 1.0, "nothing missed, nothing to fit"


def test_the_draft_counts_which_guess_every_bonus_token_was():
    """By who drafted and by k; and the table says how often the cache hit."""
    net = random_model()
    made = decoder(net, imitation(net, 0.2), temperature=0.8, fan_out="3,2,1,2", backup="random",
                   backup_acceptance_rate=0.5)
    record = run_rounds(made, RAGGED, 15)
    tables = made.speculator.draft.guess_counts.table
    for source, table in zip((PRIMARY, BACKUP), tables):
        k = torch.cat([outcome.num_accepted[speculation.source == source]
                       for speculation, outcome in record[1:-1]])
        assert table.sum(1).equal(torch.bincount(k, minlength=4))
    sources = torch.cat([speculation.source for speculation, _ in record[2:]])
    hits = float((sources == PRIMARY).double().mean())
    assert counted_hit_rate(sum(tables), [3, 2, 1, 2]) == pytest.approx(hits)
    assert 0.2 < hits < 0.98


@pytest.mark.parametrize("text, proposed", (
    ([1, 2, 3], [1, 2, 3, 1]),                   # no match: the text's beginning
    ([7], [7, 7, 7, 7]),
    ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9]),    # the more recent of two
    ([5, 1, 2, 8, 1, 2, 9, 5, 1, 2], [8, 1, 2, 9]),  # the longer one
    ([4, 4, 4], [4, 4, 4, 4]),
    ([*range(20), 30, *range(2, 20), 31, *range(20)], [31, 0, 1, 2])))  # both beyond MAX_MATCH
def test_prompt_lookup_continues_the_longest_and_then_most_recent_match(text, proposed):
    assert draft_worker.prompt_lookup(text, 4) == proposed


# ---- 3. KV slots, tree attention, and how rows end ----

def assert_kv_is_fresh(model: CausalLM, row: int, text: list[int]) -> None:
    """The slots of the row hold what a plain pass over the text computes."""
    with torch.inference_mode():
        fresh = model.model(torch.tensor([text])).past_key_values.layers
    for number, plain in enumerate(fresh):
        keys, values = model.kv.layers[number]
        assert_close(keys[row, :, :len(text)], plain.keys[0], 1e-9)
        assert_close(values[row, :, :len(text)], plain.values[0], 1e-9)


@pytest.mark.parametrize("mode, backup, temperature", (
    ("ssd", "neural", 0), ("ssd", "neural", 0.7), ("ssd", "lookup", 0.7),
    pytest.param("sd", "neural", 0.7, marks=slow), pytest.param("ssd", "random", 0, marks=slow)))
def test_after_many_rounds_of_hits_and_misses_all_KV_is_fresh(mode, backup, temperature):
    """Of all that was verified before a row's last round. From then on it stands still, and the
    others go on."""
    net = random_model(num_hidden_layers=2, max_position_embeddings=128)
    made = decoder(net, imitation(net, 0.15), mode, temperature=temperature, backup=backup,
                   max_new_tokens=50)
    texts, rounds = texts_and_rounds(made, RAGGED)
    target = made.target
    draft = made.speculator.draft if mode == "ssd" else made.speculator
    last = {row: new for row, new, _ in rounds}
    assert len(rounds) > 20 * len(RAGGED)
    assert mode == "sd" or {source for *_, source in rounds} == {PRIMARY, BACKUP}
    for row, (prompt, text) in enumerate(zip(RAGGED, texts)):
        verified = (prompt + text)[:-len(last[row])]
        assert target.length[row] == draft.length[row] == len(verified)
        assert_kv_is_fresh(target.model, row, verified[:-1])  # the last token is yet to be read
        assert_kv_is_fresh(draft.model, row, verified[:-1])  # or was rewritten, standing still


@pytest.mark.parametrize("temperature, public_noise, family", (
    (0, False, "llama"), (0.8, True, "llama"), (0.8, False, "gpt2"), (0.8, False, "gpt_neox")))
def test_the_tree_grows_from_the_likeliest_outcomes_as_if_each_were_the_text(
        temperature, public_noise, family):
    """By plain passes. The outcomes: for each k, after the text and s_1..s_k, the likeliest tokens
    but for s_{k+1}; with public noise, after division by that of the bonus token's position. Each
    branch: q of every step is what follows the text, s_1..s_k, t* and the branch's own tokens; and
    a backup's, what follows the text and its own; both by Saguaro sampling."""
    shape = [3, 2, 1, 2]
    net = random_model(family, num_hidden_layers=2)
    made = decoder(net, imitation(net, 0.2), temperature=temperature, fan_out="3,2,1,2",
                   public_noise=public_noise, downweight=0.5)
    draft = made.speculator.draft
    record = run_rounds(made, RAGGED, 4)
    speculation = made.speculator.speculate(*record[-1])
    prepared = draft.pre_speculate(speculation)

    def plainly(text: list[int], last: int) -> torch.Tensor:
        with torch.no_grad():
            logits = draft.model.model(torch.tensor([text])).logits[0, -last:]
        return Sampler(temperature or 1).probabilities(logits)

    def assert_follows(text: list[int], tokens: torch.Tensor, q: torch.Tensor) -> None:
        follows = plainly(text + tokens.tolist(), 4)[:3]
        if temperature == 0:
            assert tokens.equal(follows.argmax(-1))
            return
        for step in range(3):
            sigma = sampling.saguaro_distribution(follows[step], shape[step], 0.5)
            assert_close(q[step], sigma, 1e-9)

    for row, drafted in enumerate(speculation.tokens):
        text = draft.text[row, :draft.length[row]].tolist()
        scores = plainly(text + drafted.tolist(), 4)
        if public_noise:
            keys = draft.noise.keys(draft.length, 3)[row]
            scores = scores / exponential_noise(keys, 40)
        scores[range(3), drafted] = -1
        likeliest = set()
        for k, F in enumerate(shape):
            likeliest |= {(k, token) for token in scores[k].topk(F).indices.tolist()}
        guesses = torch.stack(prepared.guesses, 2)[row].tolist()
        assert {(k, bonus) for k, bonus in guesses} == likeliest
        for branch, (k, bonus) in enumerate(guesses):
            assert_follows([*text, *drafted[:k].tolist(), bonus], prepared.tokens[row, branch],
                           prepared.q[row, branch])
        assert_follows(text, drafted, speculation.q[row])


# ---- 4. greedy decoding: token for token what `generate` writes ----

@pytest.mark.parametrize("family, changes", (
    ("llama", {}), ("qwen2", dict(num_key_value_heads=1)),
    ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
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


def test_a_row_of_a_batch_decodes_in_the_very_rounds_in_which_it_decodes_alone():
    """No neighbour, finished or not, changes what is proposed to it. Rows 0 and 2 end early, with
    tokens that no other text has."""
    net = random_model()
    draft = imitation(net, 0.15)
    texts = greedy_reference(net, RAGGED, 30)
    eos = [next(token for token in texts[row] if sum(token in text for text in texts) == 1)
           for row in (0, 2)]

    def rounds_of(prompts: list[list[int]]) -> list[list]:
        made = decoder(net, draft, max_new_tokens=30)
        made.eos = eos
        _, rounds = texts_and_rounds(made, prompts)
        return [[(new, source) for number, new, source in rounds if number == row]
                for row in range(len(prompts))]

    together = rounds_of(RAGGED)
    assert together == [rounds_of([prompt])[0] for prompt in RAGGED]
    rounds = list(map(len, together))
    assert max(rounds[0], rounds[2]) < min(rounds[1], rounds[3])
    assert {source for row in together for _, source in row[1:]} == {PRIMARY, BACKUP}


# ---- 5. sampled text: frequencies against the target's exact probabilities ----

VOCAB, K, PROMPT, SAMPLES = 6, 2, [1, 2], 120_000


@lru_cache
def exact_pair():
    target = random_model(
        seed=2, vocab_size=VOCAB, hidden_size=8, num_attention_heads=1, num_key_value_heads=1,
        intermediate_size=8, max_position_embeddings=32, initializer_range=0.7)
    return target, imitation(target, 0.3)


def code(texts: torch.Tensor) -> torch.Tensor:
    """Texts `[N, n]` as numbers `[N]`: their digits, in the order of `itertools.product`."""
    return (texts * VOCAB ** torch.arange(texts.shape[1]).flip(0)).sum(1)


def following(n: int, temperature=1.0, top_k=0, top_p=1.0, **_) -> torch.Tensor:
    """The target's next-token distributions `[VOCAB^n, VOCAB]` after the prompt and every text of n
    tokens, by plain passes."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=n))).long().view(VOCAB ** n, n)
    texts = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)
    with torch.inference_mode():
        logits = exact_pair()[0](texts, use_cache=False).logits[:, -1]
    return Sampler(temperature, top_k, top_p).probabilities(logits)


@lru_cache(maxsize=None)
def exact_joint(**choices) -> torch.Tensor:
    """The target's probability of every text of three tokens, `[VOCAB^3]`."""
    probability = torch.ones(1, dtype=torch.float64)
    for length in range(3):
        probability = (probability[:, None] * following(length, **choices)).flatten()
    return probability


def simulate(samples: int = SAMPLES, **choices) -> list[torch.Tensor]:
    """Two rounds of SSD after round 0, in many rows with the same prompt: the texts, k of both
    rounds `[samples, 2]`, and who drafted for the second `[samples]`. Every chunk begins anew, with
    a seed of its own."""
    rows = min(samples, 10_000)
    chunks = []
    for number in range(samples // rows):
        made = decoder(*exact_pair(), lookahead=K, budget=4, seed=10 * number, **choices)
        record = run_rounds(made, [PROMPT] * rows, 2)
        (_, first), (speculation, second) = record[1:]
        num_accepted = torch.stack([first.num_accepted, second.num_accepted], 1)
        chunks.append((written(record), num_accepted, speculation.source))
    return [torch.cat(parts) for parts in zip(*chunks)]


def joint_p_value(texts: torch.Tensor, **choices) -> float:
    """The central statistic: the first three tokens against the target's exact joint
    distribution."""
    observed = torch.bincount(code(texts[:, :3]), minlength=VOCAB ** 3)
    return goodness_of_fit(observed, exact_joint(**choices))


SETTINGS = [  # the first also in the edit loop
    dict(temperature=1.4, top_k=4, downweight=0.5, public_noise=True, samples=30_000),
    pytest.param(dict(temperature=0.7, downweight=0.0, backup="lookup", samples=30_000),
                 marks=slow),
    pytest.param(dict(temperature=1.0, downweight=0.5), marks=slow),
    pytest.param(dict(temperature=1.0, top_p=0.9, backup="random", fan_out="2,1,1",
                      samples=30_000), marks=slow)]


def test_the_statistic_accepts_the_truth_and_sees_two_percent():
    """In a thousand samples each of the truth, and of distributions that have moved at random.
    (Independent Poisson numbers, given their sum, are a multinomial sample.)"""
    truth = exact_joint()
    torch.manual_seed(0)
    for _ in range(1000):
        assert goodness_of_fit(torch.poisson(truth * SAMPLES).long(), truth) > ALPHA
        change = truth * torch.randn(len(truth))
        change -= truth * change.sum()
        moved = truth + 0.04 * change / change.abs().sum()
        assert 0.5 * (moved - truth).abs().sum() == pytest.approx(0.02)
        assert goodness_of_fit(torch.poisson(moved * SAMPLES).long(), truth) < ALPHA


@pytest.mark.parametrize("choices", SETTINGS, ids=str)
def test_the_first_three_tokens_have_exactly_the_targets_joint_distribution(choices):
    """And the first token of round 2 has the target's, given everything before it, k of round 1 and
    a hit or miss included."""
    texts, num_accepted, source = simulate(**choices)
    rate = num_accepted.sum() / (num_accepted.sum() + (num_accepted < K).sum())
    assert 0.3 < rate < 0.8, f"draft and target must differ, and agree at times: {rate}"
    assert joint_p_value(texts, **choices) > ALPHA
    for k in range(K + 1):
        p = following(k + 2, **choices)
        for drafted_by in (PRIMARY, BACKUP):
            chosen = texts[(num_accepted[:, 0] == k) & (source == drafted_by)]
            assert len(chosen) > 100
            logits = p[code(chosen[:, :k + 2])].log()
            warpers = warpers_of(1.0, top_k=0, top_p=1.0)
            told = replay(logits, chosen[:, k + 2], warpers, draw_uniforms(len(chosen)))
            assert told.possible.all() and evenness(told.uniform, bins=8) > ALPHA, (k, drafted_by)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=slow if n > 3 else ()) for n in range(24)])
def test_in_random_settings_all_texts_are_the_targets(seed):
    """Every setting at once; greedy, if the seed is even, and equal to `generate`. The vocabulary
    has 40 tokens, the draft's embedding and head have 33 or 48 rows; or the draft is unrelated, and
    its context short. Texts end with a token, at their length, or at the end of the context."""
    choose = random.Random(seed)
    greedy = seed % 2 == 0
    K = choose.randint(1, 6)
    rows = choose.randint(5, 8)
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
    for row, (prompt, text) in enumerate(zip(prompts, texts)):
        max_new = min(choices["max_new_tokens"], 128 - len(prompt))
        assert text == [token for number, new, _ in rounds if number == row for token in new]
        assert not set(text[:-1]) & set(made.eos), "nothing follows an ending"
        assert len(text) == max_new or len(text) < max_new and text[-1] in made.eos
        assert not greedy or [text] == greedy_reference(net, [prompt], max_new, made.eos)
    if not greedy:
        audited = [Text(prompt, text, [""] * len(text)) for prompt, text in zip(prompts, texts)]
        warpers = warpers_of(*(choices[name] for name in ("temperature", "top_k", "top_p")))
        assert smallest(audit_groups(net, audited, warpers, rows)) > ALPHA
    stats = made.stats
    decoded = rounds[rows:]  # without round 0
    after_hits = [len(new) for _, new, source in decoded if source == PRIMARY]
    assert stats.tokens == sum(map(len, texts)) and stats.prefill_tokens == rows
    assert stats.row_rounds == len(decoded)
    assert stats.hits == len(after_hits) and stats.hit_tokens == sum(after_hits)
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
        (draft_worker, "lookup_backup", "point_mass(tokens, like=draft.q_like)",
         "point_mass(tokens, like=draft.q_like) * 0 + 1 / len(draft.q_like)"),
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
    "a miss answered with what was prepared for another row":
        (DraftWorker, "speculate", "BACKUPS[self.plan.backup](self)",
         "cache.tokens[:1, 0], cache.q[:1, 0]"),
    "a speculation that was verified already served again":
        (DraftWorker, "speculate", "return Speculation(",
         "tokens, q = self.served = getattr(self, 'served', (tokens, q)); return Speculation("),
    "all tokens of a branch drawn with the same uniform number":
        (DraftWorker, "pre_speculate", "uniforms[step]", "uniforms[0]"),
    "the target's uniform numbers the same in every round":
        (TargetWorker, "verify", "self.uniforms.draw(", "UniformStream(7, 0).draw("),
    "drafts drawn with the public noise of the bonus token at their position":
        (DraftWorker, "pre_speculate", "branch_tokens.append(tokens)", """keys = torch.cat([
                self.noise.keys(at, 0) for at in (tree.positions + step + 1).unbind(1)], 1)
            tokens = (q / exponential_noise(keys, q.shape[-1])).argmax(-1)
            branch_tokens.append(tokens)"""),
    "public noise the same at all positions":
        (PublicNoise, "keys", "^ position)", "^ 0 * position)"),
    "public noise the same in all rows":
        (PublicNoise, "keys", "^ self.rows)", "^ 0 * self.rows)"),
}
# Wrong, and yet lossless: whatever is proposed for whatever reason, it is verified against the q it
# was drawn from. Other tests catch these: a test, and its arguments.
TREE = (test_the_tree_grows_from_the_likeliest_outcomes_as_if_each_were_the_text,
        0.8, True, "llama")
HARMLESS = {
    "a hit served with the tokens and the q of another row":
        (SpeculationCache, "look_up", "torch.arange(len(match))",
         "torch.arange(len(match)).roll(1)",
         test_look_up_hits_if_and_only_if_the_outcome_was_guessed),
    "a finished row that shifts what its neighbours are served":
        (SpeculationCache, "look_up", "torch.arange(len(match))",
         "((~outcome.finished).cumsum(0) - 1)",
         test_a_row_of_a_batch_decodes_in_the_very_rounds_in_which_it_decodes_alone),
    "a hit served though the bonus token is another":
        (cache, "matches", "return same_k & same_bonus", "return same_k",
         test_look_up_hits_if_and_only_if_the_outcome_was_guessed),
    "branches that see each other":
        (draft_worker, "tree_layout", "torch.eye(n, dtype=torch.bool)",
         "torch.ones(n, n, dtype=torch.bool)", *TREE),
    "branches that overwrite the trunk's KV":
        (draft_worker, "tree_layout", "trunk + torch.arange(lookahead * n)",
         "1 + torch.arange(lookahead * n)",
         test_after_many_rounds_of_hits_and_misses_all_KV_is_fresh, "ssd", "neural", 0),
    "a draft that guesses at random":
        (Sampler, "sample", "self.probabilities(logits)",
         "torch.full_like(logits, 1 / logits.shape[-1])", *TREE),
    "a draft that mistakes the public noise":
        (DraftWorker, "trunk_pass", "keys(self.length", "keys(self.length - 1",
         test_a_draft_that_knows_the_noise_and_the_target_guesses_every_bonus_token, {}),
}
CONTROL = dict(temperature=0.7, downweight=0.5)
UNCHANGED = ("the program as it is", "the program as it is, with public noise")


def planted(monkeypatch, name: str) -> dict:
    """Plant a mistake (none: UNCHANGED). Returns the settings that show it: mistakes about public
    noise are planted where it is on, and those about look-ups where these are the backup."""
    if name not in UNCHANGED:
        replace_line(monkeypatch, *(MISTAKES | HARMLESS)[name][:4])
    return CONTROL | {"public_noise": "public noise" in name,
                      "backup": "lookup" if "look-ups" in name else "neural"}


def p_value_with(name: str, samples: int = 20_000) -> float:
    with pytest.MonkeyPatch.context() as monkeypatch:
        choices = planted(monkeypatch, name)
        texts, *_ = simulate(samples, **choices)
    return joint_p_value(texts, **CONTROL)


def audit_with(name: str) -> tuple[float, int]:
    """The audit's p-value (chapter 8), and of how many tokens. Of a mistake it gets four times as
    many texts, of 7 rounds after round 0, until it finds something."""
    for number in (100, 400, 1600, 6400, 25600) if name in MISTAKES else (6400,):
        prompts = [PROMPT] * number
        with pytest.MonkeyPatch.context() as monkeypatch:
            choices = planted(monkeypatch, name)
            made = decoder(*exact_pair(), lookahead=K, budget=4, seed=number, **choices)
            texts = texts_of(run_rounds(made, prompts, 7), prompts)
        warpers = warpers_of(CONTROL["temperature"], top_k=0, top_p=1.0)
        findings = audit_groups(exact_pair()[0], texts, warpers, batch_size=number)
        if smallest(findings) < ALPHA:
            break
    return smallest(findings), findings["all"].tokens


@slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_classic_mistake_is_caught(mistake):
    assert any(p_value_with(mistake, n) < ALPHA for n in (5_000, 20_000))


@slow
@pytest.mark.parametrize("change", HARMLESS)
def test_it_is_lossless_whatever_the_cache_holds(change):
    assert p_value_with(change, 10_000) > ALPHA


@pytest.mark.parametrize("change", HARMLESS)
def test_what_is_lossless_and_yet_wrong_is_caught_elsewhere(monkeypatch, change):
    owner, name, right, wrong, test, *arguments = HARMLESS[change]
    replace_line(monkeypatch, owner, name, right, wrong)
    with pytest.raises(AssertionError):
        test(*arguments)


def detection_table() -> None:
    print(f"{CONTROL}; caught below {ALPHA:g}\nfirst: p-value of the first three tokens of 20,000 "
          "texts (chapter 5)\nsecond: the audit's (chapter 8), in how many tokens of longer texts: "
          "four times as many until it is caught")
    missed = []
    for title, names in (("no mistake", UNCHANGED), ("mistakes", MISTAKES),
                         ("wrong, and yet lossless", HARMLESS)):
        print(f"\n{title}")
        for name in names:
            p_value, tokens = audit_with(name)
            print(f"{p_value_with(name):9.1e}{p_value:10.1e}{tokens:9,}  {name}", flush=True)
            if name in MISTAKES and p_value >= ALPHA:
                missed.append(name)
    print(f"\nmistakes that the audit did not find: {'; '.join(missed) or 'none'}")


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
    given = [(rank, environment, job, arguments) for rank in range(count)]
    with forks().Pool(count, maxtasksperchild=1) as pool:  # who is left at the end is killed
        answers = pool.imap_unordered(one_rank, given)
        results = dict(answers.next(seconds) for _ in range(count))  # the first failure at once
    return [results[rank] for rank in range(count)]


def decode_batches(made: Decoder, batches: list) -> tuple[list, float]:
    """On the target's ranks: the texts and rounds of all batches, and every q; and the hit rate."""
    found = []
    if made.target:
        verify = made.target.verify

        def record(speculation: Speculation) -> tuple[Speculation, Outcome]:
            found.append(speculation.q.tolist())
            return verify(speculation)

        made.target.verify = record
    for prompts in batches:
        found.append(texts_and_rounds(made, prompts))
    return found, made.stats.summary()["hit_rate"]


def decode_here(jobs: list[Settings], target, draft, batches: list) -> list:
    """One rank's part in every job."""
    placement = Placement(jobs[0])
    placement.join()
    torch.set_num_threads(1)
    vocab_size = target.config.vocab_size
    held = Models(CausalLM(target) if placement.holds_target else None,
                  CausalLM(draft, vocab_size) if placement.holds_draft else None,
                  target.config.max_position_embeddings, vocab_size)
    return [decode_batches(Decoder(job, held, placement), batches) for job in jobs]


@pytest.mark.parametrize("count, jobs", (
    (2, [dict(temperature=0), dict(temperature=1, downweight=0.7, public_noise=True)]),
    pytest.param(3, [dict(temperature=1, downweight=0.7, budget=3, backup="random")],
                 marks=slow)))
def test_ranks_write_bit_for_bit_the_text_of_one_process_with_the_same_hits(count, jobs):
    """And q arrives bit for bit: it must be what the tokens were drawn from, not what it is rounded
    to. With three ranks two hold the whole target each, here: they compute the same."""
    net = random_model()
    draft = imitation(net, 0.15)
    batches = [RAGGED, RAGGED[:1]]
    given = [settings(max_new_tokens=40, **choices) for choices in jobs]
    apart = in_ranks(count, decode_here, given, net, draft, batches)[0]
    for choices, found in zip(jobs, apart, strict=True):
        here = decoder(net, draft, max_new_tokens=40, **choices)
        assert found == decode_batches(here, batches)
        _, hit_rate = found
        assert 0 < hit_rate < 1


# ---- 8. the audit: any engine's text ----

RANDOM = 1952         # seeds the audit's own random numbers, which no engine shares
NONCENTRALITY = 86    # at which the chi-square over 20 bins is below ALPHA 99 times of a hundred
MAX_SKEWNESS = 0.25   # of a sum whose distribution three moments still describe
PIECE = 2 ** 22       # logits that are worked on at once
TESTS = ("bins", "pairs", "place", "ids", "argmax", "log p")
RANGES = 16            # of token ids


class Text(NamedTuple):
    """A line of the file: token ids, and the group of every new token."""
    prompt: list[int]
    tokens: list[int]
    group: list[str]


class Replayed(NamedTuple):
    """What the target says of every token of the texts, `[N]`, given all that precedes it."""
    uniform: torch.Tensor   # [N] in (0, 1): see `audit`
    previous: torch.Tensor  # [N] that of the token before; -1: it is the text's first
    place: torch.Tensor     # [N] in the text, from 0
    argmax: torch.Tensor    # [N, 3] is it the argmax? See `surprise`
    log_p: torch.Tensor     # [N, 3] its log-probability
    ids: torch.Tensor       # [N, RANGES] is its id in this range? Less the probability of that
    p_ids: torch.Tensor     # [N, RANGES] and that probability
    possible: torch.Tensor  # [N] is its probability above 0?

    def where(self, chosen: torch.Tensor) -> "Replayed":
        return Replayed(*(part[chosen] for part in self))


class Finding(NamedTuple):
    """Of the texts, or of a group of their tokens."""
    tokens: int
    impossible: int             # tokens of probability 0
    deviations: list[float]     # of "argmax" and "log p", in standard deviations
    nats: float                 # log-probability of a token, on average, less what is expected
    p_values: dict[str, float]  # by name, see TESTS; NaN: too few tokens to tell


def audit(told: Replayed) -> Finding:
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
        argmax   how many tokens are the target's argmax; the sum of p_max is expected
        log p    the texts' log-likelihood; the sum of p log p over all tokens is expected

    The first four are chi-square tests. Their expectations hold *given the past*, so pairs may
    overlap: what is summed is a martingale, and only what has too few tokens is left out. The ids
    and the two sums see what hides from bins of u, such as a special case that favours the argmax.
    The two sums are given in standard deviations; their p-values are two-sided, by a gamma
    distribution with the sum's variance and skewness (Pearson's type III; the normal distribution
    if that is 0). A token of probability 0 has p-value 0.

    Stopping does no harm: a text may end with an end-of-sequence token or at any length, because
    whether it goes on was settled before the next token was drawn. For the same reason a *group*
    must be settled before its token is drawn ("the round began with a miss", "third of its round").
    "Accepted" and "bonus" are not: accepted tokens are likelier than drawn ones, and a correct
    program would fail.

    False alarms: a correct program fails with probability below 6 ALPHA = 6e-6 per group.

    Power: if the u of N tokens have a distribution at total-variation distance d from the uniform
    one, as the bins see it, the chi-square over bins has a non-centrality of at least 4 N d^2
    (Cauchy-Schwarz). At 86 it is significant 99 times of a hundred, so what would have shown is

        d = sqrt(86 / (4 N)):   4.6% for 10,000 tokens, 1.5% for 100,000, 0.5% for a million.

    Biases that cancel, token against token, may hide from the bins.
    """
    u = told.uniform
    follows = told.place > 0
    p_values = {
        "bins": evenness(u, bins=20),
        "pairs": evenness(u[follows], given=(10 * told.previous[follows]).long()),
        "place": evenness(u, given=(told.place + 1).double().log2().long()),
        "ids": counts_p_value(told.ids, told.p_ids)}
    deviations = []
    for name, surprises in (("argmax", told.argmax), ("log p", told.log_p)):
        deviation, p_values[name] = sum_p_value(surprises)
        deviations.append(deviation)
    nats = float(told.log_p[:, 0].mean())
    return Finding(len(u), int((~told.possible).sum()), deviations, nats, p_values)


def smallest(findings: dict[str, Finding]) -> float:
    """The smallest p-value of all groups and tests, times their number (Bonferroni)."""
    if findings["all"].impossible:
        return 0.0
    p_values = [p for finding in findings.values() for p in finding.p_values.values()]
    known = [p for p in p_values if not math.isnan(p)]
    return min(1.0, len(known) * min(known, default=1.0))


def would_have_shown(tokens: int) -> float:
    """The smallest bias in total variation that so many tokens show: see `audit`."""
    return min(1.0, (NONCENTRALITY / 4 / tokens) ** 0.5)


def evenness(numbers: torch.Tensor, bins: int = 10, given: torch.Tensor | int = 0) -> float:
    """p-value of the hypothesis that numbers `[N]` in (0, 1) are uniform whatever their class
    `given` `[N]` (0, 1, ...). Classes with fewer than 5 expected in a bin are left out; NaN: all
    are."""
    cell = given * bins + (numbers * bins).long().clamp(max=bins - 1)
    observed = torch.bincount(cell)
    observed = torch.nn.functional.pad(observed, (0, -len(observed) % bins)).view(-1, bins)
    observed = observed[observed.sum(1) >= 5 * bins].double()
    if not len(observed):
        return math.nan
    expected = observed.mean(1, keepdim=True)
    chi_square = ((observed - expected).square() / expected).sum()
    freedom = torch.tensor(len(observed) * (bins - 1.0))
    return float(torch.special.gammaincc(freedom.double() / 2, chi_square / 2))


def counts_p_value(surprises: torch.Tensor, p: torch.Tensor) -> float:
    """p-value of the hypothesis that each token falls into a class with its probabilities `p`
    `[N, classes]`; `surprises`: 1 for the class it fell into and 0 for others, less p. Directions
    in which the counts hardly vary are left out; NaN: all are."""
    variance, directions = torch.linalg.eigh(p.sum(0).diag() - p.T @ p)
    enough = variance >= 5
    if not enough.any():
        return math.nan
    along = (surprises.sum(0) @ directions)[enough]
    chi_square = (along.square() / variance[enough]).sum()
    return float(torch.special.gammaincc(enough.sum().double() / 2, chi_square / 2))


def sum_p_value(surprises: torch.Tensor) -> tuple[float, float]:
    """How far a sum `[N, 3]` (see `surprise`) is from its expectation, in standard deviations, and
    its two-sided p-value; NaN: it varies too little to tell."""
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
    gamma = [torch.tensor(number, dtype=torch.float64) for number in (shape, quantile)]
    above = float(torch.special.gammaincc(*gamma))
    below = float(torch.special.gammainc(*gamma))
    return deviation, min(1.0, 2 * min(above, below))


def surprise(value: torch.Tensor, p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of a function of the token, `value` `[T, V]`: its value for the tokens `[T]` that were
    written, less its expectation under p `[T, V]`; its variance; its third central moment:
    `[T, 3]`."""
    centred = value - (p * value).sum(-1, keepdim=True)
    seen = centred.gather(-1, tokens[:, None]).squeeze(-1)
    return torch.stack([seen, (p * centred ** 2).sum(-1), (p * centred ** 3).sum(-1)], -1)


def replay(logits: torch.Tensor, tokens: torch.Tensor, warpers: LogitsProcessorList,
           within: torch.Tensor) -> Replayed:
    """A text's tokens `[T]` against the target's logits before them, `[T, V]`; `within` `[T]`,
    uniform in (0, 1), chooses a place in each token's interval. In host memory."""
    parts = []
    rows = max(1, PIECE // logits.shape[-1])
    for piece, token, inside in zip(logits.split(rows), tokens.split(rows), within.split(rows)):
        piece = piece.to(torch.promote_types(piece.dtype, torch.float32))
        p = warpers(None, piece).double().softmax(-1)
        if p.isnan().any():
            raise UserError("the target's logits are infinite or not numbers: another --dtype has "
                            "room for larger ones")
        own = p.gather(-1, token[:, None])
        number = torch.arange(p.shape[-1], device=p.device)
        likelier = (p > own) | (p == own) & (number < token[:, None])
        uniform = (p * likelier).sum(-1) + inside * own.squeeze(-1)
        is_argmax = (number == p.argmax(-1, keepdim=True)).double()
        log_p = p.clamp(min=1e-300).log()
        ranges = number * RANGES // len(number)
        p_ids = p.new_zeros(len(p), RANGES).index_add_(1, ranges, p)
        seen = torch.nn.functional.one_hot(ranges[token], RANGES)
        parts.append((uniform, surprise(is_argmax, p, token), surprise(log_p, p, token),
                      seen - p_ids, p_ids, own.squeeze(-1) > 0))
    uniform, *others = (torch.cat(part).cpu() for part in zip(*parts))
    previous = torch.cat([torch.tensor([-1.0]), uniform[:-1]])
    return Replayed(uniform, previous, torch.arange(len(tokens)), *others)


def warpers_of(temperature: float, top_k: int, top_p: float) -> LogitsProcessorList:
    """transformers' own, in the order of `generate`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


def target_logits(model, texts: list[Text], batch_size: int) -> Iterator[torch.Tensor]:
    """The target's logits `[T, V]` before every new token of each text, by one ordinary forward
    pass per batch: nothing of this project has a part in it."""
    bar = tqdm(total=sum(len(text.tokens) for text in texts), unit="token", disable=None)
    for start in range(0, len(texts), batch_size):
        batch = texts[start:start + batch_size]
        read = [(text.prompt + text.tokens)[:-1] for text in batch]
        width = max(map(len, read))
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in read])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in read])
        skipped = min(len(text.prompt) for text in batch) - 1  # no logits of these are needed
        with torch.inference_mode():
            logits = model(input_ids=padded.to(model.device), use_cache=False,
                           attention_mask=mask.to(model.device),
                           logits_to_keep=width - skipped).logits
        for row, text in enumerate(batch):
            first = len(text.prompt) - 1 - skipped
            yield logits[row, first:first + len(text.tokens)]
            bar.update(len(text.tokens))
    bar.close()


def audit_groups(model, texts: list[Text], warpers: LogitsProcessorList,
                 batch_size: int) -> dict[str, Finding]:
    """The finding of all tokens ("all") and of each group."""
    generator = torch.Generator().manual_seed(RANDOM)
    told = []
    for text, logits in zip(texts, target_logits(model, texts, batch_size)):
        within = torch.rand(len(text.tokens), generator=generator, dtype=torch.float64)
        tokens = torch.tensor(text.tokens)
        told.append(replay(logits, tokens.to(logits.device), warpers, within.to(logits.device)))
    told = Replayed(*(torch.cat(part) for part in zip(*told)))
    return {name: audit(told.where(chosen)) for name, chosen in members(texts).items()}


def members(texts: list[Text]) -> dict[str, torch.Tensor]:
    """Of all tokens ("all"), and of each group: which of the texts' tokens `[N]` belong to it."""
    groups = [name for text in texts for name in text.group]
    chosen = {"all": torch.ones(sum(len(text.tokens) for text in texts), dtype=torch.bool)}
    for name in sorted(set(groups) - {""}):
        chosen[name] = torch.tensor([group == name for group in groups])
    return chosen


def texts_of(record: list, prompts: list[list[int]]) -> list[Text]:
    """What `run_rounds` wrote; groups: "hit 2" is the third token of a round after a hit."""
    texts = [Text(prompt, [], []) for prompt in prompts]
    for number, (speculation, outcome) in enumerate(record):
        drafted = speculation.tokens.tolist()
        source = speculation.source.tolist()
        for row, (k, bonus) in enumerate(torch.stack(outcome, 1).tolist()):
            begin = "hit" if source[row] == PRIMARY else "miss"
            new = drafted[row][:k] + [bonus]
            texts[row].tokens.extend(new)
            texts[row].group.extend(f"{begin if number else 'round'} {place}"
                                    for place in range(len(new)))
    return texts


def greedy_gaps(model, texts: list[Text], batch_size: int) -> torch.Tensor:
    """For temperature 0, `[N, 2]`: how far the logit of each token is from the largest, and how far
    rounding may take it: 4 times the precision of the model's type (or 1e-5, which sums over
    many layers lose in float32) times the largest logit."""
    precision = max(torch.finfo(model.dtype).eps, 1e-5)
    gaps = []
    for text, logits in zip(texts, target_logits(model, texts, batch_size)):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest, _ = logits.max(-1)
        own = logits.gather(-1, torch.tensor(text.tokens, device=logits.device)[:, None])
        size = logits.abs().masked_fill(logits.isinf(), 0).amax(-1)
        gaps.append(torch.stack([largest - own.squeeze(-1), 4 * precision * size], -1).cpu())
    return torch.cat(gaps).double()


def read_texts(path: str) -> tuple[dict, list[tuple[int, dict]]]:
    """The settings of the first line, if it holds any, and the lines with texts, numbered."""
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"{path}: {reason}") from problem
    settings = {}
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object; a text is a line such as "
                            '{"prompt_tokens": [1, 2], "tokens": [3, 4, 5]}')
        if isinstance(row.get("settings"), dict):
            settings = row["settings"]
        elif "statistics" not in row:
            texts.append((number, row))
    return settings, texts


def check_text(row: dict, tokenizer, vocab_size: int, context: float) -> Text:
    """A line as a `Text`. Raises `UserError`, which says what is wrong with it."""
    prompt = row.get("prompt_tokens")
    if prompt is None and isinstance(row.get("prompt"), str):
        if tokenizer is None:
            raise UserError("a prompt in letters, and the target has no tokenizer: write the "
                            "token ids that the engine read, as prompt_tokens")
        prompt = tokenizer(row["prompt"])["input_ids"]
    tokens = row.get("tokens")
    group = row.get("group") or []
    for name, ids in (("prompt_tokens (or prompt)", prompt), ("tokens", tokens)):
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise UserError(f"no list of token ids called {name}")
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise UserError(f"{name} holds the id {outside[0]}, and the target's vocabulary has "
                            f"{vocab_size}: another model's tokenizer?")
    if not prompt:
        raise UserError("an empty prompt: nothing says how likely the first token was; give at "
                        "least the token with which the engine began")
    if len(prompt) + len(tokens) > context:
        raise UserError(f"{len(prompt) + len(tokens)} tokens, and the target's context is "
                        f"{context}")
    if group and len(group) != len(tokens):
        raise UserError(f"{len(tokens)} tokens and {len(group)} entries of group")
    return Text(prompt, tokens, [str(name) for name in group] or [""] * len(tokens))


def audit_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Audit texts of any engine: is their distribution the target's? Without FILE: "
        "the table of classic mistakes. Exit status: 0 nothing found, 1 found, 2 a bad file.",
        epilog="The first line may be {\"settings\": {...}}, as saguaro.py --output writes it; "
        "flags override it. Name the type in which the engine computed: rounding is a bias, too.")
    parser.add_argument("file", nargs="?", metavar="FILE", help="JSON Lines: prompt_tokens (or "
                        "prompt, which the target's tokenizer must turn into the very ids that "
                        "the engine read), tokens, and if you like group, one entry a token")
    parser.add_argument("--target", help="folder, or name on the Hugging Face Hub")
    parser.add_argument("--temperature", type=float, help="with which the engine sampled")
    parser.add_argument("--top-k", type=int, help="0: off")
    parser.add_argument("--top-p", type=float, help="1: off")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16", "float64"),
                        help="auto: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--batch-size", type=int, default=8, help="texts a forward pass")
    return parser


def load_target(path: str, dtype: str, device: str):
    """The model, and its tokenizer if it has one."""
    if dtype == "auto":
        on_gpu = device != "cpu" and torch.cuda.is_available()
        dtype = "bfloat16" if on_gpu else "float32"
    logging.set_tqdm_hook(lambda _, bar, __: logging.EmptyTqdm(*bar))  # downloads keep theirs
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype),
                                                     device_map=device)
    except Exception as problem:  # a damaged file raises what its reader pleases
        raise UserError(f"--target {path}: {first_line(problem)}") from problem
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception:  # only prompts in letters need one
        tokenizer = None
    return model.eval(), tokenizer


def audit_file(args: argparse.Namespace) -> bool:
    """Audit a file and print what was found. Returns whether anything was."""
    settings, rows = read_texts(args.file)
    settings |= {name: value for name, value in vars(args).items() if value is not None}
    for name in ("target", "temperature"):
        if settings.get(name) is None:
            raise UserError(f"{args.file} has no line of settings: name --{name}")
    model, tokenizer = load_target(settings["target"], settings.get("dtype", "auto"), args.device)
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or math.inf
    texts = []
    for number, row in rows:
        try:
            texts.append(check_text(row, tokenizer, config.vocab_size, context))
        except UserError as problem:
            raise UserError(f"{args.file}, line {number}: {problem}") from None
    texts = [text for text in texts if text.tokens]
    if not texts:
        raise UserError(f"{args.file} holds no tokens")
    texts.sort(key=lambda text: -len(text.prompt + text.tokens))  # little padding in a batch
    print(f"target {settings['target']}, temperature {settings['temperature']}, {model.dtype}, "
          f"{len(texts)} texts")
    if settings["temperature"] == 0:
        return report_greedy(texts, greedy_gaps(model, texts, args.batch_size))
    try:
        warpers = warpers_of(settings["temperature"], settings.get("top_k", 0),
                             settings.get("top_p", 1.0))
    except (ValueError, TypeError) as problem:  # transformers', which name what is wrong
        raise UserError(f"temperature, top-k or top-p: {first_line(problem)}") from problem
    return report(audit_groups(model, texts, warpers, args.batch_size))


def report(findings: dict[str, Finding]) -> bool:
    """Print what was found, and what would have been; returns whether anything was."""
    width = max(map(len, findings))
    print(f"\n{'':{width}}    tokens    bins   pairs   place     ids        argmax         log p"
          "  bins show")
    for name, finding in findings.items():
        p = {test: p_text(finding.p_values[test]) for test in TESTS}
        argmax, log_p = (f"{deviation:+.1f}" for deviation in finding.deviations)
        print(f"{name:{width}}{finding.tokens:10,} {p['bins']:>7} {p['pairs']:>7} {p['place']:>7}"
              f" {p['ids']:>7} {argmax:>5} {p['argmax']:>7} {log_p:>5} {p['log p']:>7}"
              f"      {would_have_shown(finding.tokens):5.1%}")
    print("\np-values; argmax and log p also in standard deviations from what the target expects; "
          "-: too few tokens\nto tell; bins show: a bias from this total-variation distance on")
    found = [f"p = {p_text(p)} ({test}{'' if name == 'all' else ', ' + name})"
             for name, finding in findings.items()
             for test, p in finding.p_values.items() if p < ALPHA]
    whole = findings["all"]
    if whole.impossible:
        found.insert(0, f"{whole.impossible:,} tokens are impossible (probability 0)")
        print(f"{whole.impossible:,} tokens have probability 0 at these settings. With top-k or "
              "top-p, in half precision,\nrounding may be the reason.")
    if found:
        print(f"FOUND: these texts are not distributed as the target's: {'; '.join(found[:4])}"
              f"{' ...' if len(found) > 4 else ''}.")
        if whole.nats < -1:
            print(f"They are {-whole.nats:.1f} nats a token less likely than the target's own: "
                  "another tokenizer, checkpoint\nor prompt?")
    else:
        print(f"Nothing found: all p-values are above {ALPHA:g}. In {whole.tokens:,} tokens a bias "
              f"of {would_have_shown(whole.tokens):.1%} of the\nbins' probability would have "
              "shown.")
    print(f"A correct program is called wrong with probability below "
          f"{len(findings) * len(TESTS) * ALPHA:.0e}.")
    return bool(found)


def p_text(p: float) -> str:
    """A p-value as people read it.

    >>> p_text(0.25), p_text(3.4e-11), p_text(math.nan)
    ('0.25', '3e-11', '-')
    """
    if math.isnan(p):
        return "-"
    return f"{p:.2f}" if p >= 0.005 else f"{p:.0e}"


def report_greedy(texts: list[Text], gaps: torch.Tensor) -> bool:
    """For temperature 0: how many tokens are the argmax, and how far the others' logits are from
    the largest. Returns whether any is farther than rounding explains."""
    groups = members(texts)
    width = max(map(len, groups))
    print(f"\n{'':{width}}    tokens   argmax  near-ties  faults  largest gap of logits")
    gap, rounding = gaps.T
    for name, chosen in groups.items():
        others = gap[chosen] > 0
        faults = int((gap > rounding)[chosen].sum())
        print(f"{name:{width}}{len(others):10,} {1 - others.double().mean():8.3%} "
              f"{int(others.sum()) - faults:10,} {faults:7,}  {gap[chosen].max():.3g}")
    faults = int((gap > rounding).sum())
    if faults:
        print(f"FOUND: {faults:,} tokens are not the target's argmax, by more than rounding "
              "explains (4 times the model's\nprecision, times the largest logit).")
    else:
        print("Nothing found: every token is the target's argmax, or as good as that: the gap is "
              "within rounding.")
    return faults > 0


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 if a bias was found, 2 for a bad file."""
    args = audit_parser().parse_args(arguments)
    if args.file is None:
        detection_table()
        return 0
    try:
        return int(audit_file(args))
    except UserError as problem:
        print(problem, file=sys.stderr)
        return 2


# that it is right

WRITTEN = {  # how tokens may be drawn that are said to be drawn from softmax(logits); found by
    "the truth": (lambda logits, at: logits, set()),
    "the argmax, three tokens of ten": (
        lambda logits, at: logits + 99.0 * (logits == logits.amax(-1, keepdim=True))
        * (at % 10 < 3)[:, None], {"argmax", "bins", "log p"}),
    "another temperature": (lambda logits, at: logits / 0.9, {"argmax", "bins", "log p"}),
    "the first of each text more greedily": (
        lambda logits, at: logits / torch.where(at % 50 == 0, 0.3, 1.0)[:, None], {"place"}),
    "the upper half of the vocabulary 1.2 times as often": (
        lambda logits, at: logits + 0.18 * (torch.arange(40) >= 20), {"ids"}),
    "every other token as the one before": (lambda logits, at: logits, {"pairs"}),
}


def told_of(how: str, seed: int, count: int = 10_000) -> Replayed:
    """Tokens drawn from random distributions, in texts of 50; so told as if by `softmax`."""
    logits = 2 * random_distributions(count, 40, seed=seed).log() / 3
    at = torch.arange(count)
    bent, _ = WRITTEN[how]
    uniforms = draw_uniforms(count, seed=seed + 1)
    if how.startswith("every other"):
        uniforms[1::2] = uniforms[::2]
    p, likeliest_first = bent(logits, at).softmax(-1).sort(-1, descending=True)
    tokens = likeliest_first.gather(-1, sampling.inverse_cdf(p, uniforms)[:, None]).squeeze(-1)
    within = draw_uniforms(count, seed=seed + 2)
    texts = [replay(*part, warpers_of(1.0, 0, 1.0), inside) for *part, inside in
             zip(logits.split(50), tokens.split(50), within.split(50))]
    return Replayed(*(torch.cat(part) for part in zip(*texts)))


@pytest.mark.parametrize("how", WRITTEN)
def test_the_audit_accepts_the_truth_and_finds_each_bias_where_it_should(how):
    finding = audit(told_of(how, seed=10))
    found = {test for test, p in finding.p_values.items() if p < ALPHA}
    _, expected = WRITTEN[how]
    assert expected <= found
    assert expected or not found
    assert finding.impossible == 0


def test_the_audits_p_values_of_the_truth_are_uniform():
    findings = [audit(told_of("the truth", 3 * seed, count=1000)) for seed in range(200)]
    for test in TESTS:
        p_values = torch.tensor([finding.p_values[test] for finding in findings])
        assert evenness(p_values, bins=10) > ALPHA, test
        assert (p_values < 0.01).sum() < 12, test


def test_a_skewed_sum_has_its_p_value_on_both_sides():
    """100 - G, G the sum of 100 exponential numbers: G > x if fewer than 100 events of a Poisson
    process come before x."""
    for total in (-60, -30, 25, 40):
        x = 100 - total
        below = sum(math.exp(k * math.log(x) - x - math.lgamma(k + 1)) for k in range(100))
        sample = torch.tensor([[total, 100, -200.0]], dtype=torch.float64)
        deviation, p_value = sum_p_value(sample)
        assert deviation == pytest.approx(total / 10)
        assert p_value == pytest.approx(2 * min(below, 1 - below))
    for sample in ([[3, 60, -120.0]], [[0, 0, 0.0]]):
        assert math.isnan(sum_p_value(torch.tensor(sample))[1]), "too few to tell"


def test_what_is_said_to_show_shows_99_times_of_a_hundred():
    """The bias that is hardest to see takes the same from each of ten bins."""
    count = 20_000
    change = would_have_shown(count) * torch.tensor([1.0, -1.0]).repeat(10)
    probability = (1 + 2 * change.double()) / 20
    assert 0.5 * (probability - 0.05).abs().sum() == pytest.approx(would_have_shown(count))
    torch.manual_seed(0)
    found = 0
    for _ in range(1000):
        bins = probability.multinomial(count, replacement=True)
        found += evenness((bins + 0.5) / 20, bins=20) < ALPHA
    assert 970 < found < 1000


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    """The random model as a checkpoint of float64, without a tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    random_model(max_position_embeddings=128).save_pretrained(folder)
    return str(folder)


def write_lines(path: Path, texts: list[Text], settings: dict | None) -> str:
    """The file that an engine would write."""
    rows = [{"settings": settings}] if settings else []
    rows += [{"prompt_tokens": text.prompt, "tokens": text.tokens, "group": text.group}
             for text in texts]
    rows += [{"statistics": {}}] if settings else []
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def texts_by_ssd(rounds: int, **choices) -> list[Text]:
    """200 rows of long texts by the random model, with four prompts."""
    net = random_model(max_position_embeddings=128)
    made = decoder(net, imitation(net, 0.3), **choices)
    prompts = 50 * RAGGED
    return texts_of(run_rounds(made, prompts, rounds), prompts)


def test_a_special_case_after_misses_is_found_in_their_groups_alone(target_folder, tmp_path,
                                                                    monkeypatch, capsys):
    """And without it nothing is. Wrong flags are found, too: they override the file's settings."""
    sampling = dict(temperature=0.8, top_k=12)
    settings = dict(target=target_folder, dtype="float64", top_p=1.0, **sampling)
    file = write_lines(tmp_path / "file.jsonl", texts_by_ssd(12, **sampling), settings)
    assert main([file, "--batch-size", "30"]) == 0
    assert "Nothing found" in capsys.readouterr().out
    for flags in (["--temperature", "0.9"], ["--top-k", "11"]):
        assert main([file, *flags]) == 1
    assert "impossible" in capsys.readouterr().out, "the twelfth likeliest token, with top-k 11"
    mistake = "after a miss, tokens accepted if and only if they equal the argmax"
    replace_line(monkeypatch, *MISTAKES[mistake])
    texts = texts_by_ssd(12, **sampling)
    assert main([write_lines(tmp_path / "file.jsonl", texts, settings)]) == 1
    assert "FOUND" in capsys.readouterr().out
    net = random_model(max_position_embeddings=128)
    findings = audit_groups(net, texts, warpers_of(0.8, 12, 1.0), batch_size=200)
    found = {group for group, finding in findings.items()
             if any(p < ALPHA for p in finding.p_values.values())}
    assert found > {"all"} and all(group.startswith("miss") for group in found - {"all"})


def test_prompts_and_padding_do_not_matter_to_the_audit():
    """Texts of all lengths in batches: the logits are those of each text alone."""
    net = random_model("gpt2", max_position_embeddings=128)
    texts = [Text(list(range(1, 2 + number)), list(range(number, 2 * number + 1)), [])
             for number in range(12)]
    for text, logits in zip(texts, target_logits(net, texts, 5), strict=True):
        with torch.inference_mode():
            alone = net(torch.tensor([text.prompt + text.tokens])).logits[0, :-1]
        assert_close(logits, alone[-len(text.tokens):], 1e-9)


def test_a_prompt_in_letters_is_read_by_the_targets_tokenizer(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    prompt = "def f(x):"
    reports = []
    for key, given in (("prompt", prompt), ("prompt_tokens", tokenizer(prompt)["input_ids"])):
        path = tmp_path / "file.jsonl"
        path.write_text(json.dumps({key: given, "tokens": list(range(300, 400))}), "utf-8")
        flags = ["--target", str(TINY / "target"), "--temperature", "1"]
        assert main([str(path), *flags]) == 1, "no text of this target"
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1] and "another tokenizer" in reports[0]


@pytest.mark.parametrize("dtype", ("float64", "bfloat16"))
def test_greedy_texts_may_differ_from_the_argmax_by_rounding_alone(dtype, target_folder, tmp_path,
                                                                  capsys):
    net = random_model(max_position_embeddings=128)
    net = copy.deepcopy(net).to(getattr(torch, dtype))
    made = decoder(net, imitation(random_model(max_position_embeddings=128), 0.1).to(net.dtype),
                   dtype=dtype, max_new_tokens=90)
    texts = [Text(prompt, tokens, ["hit 0"] * 90) for prompt, tokens in zip(RAGGED, made(RAGGED))]
    flags = ["--target", target_folder, "--temperature", "0", "--dtype", dtype]
    path = tmp_path / "file.jsonl"
    assert main([write_lines(path, texts, None), *flags]) == 0
    report = capsys.readouterr().out
    assert "hit 0" in report and "Nothing found" in report
    texts[1].tokens[70] = (texts[1].tokens[70] + 1) % 40
    assert main([write_lines(path, texts, None), *flags]) == 1
    assert "FOUND" in capsys.readouterr().out


BAD_FILES = {
    "": "holds no tokens", "[1]": "line 1: not a JSON object", "not JSON": "not a JSON object",
    '{"tokens": [1]}': "no list of token ids called prompt_tokens",
    '{"prompt_tokens": [1]}': "no list of token ids called tokens",
    '{"prompt_tokens": [1], "tokens": ["a"]}': "no list of token ids called tokens",
    '{"prompt_tokens": [1], "tokens": []}': "holds no tokens",
    '{"prompt_tokens": [], "tokens": [1]}': "an empty prompt",
    '{"prompt_tokens": [1], "tokens": [40]}': "tokens holds the id 40, and the target's vocabulary "
                                              "has 40",
    '{"prompt_tokens": [-1], "tokens": [4]}': "holds the id -1",
    '{"prompt": "letters", "tokens": [1]}': "the target has no tokenizer",
    '{"prompt_tokens": [1], "tokens": [1, 2], "group": ["a"]}': "2 tokens and 1 entries of group",
    json.dumps({"prompt_tokens": [1], "tokens": [1] * 128}): "129 tokens, and the target's context",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_a_bad_file_gets_one_sentence(content, target_folder, tmp_path, capsys):
    path = tmp_path / "file.jsonl"
    path.write_text(content, "utf-8")
    assert main([str(path), "--target", target_folder, "--temperature", "1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert BAD_FILES[content] in said


def test_what_the_audit_cannot_read_or_guess_gets_one_sentence(target_folder, tmp_path, capsys):
    text = Text([1], [2], [])
    path = write_lines(tmp_path / "file.jsonl", [text], None)
    missing = str(tmp_path / "none")
    for arguments, sentence in (
            ([missing], f"{missing}: No such file"), ([path], "name --target"),
            ([path, "--target", target_folder], "name --temperature"),
            ([path, "--target", target_folder, "--temperature", "-1"], "top-p: `temperature` (="),
            ([path, "--target", missing, "--temperature", "1"], f"--target {missing}: ")):
        assert main(arguments) == 2
        assert sentence in capsys.readouterr().err
    assert main([path, "--target", target_folder, "--temperature", "1"]) == 0
    assert "-" in capsys.readouterr().out, "one token tells nothing"


if __name__ == "__main__":
    sys.exit(main())
