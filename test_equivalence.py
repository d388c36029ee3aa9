"""The proofs. Speculation is *lossless*: whatever the draft proposes, the text is distributed exactly as if the
target had written it alone. This file shows it from the formulas up to the command line, in the order of the paper:

    1  sampling          the algebra of accept and residual, and of Saguaro sampling (section 4.2)
    2  the cache         Definition 4, Theorem 12
    3  the machine room  KV slots, tree attention, stopping, statistics
    4  greedy decoding   token for token what `generate` writes
    5  sampled text      frequencies against the target's exact probabilities
    6  classic mistakes  each is planted, and each must be caught by the test of chapter 5
    7  the real thing    processes, started as a user starts them
    8  GPUs              the same text wherever the models are; where there is no GPU, on a stand-in

How does one test a *distribution*? With a vocabulary of 6 there are only 6^3 = 216 texts of three tokens, and the
target's probability of each is a product of three softmaxes. We let SSD write 120,000 texts and count. If the program
is right, the count O of a text differs from the expected E by chance alone, by about sqrt(E), and Pearson's

    chi-square = sum over texts of (O - E)^2 / E

comes out near its number of degrees of freedom (texts - 1). The p-value is the probability that chance alone makes it
at least as large. Texts with E < 5, for which that theory is too coarse, are pooled into one bin (`goodness_of_fit`).

False alarms. The suite computes fewer than 500 p-values and calls one significant below ALPHA = 1e-6, so a correct
program fails it with probability below 500 * 1e-6 = 5e-4 (Bonferroni). Seeds are fixed: what has passed once goes on
passing.

Power. If the texts had a distribution at total-variation distance d from the target's, chi-square would grow by at
least 4 N d^2 (Cauchy-Schwarz). For N = 120,000 and d = 0.02 that is 192, found with a probability above 0.999 among
the 150 degrees of freedom of our test case: `test_the_sample_is_large_enough_to_see_two_percent` does the sum.

Random networks stand in for language models: small, in float64 (so that no tie is decided by rounding), with large
weights (so that their distributions are far from uniform). A draft is its target plus noise. All runs in one process,
where the draft pre-speculates just before it is asked, unless a test's name says otherwise.

    python -m pytest                     all of it, some minutes
    python -m pytest -m "not slow"       an edit loop
    python test_equivalence.py           the table of chapter 6
"""
import copy
import inspect
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation import utils as generation_utils
from transformers.integrations import accelerate as placement

import bench
import cache
import model
import saguaro
import sampling
from cache import FanOut, Outcome, Speculation, SpeculationCache, choose_guesses, geometric_fan_out, rank_guesses
from draft_worker import Backup, Downweight, DraftWorker, continue_by_look_up
from model import CausalLM, UserError, load_sharded, parallel_plan
from target_worker import NoSpeculator, Stats, TargetWorker, decode

slow = pytest.mark.slow
torch.set_num_threads(1)  # the networks here are too small to share
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")[:torch.cuda.device_count()]
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # for all chapters but the last

FORKS = torch.multiprocessing.get_context("forkserver")  # processes that begin with all imports done, once for all
FORKS.set_forkserver_preload([__name__])
ALPHA = 1e-6
HERE = Path(__file__).resolve().parent


# ---- helpers ----

@lru_cache(maxsize=None)
def network(family: str = "llama", seed: int = 0, **changes):
    """A random network of a Hugging Face architecture, in float64. Made once: to change it, copy it."""
    shape = dict(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
                 intermediate_size=48, max_position_embeddings=64, initializer_range=0.3,
                 eos_token_id=None, bos_token_id=None, pad_token_id=None)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape | changes)).double().eval()


def imitation(target, noise: float, seed: int = 1):
    """A draft: the target with noise on its weights, in units of each tensor's standard deviation."""
    draft, generator = copy.deepcopy(target), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.std() > 0:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return draft


def draft_worker(net, warpers=None, seed=1, lookahead=3, budget=7, downweight=1.0, vocab_size=None,
                 shape="geometric", backup="neural") -> DraftWorker:
    """The speculator of ordinary speculative decoding: nobody calls its `pre_speculate`."""
    fan_out = FanOut(shape, budget, lookahead, acceptance_rate=0.7, backup_acceptance_rate=0.4, miss_exponent=1.0)
    return DraftWorker(CausalLM(net, vocab_size), warpers, seed, lookahead, fan_out, Downweight(downweight),
                       Backup(backup, lookahead))


def ahead(worker: DraftWorker, early_outcome: bool = False) -> DraftWorker:
    """The same worker as the speculator of SSD in one process: it fills its cache before it looks at the outcome."""
    answer = worker.speculate

    def speculate(outcome: Outcome) -> Speculation:
        worker.pre_speculate((lambda: outcome) if early_outcome else lambda: None)
        return answer(outcome)

    worker.speculate = speculate
    return worker


def recorded(speculator) -> list[Speculation]:
    """The speculations that a speculator hands out from now on."""
    record, answer = [], speculator.speculate

    def speculate(outcome: Outcome) -> Speculation:
        record.append(answer(outcome))
        return record[-1]

    speculator.speculate = speculate
    return record


def run_rounds(target: TargetWorker, speculator, prompts: list[list[int]], rounds: int, lookahead: int):
    """The loop of Algorithm 1 with no row ever finishing: the (speculation, outcome) of every round, round 0
    first."""
    longest = max(map(len, prompts)) + 1 + rounds * (lookahead + 1)
    speculator.start(prompts, longest)
    speculation = Speculation.empty(len(prompts))
    record = [(speculation, target.prefill(prompts, longest, lookahead))]
    for _ in range(rounds):
        speculation = speculator.speculate(record[-1][1])
        record.append((speculation, target.verify(speculation)))
    return record


def written(record) -> tuple[torch.Tensor, torch.Tensor]:
    """The new tokens `[B, longest]` of every row, and how many they are `[B]`."""
    texts = torch.zeros(len(record[0][1].bonus), sum(s.tokens.shape[1] + 1 for s, _ in record), dtype=torch.long)
    length = torch.zeros(len(texts), dtype=torch.long)
    for speculation, outcome in record:
        new = torch.cat([speculation.tokens, speculation.tokens[:, :0], outcome.bonus[:, None]], 1)
        new = new.scatter(1, outcome.num_accepted[:, None], outcome.bonus[:, None])
        texts.scatter_(1, length[:, None] + torch.arange(new.shape[1]), new)
        length += outcome.num_accepted + 1
    return texts, length


@lru_cache(maxsize=None)
def generated(net, prompt: tuple[int, ...], max_new_tokens: int, eos: tuple[int, ...]) -> list[int]:
    text = net.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                        do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0, eos_token_id=list(eos) or None)
    return text[0, len(prompt):].tolist()


def greedy_reference(net, prompt: list[int], max_new_tokens: int, eos: list[int] = ()) -> list[int]:
    """What transformers' own `generate` writes after one prompt."""
    return generated(net, tuple(prompt), max_new_tokens, tuple(eos))


def random_distributions(*shape: int, seed: int = 0) -> torch.Tensor:
    """Peaked random distributions `[*shape[:-1], V]` in float64."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(-1)


# ---- 1. sampling: the algebra of losslessness, Saguaro sampling (section 4.2) ----

def emitted(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The distribution `[..., V]` of what becomes of a draft from q `[..., V]` verified against p:
    sum_s q(s) [accept(s) delta_s + (1 - accept(s)) residual]."""
    vocabulary = torch.arange(p.shape[-1]).expand_as(p)
    every_p, every_q = (d[..., None, :].expand(*d.shape, -1) for d in (p, q))
    accept = sampling.acceptance_probability(every_p, every_q, vocabulary).nan_to_num(0)  # 0/0: never drafted
    rejected = (q * (1 - accept)).sum(-1, keepdim=True)
    return q * accept + rejected * sampling.residual(p, q)


def proposals(kind: str, p: torch.Tensor) -> torch.Tensor:
    q = random_distributions(*p.shape, seed=1)
    return {
        "another distribution": lambda: q,
        "the target itself": lambda: p,
        "disjoint support": lambda: torch.where(p < p.median(-1, keepdim=True).values, q, 0.0),
        "Saguaro, C = 0.5": lambda: sampling.saguaro_distribution(q, 3, 0.5),
        "Saguaro, C = 0": lambda: sampling.saguaro_distribution(q, 3, 0.0),
        "Saguaro from the target itself": lambda: sampling.saguaro_distribution(p, 2, 0.3),
        "point mass": lambda: sampling.point_mass(q.argmax(-1), like=p),
    }[kind]()


KINDS = ("another distribution", "the target itself", "disjoint support", "Saguaro, C = 0.5", "Saguaro, C = 0",
         "Saguaro from the target itself", "point mass")


@pytest.mark.parametrize("kind", KINDS)
def test_accepting_or_replacing_a_draft_gives_exactly_p_whatever_q_is(kind):
    p = random_distributions(200, 8)
    q = proposals(kind, p)
    q = q / q.sum(-1, keepdim=True)
    torch.testing.assert_close(emitted(p, q), p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_two_positions_and_the_bonus_token_have_exactly_the_targets_joint_distribution(kind):
    vocab, size = torch.arange(5), 5
    p1, p2, p3 = (random_distributions(*shape, seed=seed) for seed, shape in
                  enumerate(((size,), (size, size), (size, size, size))))  # after nothing, after x, after x, y
    q1, q2 = ((q / q.sum(-1, keepdim=True)) for q in (proposals(kind, p1), proposals(kind, p2)))
    accept1 = sampling.acceptance_probability(p1.expand(size, -1), q1.expand(size, -1), vocab).nan_to_num(0)
    rejected1 = (q1 * (1 - accept1)).sum() * sampling.residual(p1, q1)
    # after an accepted x the second position is verified; after a replaced one the target goes on alone
    joint = (q1 * accept1)[:, None] * emitted(p2, q2) + rejected1[:, None] * p2
    accept2 = sampling.acceptance_probability(p2[:, None].expand(-1, size, -1), q2[:, None].expand(-1, size, -1),
                                              vocab.expand(size, -1)).nan_to_num(0)
    bonus = (q1 * accept1)[:, None] * q2 * accept2  # both accepted: then t* is drawn from p3, the residual of q = 0
    three = (joint - bonus)[..., None] * p3 + bonus[..., None] * sampling.residual(p3, torch.zeros_like(p3))
    torch.testing.assert_close(three, p1[:, None, None] * p2[..., None] * p3, rtol=0, atol=1e-12)


def test_verify_accepts_up_to_the_first_rejection_and_draws_the_bonus_token_there():
    p, q = random_distributions(500, 4, 8), random_distributions(500, 3, 8, seed=1)
    generator = torch.Generator().manual_seed(0)
    coins = torch.rand(500, 4, generator=generator, dtype=torch.float64)
    tokens = sampling.inverse_cdf(q, torch.rand(500, 3, generator=generator, dtype=torch.float64))
    num_accepted, bonus = sampling.verify(p, tokens, q, coins)
    for row in range(500):
        k = 0
        while k < 3 and coins[row, k] < min(1, p[row, k, tokens[row, k]] / q[row, k, tokens[row, k]]):
            k += 1
        from_ = (p[row, k] - q[row, k]).clamp(min=0) if k < 3 else p[row, k]
        assert (int(num_accepted[row]), int(bonus[row])) == (k, int(sampling.inverse_cdf(from_, coins[row, 3])))
    assert set(num_accepted.tolist()) == {0, 1, 2, 3}


def test_verify_agrees_with_the_speculative_sampling_of_transformers(monkeypatch):
    """The same p, q and coins through an implementation that nobody here wrote. It handles one row, and asks for its
    randomness twice: `rand_like` for the coins, then `multinomial` with the distribution of the bonus token."""
    p, q = random_distributions(300, 5, 12), random_distributions(300, 4, 12, seed=1)
    q = (q + p[:, :4]) / 2  # some rows are to be accepted whole
    generator = torch.Generator().manual_seed(0)
    coins = torch.rand(300, 5, generator=generator, dtype=torch.float64)
    tokens = sampling.inverse_cdf(q, torch.rand(300, 4, generator=generator, dtype=torch.float64))
    num_accepted, bonus = sampling.verify(p, tokens, q, coins)
    theirs = generation_utils._speculative_sampling
    not_done = {"is_done_candidate": False} if "is_done_candidate" in inspect.signature(theirs).parameters else {}
    for row in range(300):
        asked = []

        def multinomial(distribution, num_samples):
            asked.append(distribution)
            return sampling.inverse_cdf(distribution, coins[row, 4:])[:, None]

        monkeypatch.setattr(torch, "rand_like", lambda ratio: coins[row, :4].view_as(ratio))
        monkeypatch.setattr(torch, "multinomial", multinomial)
        valid, matches = theirs(tokens[row, None], q[row, None].log(), 4, p[row, None].log(), **not_done)
        monkeypatch.undo()
        k = int(num_accepted[row])
        assert int(matches) == k and valid[0].tolist() == [*tokens[row, :k].tolist(), int(bonus[row])]
        ours = sampling.residual(p[row, k], q[row, k]) if k < 4 else p[row, k]
        torch.testing.assert_close(asked[0][0], ours, rtol=0, atol=1e-12)
    assert set(num_accepted.tolist()) == {0, 1, 2, 3, 4}


def test_inverse_cdf_inverts_the_cdf_and_never_draws_what_has_probability_zero():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    coins = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2 ** -24])
    for scale in (1.0, 0.3, 7.0):  # not necessarily normalised
        assert sampling.inverse_cdf(scale * p.expand(6, -1), coins).tolist() == [1, 1, 3, 3, 4, 4]
    for dtype in (torch.float32, torch.float64):
        q = random_distributions(2000, 50).to(dtype)
        q[torch.rand(q.shape, generator=torch.Generator().manual_seed(2)) < 0.5] = 0
        for coin in (0.0, 0.5, 1 - 2 ** -24):
            assert (q.gather(-1, sampling.inverse_cdf(q, torch.full((2000,), coin))[:, None]) > 0).all()
    grid = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000  # draws every token in proportion
    p = random_distributions(1, 10)
    shares = torch.bincount(sampling.inverse_cdf(p.expand(100_000, -1), grid), minlength=10) / 100_000
    torch.testing.assert_close(shares.double(), p[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("temperature, top_k, top_p", [(1, 0, 1.0), (0.7, 0, 1.0), (1, 3, 1.0), (1, 0, 0.8),
                                                       (1.5, 20, 0.9), (0.3, 5, 0.5)])
def test_probabilities_are_those_that_generate_samples_from(temperature, top_k, top_p):
    net = network()
    logits = 3 * torch.randn(64, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = GenerationConfig(do_sample=True, temperature=float(temperature), top_k=top_k, top_p=top_p)
    theirs = net._get_logits_processor(config, input_ids_seq_length=1)(None, logits).softmax(-1)
    ours = sampling.probabilities(logits.view(4, 16, 40), sampling.logits_warpers(temperature, top_k, top_p))
    torch.testing.assert_close(ours.view(64, 40), theirs, rtol=0, atol=0)


def test_greedy_decoding_is_the_point_mass_at_the_argmax():
    logits = torch.randn(5, 3, 11)
    p = sampling.probabilities(logits, sampling.logits_warpers(0))
    assert p.sum(-1).eq(1).all() and p.argmax(-1).equal(logits.argmax(-1)) and p.max(-1).values.eq(1).all()


def test_saguaro_sampling_is_definition_14():
    q = random_distributions(100, 9)
    assert sampling.saguaro_distribution(q, 4, 1.0).equal(q)
    assert sampling.saguaro_distribution(q, 0, 0.2).equal(q)
    cached = torch.zeros_like(q, dtype=torch.bool).scatter_(-1, q.topk(4).indices, True)
    weights = torch.where(cached, 0.2 * q, q)
    torch.testing.assert_close(sampling.saguaro_distribution(q, 4, 0.2), weights / weights.sum(-1, keepdim=True))
    assert sampling.saguaro_distribution(q, 4, 0.0)[cached].eq(0).all(), "C = 0 never drafts a cached token"
    certain = sampling.point_mass(torch.tensor([3]), like=q)
    assert sampling.saguaro_distribution(certain, 2, 0.0).equal(certain), "nothing is left to draft but cached tokens"


@pytest.mark.parametrize("fan_out", (1, 3, 6))
def test_as_C_falls_the_bonus_token_of_a_rejection_moves_into_the_cache_whatever_p_is(fan_out):
    """Theorem 15."""
    p, q = random_distributions(2000, 9), random_distributions(2000, 9, seed=1)
    cached = q.topk(fan_out).indices
    in_cache = []
    for downweight in torch.linspace(1, 0, 21).tolist():
        bonus = sampling.residual(p, sampling.saguaro_distribution(q, fan_out, downweight))
        in_cache.append(bonus.gather(-1, cached).sum(-1))
    assert (torch.stack(in_cache).diff(dim=0) >= -1e-12).all()
    assert (in_cache[-1] - in_cache[0]).mean() > 0.1


def test_from_p_equal_q_the_acceptance_rate_falls_with_C():
    p = random_distributions(2000, 9)
    rates = torch.stack([torch.minimum(p, sampling.saguaro_distribution(p, 3, downweight)).sum(-1)
                         for downweight in torch.linspace(1, 0, 21).tolist()])
    assert (rates.diff(dim=0) <= 1e-12).all() and rates[0].allclose(torch.ones((), dtype=torch.float64))


# ---- 2. the speculation cache (Def. 4, section 4.1) ----

def expected_misses(fan_out, acceptance_rate: float, miss_exponent: float) -> float:
    """sum_k P(k) F_k^-r, where F = 0 counts as 2: what Theorem 12 minimises."""
    likelihood = cache.acceptance_distribution(acceptance_rate, len(fan_out) - 1)
    return sum(share * (f ** -miss_exponent if f else 2.0) for share, f in zip(likelihood, fan_out))


def test_fan_out_spends_exactly_the_budget_for_all_arguments():
    for budget, lookahead, a, r in itertools.product((0, 1, 2, 3, 7, 16, 40, 257), (0, 1, 2, 5, 8),
                                                     (0.0, 0.01, 0.5, 0.8, 0.999, 1.0), (1e-6, 0.3, 1.0, 2.0, 30.0)):
        fan_out = geometric_fan_out(budget, lookahead, a, r)
        assert len(fan_out) == lookahead + 1 and sum(fan_out) == budget and min(fan_out) >= 0, (budget, lookahead, a, r)


def test_fan_out_is_the_best_of_all_shapes():
    for budget, lookahead, a, r in itertools.product((1, 3, 6, 9), (0, 1, 2, 3), (0.2, 0.6, 0.9), (0.5, 1.0, 2.0)):
        shapes = (shape for shape in itertools.product(range(budget + 1), repeat=lookahead + 1) if sum(shape) == budget)
        best = min(expected_misses(shape, a, r) for shape in shapes)
        ours = geometric_fan_out(budget, lookahead, a, r)
        assert expected_misses(ours, a, r) <= best + 1e-12, (budget, lookahead, a, r, ours)


@pytest.mark.parametrize("a, shape", [(9 / 25, [20, 15]), (9 / 25, [100, 60, 45]), (9 / 25, [500, 300, 180, 135]),
                                      (16 / 25, [15, 20]), (16 / 25, [75, 60, 80]), (16 / 25, [375, 300, 240, 320])])
def test_fan_out_is_the_closed_form_of_theorem_12_where_that_is_integral(a, shape):
    """At r = 1 the form holds sqrt(a) and sqrt(1 - a), rational for the triangle 3, 4, 5: a = (3/5)^2 or (4/5)^2."""
    lookahead = len(shape) - 1
    closed_form = [a ** (k / 2) for k in range(lookahead)] + [a ** (lookahead / 2) * (1 - a) ** -0.5]
    assert [shape[0] * f for f in closed_form] == pytest.approx(shape)
    assert geometric_fan_out(sum(shape), lookahead, a, 1.0) == shape


def test_guesses_are_the_likeliest_bonus_tokens_without_the_drafted_one():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 20, generator=generator)
    drafted = torch.cat([logits[:, :2].argmax(-1), torch.randint(20, (6, 1), generator=generator)], 1)
    fan_out = [[4, 2, 1, 3], [10, 0, 0, 0], [0, 0, 0, 10], [1, 1, 1, 7], [2, 3, 5, 0], [3, 3, 3, 1]]
    table = torch.stack([cache.branches(shape) for shape in fan_out])
    guesses = choose_guesses(rank_guesses(logits, drafted, depth=10), table)
    for row in range(6):
        expected = []
        for k in range(4):
            ranked = logits[row, k].argsort(descending=True).tolist()
            if k < 3:  # a rejected token has p < q, so it cannot be the bonus token
                ranked.remove(int(drafted[row, k]))
            expected += [(k, token) for token in ranked[:fan_out[row][k]]]
        assert list(zip(guesses.num_accepted[row].tolist(), guesses.bonus[row].tolist())) == expected


def test_guesses_of_round_0_are_the_likeliest_first_tokens():
    logits = torch.randn(3, 1, 20)
    guesses = choose_guesses(rank_guesses(logits, torch.zeros(3, 0, dtype=torch.long), 5),
                             cache.branches([5]).expand(3, -1, -1))
    assert guesses.num_accepted.eq(0).all() and guesses.bonus.equal(logits[:, 0].topk(5).indices)


def test_look_up_hits_if_and_only_if_the_outcome_was_guessed_and_takes_what_was_prepared_for_it():
    generator = torch.Generator().manual_seed(0)
    rows, branches, lookahead, vocab = 400, 6, 3, 7
    guessed = torch.rand(rows, 4 * vocab, generator=generator).argsort()[:, :branches]  # all different
    guesses = Outcome(guessed // vocab, guessed % vocab)
    tokens = [torch.randint(vocab, (rows, branches), generator=generator) for _ in range(lookahead)]
    q = [torch.rand(rows, branches, vocab, generator=generator) for _ in range(lookahead)]
    prepared = SpeculationCache(guesses, tokens, q)
    outcome = Outcome(*(torch.randint(end, (rows,), generator=generator) for end in (4, vocab)))
    outcome.num_accepted[:20] = -1  # rows that have finished
    hit, branch = prepared.look_up(outcome)
    taken, taken_q = prepared.take(branch)
    only_hit, _ = prepared.only(branch).look_up(outcome)
    for row in range(rows):
        pairs = list(zip(guesses.num_accepted[row].tolist(), guesses.bonus[row].tolist()))
        pair = int(outcome.num_accepted[row]), int(outcome.bonus[row])
        assert bool(hit[row]) == bool(only_hit[row]) == (pair in pairs)
        if pair in pairs:
            at = pairs.index(pair)
            assert taken[row].tolist() == [int(t[row, at]) for t in tokens]
            assert taken_q[row].equal(torch.stack([d[row, at] for d in q]))
    assert 20 < hit.sum() < rows - 20
    rows_kept = torch.arange(rows) % 3 == 0
    kept_hit, kept_branch = prepared.keep(rows_kept).look_up(Outcome(*(part[rows_kept] for part in outcome)))
    assert kept_hit.equal(hit[rows_kept]) and kept_branch.equal(branch[rows_kept])


# ---- what a cache is worth (Thms. 7 and 17, Cor. 16), what is estimated on the way, the fast backup (section 4.3) ----

def simulate_rounds(rows: int, rounds: int, hit_rate: float, tokens_hit: float, tokens_miss: float, T_p: float,
                    T_b: float) -> float:
    """Tokens per row and verification time of `rows` rows in lock step, each of which hits with probability
    `hit_rate`."""
    hit = torch.rand(rounds, rows, generator=torch.Generator().manual_seed(0)) < hit_rate
    tokens = torch.where(hit, tokens_hit, tokens_miss).sum() / rows
    return float(tokens / torch.where(hit.all(1), max(1.0, T_p), 1 + T_b).sum())


def accept(rows: int, lookahead: int, rate, generator: torch.Generator) -> torch.Tensor:
    """Accepted tokens `[rows]`, each token with probability `rate` (a number or `[rows, 1]`)."""
    return (torch.rand(rows, lookahead, generator=generator) < rate).long().cumprod(1).sum(1)


def power_law_ranks(rows: int, miss_exponent: float, generator: torch.Generator) -> torch.Tensor:
    """Ranks `[rows]` of bonus tokens among the guesses, with P(rank >= F) = F^-r / 2 for F >= 1."""
    return ((2 * torch.rand(rows, generator=generator)) ** (-1 / miss_exponent)).clamp(max=1e6).floor().long()


@pytest.mark.parametrize("a", (0.0, 0.3, 0.9, 1.0))
@pytest.mark.parametrize("lookahead", (1, 4, 7))
def test_expected_tokens_are_those_of_a_simulated_round(a, lookahead):
    accepted = accept(200_000, lookahead, a, torch.Generator().manual_seed(0))
    likelihood = cache.acceptance_distribution(a, lookahead)
    shares = torch.bincount(accepted, minlength=lookahead + 1) / 200_000
    torch.testing.assert_close(shares, torch.tensor(likelihood), atol=0.005, rtol=0)
    assert cache.expected_tokens(a, lookahead) == pytest.approx(sum((k + 1) * p for k, p in enumerate(likelihood)))
    assert a == 1 or cache.expected_tokens(a, lookahead) == pytest.approx((1 - a ** (lookahead + 1)) / (1 - a))


@pytest.mark.parametrize("rows", (1, 4))
@pytest.mark.parametrize("T_p", (0.8, 1.6))
def test_throughput_is_that_of_simulated_rows_in_lock_step(rows, T_p):
    case = dict(hit_rate=0.8, tokens_hit=4.0, tokens_miss=2.5, T_p=T_p, T_b=0.5)
    assert cache.throughput(**case, batch_size=rows) == pytest.approx(simulate_rounds(rows, 100_000, **case), rel=0.01)


def test_theorem_7_at_its_corners():
    assert cache.throughput(1, 4, 1, 0.9, 0.5) == 4  # all cached, drafting hidden: E_hit tokens per verification
    assert cache.throughput(0, 4, 3, 0.9, 0.5) == pytest.approx(2)  # nothing cached: SD, 3 / (1 + 0.5)


def test_the_backups_change_places_at_the_critical_batch_size():
    times = dict(T_p=0.9, T_neural=0.6, T_fast=0.0)
    b = cache.critical_batch_size(0.85, 4.0, 3.8, 1.2, **times)

    def gain(batch_size: float) -> float:
        return (cache.throughput(0.85, 4.0, 3.8, 0.9, 0.6, batch_size)
                - cache.throughput(0.85, 4.0, 1.2, 0.9, 0.0, batch_size))

    assert 1 < b < 20 and abs(gain(b)) < 1e-12 and gain(b / 2) > 0 > gain(b * 2)


def test_the_critical_batch_size_is_right_for_all_arguments():
    for p, neural, fast, T_p, T_neural, T_fast, batch_size in itertools.product(
            (0.0, 0.3, 0.9, 1.0), (2.0, 3.0), (1.0, 2.0), (0.5, 1.5), (0.2, 2.0), (0.0, 0.2), (1, 2, 8, 64)):
        b = cache.critical_batch_size(p, 4.0, neural, fast, T_p, T_neural, T_fast)
        gain = (cache.throughput(p, 4.0, neural, T_p, T_neural, batch_size)
                - cache.throughput(p, 4.0, fast, T_p, T_fast, batch_size))
        assert abs(gain) < 1e-12 or abs(batch_size - b) < 1e-9 or (gain > 0) == (batch_size < b)


def test_power_law_hit_rate_is_the_share_of_simulated_outcomes_in_the_cache():
    generator, fan_out = torch.Generator().manual_seed(0), [6, 4, 0, 3]
    hits = power_law_ranks(400_000, 0.8, generator) < torch.tensor(fan_out)[accept(400_000, 3, 0.7, generator)]
    assert cache.power_law_hit_rate(fan_out, 0.7, 0.8) == pytest.approx(hits.double().mean().item(), abs=0.005)


def test_the_fitted_exponent_is_that_of_the_power_law():
    for r in (0.2, 1.0, 2.5):
        assert cache.fit_power_law([0.4 * fan_out ** -r for fan_out in range(1, 17)]) == pytest.approx(r)
    assert cache.fit_power_law([0.0] * 8) == 1.0


def test_auto_fan_out_learns_the_acceptance_rates_and_the_exponent():
    generator, rows = torch.Generator().manual_seed(0), 20_000
    fan_out, hit = FanOut("auto", 16, 5, 0.5, 0.5, 1.0), torch.arange(rows) % 2 == 0
    accepted = accept(rows, 5, torch.where(hit, 0.9, 0.2)[:, None], generator)
    fan_out.observe(hit, accepted, power_law_ranks(rows, 0.6, generator))
    assert fan_out.acceptance_rate(True) == pytest.approx(0.9, abs=0.01)
    assert fan_out.acceptance_rate(False) == pytest.approx(0.2, abs=0.01)
    assert fan_out.miss_exponent == pytest.approx(0.6, abs=0.05)
    assert fan_out.shapes == {source: geometric_fan_out(16, 5, fan_out.acceptance_rate(source), fan_out.miss_exponent)
                              for source in (True, False)}
    assert fan_out.shapes[True][5] > fan_out.shapes[False][5] and fan_out.shapes[False][0] > fan_out.shapes[True][0]
    mixed = fan_out.table(torch.tensor([True, False]))
    assert mixed.equal(torch.stack([cache.branches(fan_out.shapes[True]), cache.branches(fan_out.shapes[False])]))


@pytest.mark.parametrize("policy", ("geometric", "uniform"))
def test_a_given_fan_out_does_not_learn(policy):
    fan_out, zeros = FanOut(policy, 16, 5, 0.8, 0.2, 1.0), torch.zeros(500, dtype=torch.long)
    before = fan_out.shapes
    fan_out.observe(zeros.bool(), zeros, zeros)
    assert fan_out.shapes == before and all(sum(shape) == 16 for shape in before.values())
    assert cache.uniform_fan_out(16, 5) == [3, 3, 3, 3, 2, 2]


def test_auto_downweight_finds_the_best_constant_and_tries_none_that_is_much_worse():
    """Two made-up pairs: lowering C costs few accepted tokens and gains many hits, or only costs."""
    for pays, best in ((True, 0.1), (False, 1.0)):
        generator, choice, history = torch.Generator().manual_seed(0), Downweight(None, T_p=1.0, T_b=1.0), []
        for _ in range(600):
            C = choice.verified
            choice.observe(accept(1, 4, 0.75 + 0.05 * C if pays else 0.3 + 0.5 * C, generator),
                           torch.rand(1, generator=generator) < (1 - 0.7 * C if pays else 0.5))
            history.append(choice.value)
        assert set(history) == (set(Downweight.GRID) if pays else {1.0, 0.7}) and history[300:].count(best) > 250


@pytest.mark.parametrize("rows, expected", ((1, "neural"), (32, "fast")))
def test_auto_backup_is_neural_in_small_batches_and_fast_in_large_ones(rows, expected):
    generator, kinds = torch.Generator().manual_seed(0), []
    backup = Backup("auto", 5, 0.8, T_p=0.9, T_neural=0.6, T_fast=0.0)
    for _ in range(200):
        hit, verified_hit = torch.rand(2, rows, generator=generator) < 0.85
        good = verified_hit if backup.verified == "fast" else torch.ones_like(hit)
        num_accepted = accept(rows, 5, torch.where(good, 0.8, 0.1)[:, None], generator)
        looked_up = accept(rows, 5, 0.1, generator).minimum(num_accepted + 1)
        backup.observe(verified_hit, num_accepted, hit, looked_up)
        kinds.append(backup.kind)
    assert kinds[100:].count(expected) > 95
    assert 1 < backup.critical_batch_size < 32


@pytest.mark.parametrize("temperature", (0, 0.7))
def test_auto_backup_judges_a_look_up_by_the_text_as_verification_does(temperature):
    """Whoever drafted the text; here the look-up did, so that both judgements are at hand."""
    net, warpers = network(vocab_size=6, max_position_embeddings=256), sampling.logits_warpers(temperature)
    worker, judged = ahead(draft_worker(imitation(net, 0.3), warpers, budget=4, backup="fast")), []
    worker.backup.auto, worker.backup.observe = True, lambda *observed: judged.append(observed)
    run_rounds(TargetWorker(CausalLM(net), warpers, 0), worker, [[1, 2, 3], [4], [5, 0], [1, 1]], 24, 3)
    for verified_hit, num_accepted, _, agreed in judged:
        assert agreed.equal(num_accepted.where(~verified_hit, 0))
    assert set(torch.cat([agreed for *_, agreed in judged]).tolist()) == {0, 1, 2, 3}
    worker.text, worker.length = torch.tensor([[1, 2, 3, 4, 1, 2, 0, 4]]), torch.tensor([8])
    assert worker.agreement(0, 3) == 1  # after 1 2 3 4 1 the look-up says 2 3 4


def test_look_up_continues_the_longest_and_then_most_recent_match():
    def plainly(text: list[int], count: int) -> list[int] | None:
        for length in range(len(text) - 1, 0, -1):
            for end in range(len(text) - 1, length - 1, -1):
                if text[end - length:end] == text[-length:]:
                    longer = text[:]
                    for i in range(count):
                        longer.append(longer[end + i])
                    return longer[len(text):]
        return None

    generator, found_none = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        text = torch.randint(0, 4, (int(torch.randint(1, 30, (1,), generator=generator)),), generator=generator)
        expected, proposed = plainly(text.tolist(), 6), continue_by_look_up(text, 6, 50).tolist()
        found_none += expected is None
        assert proposed == expected if expected else len(set(proposed)) == 6 and int(text[-1]) not in proposed
    assert found_none > 5


def test_the_best_lookahead_is_the_fastest_that_hides_drafting():
    costs = cache.Costs(target={1: 1.0, 9: 1.4}, draft={1: 0.08, 33: 0.4})

    def speed(lookahead: int, budget: int) -> float:
        tokens = cache.expected_tokens(0.8, lookahead)
        hit_rate = cache.power_law_hit_rate(geometric_fan_out(budget, lookahead, 0.8, 1.0), 0.8, 1.0)
        T_p, T_b = costs.T_p(lookahead, budget), costs.T_b(lookahead)
        return cache.throughput(hit_rate, tokens, tokens, T_p, T_b) / costs.verify(lookahead)

    best = cache.best_lookahead(costs, range(1, 9), (4, 8, 16, 32), 0.8, 1.0, 1)
    fitting = [choice for choice in itertools.product(range(1, 9), (4, 8, 16, 32)) if costs.T_p(*choice) <= 1]
    assert best == max(fitting, key=lambda choice: speed(*choice)) and 0 < len(fitting) < 32
    too_dear = cache.Costs(target={1: 1.0, 9: 1.0}, draft={1: 2.0, 33: 3.0})
    assert cache.best_lookahead(too_dear, range(1, 9), (4, 8), 0.8, 1.0, 1) == (1, 4)
    stepwise = cache.Costs({1: 1.0, 3: 2.0, 5: 6.0}, {})
    assert [stepwise.seconds(stepwise.target, n) for n in (1, 2, 3, 4, 5, 6)] == [1, 1.5, 2, 4, 6, 8]


# ---- 3. the machine room: KV slots, tree attention, stopping, statistics ----

RAGGED = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]]


def assert_kv_is_fresh(lm: CausalLM, texts: list[list[int]], lengths: list[int]) -> None:
    """The first `lengths[row]` slots of every row hold what a plain pass over its text computes."""
    for row, (text, length) in enumerate(zip(texts, lengths)):
        with torch.inference_mode():
            fresh = lm.network(torch.tensor([text[:length]])).past_key_values
        for layer in range(lm.network.config.num_hidden_layers):
            for slots, plain in ((lm.kv.keys, fresh.layers[layer].keys), (lm.kv.values, fresh.layers[layer].values)):
                torch.testing.assert_close(slots[layer][row, :, :length], plain[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prompts", (pytest.param([RAGGED[0]], id="one row", marks=slow),
                                     pytest.param(RAGGED, id="ragged batch")))
@pytest.mark.parametrize("mode", ("sd", "ssd", "ssd, early outcome", "ssd, fast backup"))
@pytest.mark.parametrize("temperature", (0, 0.7))
def test_after_twenty_rounds_of_hits_and_misses_all_KV_equals_a_fresh_prefill(prompts, mode, temperature):
    net = network(num_hidden_layers=2, max_position_embeddings=128)
    warpers = sampling.logits_warpers(temperature)
    target = TargetWorker(CausalLM(net), warpers, 0)
    worker = draft_worker(imitation(net, 0.15), warpers, backup="fast" if "fast" in mode else "neural")
    speculator = worker if mode == "sd" else ahead(worker, "early" in mode)
    record = run_rounds(target, speculator, prompts, 20, 3)
    texts, counts = written(record)
    texts = [prompt + text[:count].tolist() for prompt, text, count in zip(prompts, texts, counts)]
    assert target.length.tolist() == list(map(len, texts))
    assert_kv_is_fresh(target.model, texts, [len(text) - 1 for text in texts])  # the last token comes next
    speculator.speculate(record[-1][1])
    if mode != "sd":
        worker.pre_speculate()
        hits = torch.cat([speculation.hit for speculation, _ in record[1:]])
        assert hits.any() and not hits.all()
    assert worker.length.tolist() == list(map(len, texts))
    assert_kv_is_fresh(worker.model, texts, list(map(len, texts)))


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: remembers the operations of a pass and the very tensors that they took and gave, and
    can do them again on these."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if OnGPU in types:
            return NotImplemented  # what it does in host memory comes by again
        given = operation(*arguments, **options or {})
        self.operations.append((operation, arguments, options or {}, given))
        return given

    def replay(self):
        for operation, arguments, options, given in self.operations:
            for old, new in zip(tree_leaves(given), tree_leaves(operation(*arguments, **options))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # else: a view, or in place
                    old.copy_(new)


STREAM = SimpleNamespace(wait_stream=lambda other: None)
GRAPHS = {"CUDAGraph": Tape, "graph": lambda tape, **_: tape, "Stream": lambda: STREAM,
          "current_stream": lambda: STREAM, "stream": lambda _: nullcontext()}


@pytest.fixture
def tapes(monkeypatch):
    """All graphs recorded so far. With these stand-ins the code for GPUs runs on a CPU."""
    recorded = []
    for name, stand_in in (GRAPHS | {"graph": lambda tape, **_: recorded.append(tape) or tape}).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(model, "BUCKET", 16)
    return recorded


@pytest.mark.parametrize("mode", ("ar", "ssd"))
def test_recorded_passes_write_the_same_text(mode, tapes, monkeypatch):
    """In batches whose rows leave one by one: recordings for other rows or other buffers would be wrong. And in the
    same buffers for longer texts than those that were recorded."""
    net, passes = network(), []
    replay = model.Recording.replay
    monkeypatch.setattr(model.Recording, "replay", lambda *arguments: passes.append(1) or replay(*arguments))
    speculator, lookahead = speculator_for(mode, imitation(net, 0.15))
    target = TargetWorker(CausalLM(net), None, 0)
    target.model.records = True
    if lookahead:
        speculator.model.records = True
    longer = [([[7] * 30], 2), (RAGGED[:1], 18), (RAGGED[2:3], 18)]
    again = [(prompts, 18) for prompts in (RAGGED[1:], RAGGED[:2], *[RAGGED[:1]] * 4)]
    for prompts, count in longer + again:
        recorded = len(tapes)
        generations = decode(target, speculator, prompts, count, lookahead, [], Stats())
        assert [g.tokens for g in generations] == [greedy_reference(net, prompt, count) for prompt in prompts]
    assert len(tapes) == recorded, "the last batch was decoded before: nothing is new"
    assert len(tapes) > 4 and len(passes) > 3 * len(tapes) and target.model.records


def test_what_cannot_be_recorded_runs_eagerly(tapes, monkeypatch, capsys):
    def refuse(self):
        raise RuntimeError("operation not permitted")

    net = network()
    monkeypatch.setattr(Tape, "replay", refuse)
    target = TargetWorker(CausalLM(net), None, 0)
    target.model.records = True
    generations = decode(target, NoSpeculator(), [[1, 2]], 10, 0, [], Stats())
    assert generations[0].tokens == greedy_reference(net, [1, 2], 10) and not target.model.records
    assert "run eagerly: operation not permitted" in capsys.readouterr().err


def test_when_rows_leave_the_batch_the_draft_keeps_the_texts_and_the_KV_of_the_others():
    net = network(num_hidden_layers=2, max_position_embeddings=128)
    worker, texts = ahead(draft_worker(imitation(net, 0.15))), [list(prompt) for prompt in RAGGED]
    answer, rows, batches = worker.speculate, list(range(len(RAGGED))), []

    def speculate(outcome):
        speculation = answer(outcome)
        rows[:] = [row for row, k in zip(rows, outcome.num_accepted) if k >= 0]
        going_on = [texts[row] for row in rows]
        assert [text[:length] for text, length in zip(worker.text.tolist(), worker.length)] == going_on
        assert_kv_is_fresh(worker.model, going_on, [max(1, len(text) - 4) for text in going_on])  # K + 1 = 4
        batches.append(list(rows))
        return speculation

    worker.speculate = speculate
    decode(TargetWorker(CausalLM(net), None, 0), worker, RAGGED, 40, 3, [], Stats(),
           on_tokens=lambda row, new: texts[row].extend(new))
    left_over = [after for before, after in zip(batches, batches[1:]) if after != before[:len(after)]]
    assert len(left_over) > 1, "rows must leave one after the other, and not always the last"


@pytest.mark.parametrize("family", ("llama", "gpt2", "gpt_neox"))
def test_every_branch_of_the_tree_sees_what_a_plain_forward_over_its_own_tokens_sees(family):
    """q of every branch and step = softmax of plain logits after: text, s_1..s_k, t*, the branch's own tokens."""
    warpers = sampling.logits_warpers(1)
    net = network(family, num_hidden_layers=2, max_position_embeddings=128)
    target, worker = TargetWorker(CausalLM(net), warpers, 0), ahead(draft_worker(imitation(net, 0.2), warpers))
    record = run_rounds(target, worker, RAGGED, 5, 3)
    tokens = worker.speculate(record[-1][1]).tokens
    worker.pre_speculate()
    grown = torch.stack(worker.cache.tokens, -1)  # [B, budget, K]
    k_seen = set()
    for row, branch in itertools.product(range(len(RAGGED)), range(7)):
        k, bonus = (int(part[row, branch]) for part in worker.cache.guesses)
        text = worker.text[row, :worker.length[row]].tolist()
        text += [*tokens[row, :k].tolist(), bonus, *grown[row, branch].tolist()]
        with torch.inference_mode():
            plain = worker.model.network(torch.tensor([text])).logits[0, -4:-1].softmax(-1)
        torch.testing.assert_close(torch.stack([d[row, branch] for d in worker.cache.q]), plain, rtol=1e-9, atol=1e-12)
        k_seen.add(k)
    assert k_seen == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature, prompts, choices", [
    (1, RAGGED, dict(downweight=0.5)), (0, RAGGED, {}),
    pytest.param(1, RAGGED[:1], {}, marks=slow), pytest.param(0, RAGGED[:1], {}, marks=slow),
    pytest.param(1, RAGGED, dict(downweight=None, shape="auto", backup="auto"), marks=slow),
    pytest.param(0, RAGGED, dict(shape="auto", backup="fast"), marks=slow)])
def test_the_early_outcome_changes_neither_text_nor_hits(temperature, prompts, choices):
    net = network()
    warpers = sampling.logits_warpers(temperature)

    def run(peeks: int | None):
        """The outcome arrives after `peeks` tree steps."""
        worker = draft_worker(imitation(net, 0.15), warpers, **choices)
        answer = worker.speculate

        def speculate(outcome):
            waiting = itertools.count()
            worker.pre_speculate(lambda: outcome if peeks is not None and next(waiting) >= peeks else None)
            return answer(outcome)

        worker.speculate = speculate
        record = run_rounds(TargetWorker(CausalLM(net), warpers, 0), worker, prompts, 8, 3)
        hits = torch.cat([speculation.hit for speculation, _ in record[1:]])
        assert hits.any() and not hits.all()
        return [part.tolist() for s, o in record for part in (s.tokens, s.hit, o.num_accepted, o.bonus)]

    plain = run(None)
    assert all(run(peeks) == plain for peeks in range(4))


def test_what_is_reported_as_q_is_what_the_token_was_drawn_from():
    """Token = inverse CDF of the reported q at the token's coin, for cached and backup speculations, bit by bit."""
    net, warpers = network(), sampling.logits_warpers(0.8, top_k=12)
    worker = ahead(draft_worker(imitation(net, 0.3), warpers, downweight=0.4))
    coins, toss = [], worker.coins

    def remember(*shape):
        coins.append(toss(*shape))
        return coins[-1]

    worker.coins = remember
    prepared, grow = [], worker.grow
    worker.grow = lambda tree: (grow(tree), prepared.append(worker.cache))[0]
    record = run_rounds(TargetWorker(CausalLM(net), warpers, 0), worker, RAGGED, 15, 3)
    trees = [toss for toss in coins if toss.dim() == 3]
    assert len(trees) == len(prepared) // 3 == 15
    for branch_coins, cache_ in zip(trees, prepared[::3]):
        for step in range(3):
            assert cache_.tokens[step].equal(sampling.inverse_cdf(cache_.q[step], branch_coins[..., step]))
    backups, misses = [toss for toss in coins if toss.dim() == 2], 0
    for speculation, _ in record[1:]:
        missed = ~speculation.hit
        if missed.any():
            assert speculation.tokens[missed].equal(sampling.inverse_cdf(speculation.q[missed], backups[misses]))
            misses += 1
    assert misses == len(backups) > 0


ARCHITECTURES = {
    "llama": {}, "olmo2": {}, "gpt_bigcode": {}, "gptj": {"rotary_dim": 4}, "phi3": {"pad_token_id": 0},
    "opt": {"init_std": 0.3, "ffn_dim": 48, "word_embed_proj_dim": 32}, "gemma2": {"head_dim": 8, "sliding_window": 64},
    "bloom": {}, "mamba": {}, "rwkv": {},
    "gpt_neo": {"attention_types": ((("global", "local"), 1),), "window_size": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8}, "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_an_architecture_is_decoded_right_or_refused_never_decoded_wrongly(family):
    net = network(family, num_hidden_layers=2, **ARCHITECTURES[family])
    if family in ("bloom", "mamba"):
        net = copy.deepcopy(net)
        del net.config.max_position_embeddings  # these have no such thing; only our helper gave it to them
    try:
        generations = decode(TargetWorker(CausalLM(net), None, 0), NoSpeculator(), RAGGED, 30, 0, [], Stats())
    except UserError as refusal:
        assert family not in ("llama", "opt", "olmo2", "gptj", "phi3") and family in str(refusal)
    else:
        assert [g.tokens for g in generations] == [greedy_reference(net, prompt, 30) for prompt in RAGGED]


def test_a_window_no_shorter_than_the_run_is_no_obstacle():
    net = network("mistral", sliding_window=40)
    generations = decode(TargetWorker(CausalLM(net), None, 0), NoSpeculator(), RAGGED, 30, 0, [], Stats())
    assert [g.tokens for g in generations] == [greedy_reference(net, prompt, 30) for prompt in RAGGED]


def test_the_greedy_text_of_a_row_does_not_depend_on_its_neighbours():
    net = network()
    prompts = [[row + 1] * (row % 3 + 1) + [2 * row] for row in range(6)]

    def run(batch):
        speculator = ahead(draft_worker(imitation(net, 0.3)))
        return [g.tokens for g in decode(TargetWorker(CausalLM(net), None, 0), speculator, batch, 30, 3, [7], Stats())]

    together = run(prompts)
    assert together == [run([prompt])[0] for prompt in prompts]
    assert len(set(map(len, together))) > 1, "some rows must leave the batch early"


@pytest.mark.parametrize("seed", range(20))
def test_lengths_endings_and_statistics_add_up_for_random_settings(seed):
    choose = random.Random(seed)
    lookahead, budget, rows = choose.randint(1, 8), choose.randint(1, 40), choose.randint(1, 9)
    temperature, downweight = choose.choice((0, 0.7, 1, 2)), choose.choice((0.0, 0.3, 1.0))
    max_new_tokens, early = choose.choice((1, 2, 5, 24)), choose.random() < 0.5
    prompts = [[choose.randrange(40) for _ in range(choose.choice((1, 2, 7, 40, 60)))] for _ in range(rows)]
    eos = [choose.randrange(40), choose.randrange(40)]
    net, warpers = network(seed=seed), sampling.logits_warpers(temperature)
    worker = ahead(draft_worker(imitation(net, 0.2), warpers, lookahead=lookahead, budget=budget, downweight=downweight,
                                shape=choose.choice(("geometric", "uniform", "auto")),
                                backup=choose.choice(("neural", "fast", "auto"))), early)
    speculations, stats, heard = recorded(worker), Stats(), {row: [] for row in range(rows)}
    generations = decode(TargetWorker(CausalLM(net), warpers, seed), worker, prompts, max_new_tokens, lookahead, eos,
                         stats, on_tokens=lambda row, new: heard[row].extend(new))
    for row, (prompt, g) in enumerate(zip(prompts, generations)):
        room = min(max_new_tokens, 64 - len(prompt))
        assert 1 <= len(g.tokens) <= room and g.tokens == heard[row]
        assert not any(token in eos for token in g.tokens[:-1]), "nothing follows an end-of-sequence token"
        if g.tokens[-1] in eos:
            assert g.finish_reason == "eos"
        else:
            assert len(g.tokens) == room and g.finish_reason == ("length" if room == max_new_tokens else "context")
    summary = stats.summary(lookahead)
    speculations.pop()  # the empty one that tells the draft to stop
    assert stats.tokens == sum(len(g.tokens) for g in generations) and stats.prefill_tokens == rows
    assert stats.rounds == len(speculations) and stats.row_rounds == sum(len(s.hit) for s in speculations)
    assert stats.hits == sum(int(s.hit.sum()) for s in speculations)
    assert stats.tokens - rows <= stats.accepted + stats.row_rounds, "k + 1 tokens a round, less what follows an ending"
    assert stats.accepted + stats.rejected <= lookahead * stats.row_rounds and stats.rejected <= stats.row_rounds
    if stats.rounds:
        assert summary["hit_rate"] == stats.hits / stats.row_rounds
        assert 0 <= summary["acceptance_rate"] <= 1 and summary["tokens_per_round"] <= lookahead + 1
        after_hits, after_misses = (summary["hit_rate"] * (summary["E_hit"] or 0),
                                    (1 - summary["hit_rate"]) * (summary["E_miss"] or 0))
        assert after_hits + after_misses == pytest.approx(summary["tokens_per_round"])
    if temperature == 0:
        reference = [greedy_reference(net, prompt, min(max_new_tokens, 64 - len(prompt)), eos) for prompt in prompts]
        assert [g.tokens for g in generations] == reference


# ---- 4. greedy decoding: token for token what `generate` writes ----

FAMILIES = {
    "Llama": ("llama", {}),
    "Llama, grouped heads": ("llama", {"num_key_value_heads": 2}),
    "Llama, tied": ("llama", {"tie_word_embeddings": True}),
    "Qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "Qwen3, tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "Mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 2}),
    "GPT-2": ("gpt2", {}),
    "GPT-NeoX": ("gpt_neox", {}),
}
MODES = ("ar", "sd", "ssd", "ssd, early outcome")


def speculator_for(mode: str, draft, lookahead: int = 3, **settings):
    if mode == "ar":
        return NoSpeculator(), 0
    worker = draft_worker(draft, lookahead=lookahead, **settings)
    return worker if mode == "sd" else ahead(worker, "early" in mode), lookahead


def greedy_texts(net, draft, mode: str, prompts, max_new_tokens: int, eos=(), **settings):
    """Generations, and the (speculation, num_accepted) of all rounds."""
    speculator, lookahead = speculator_for(mode, draft, **settings)
    target, rounds = TargetWorker(CausalLM(net), None, 0), []
    verify = target.verify

    def remember(speculation):
        outcome = verify(speculation)
        rounds.append((speculation, outcome))
        return outcome

    target.verify = remember
    return decode(target, speculator, prompts, max_new_tokens, lookahead, list(eos), Stats()), rounds[1:]


def assert_all_kinds_of_rounds(rounds, lookahead: int = 3, hits: bool = True) -> None:
    """The test has seen hits, misses, full, partial and no acceptance: it is not green for want of trying."""
    accepted = torch.cat([outcome.num_accepted for _, outcome in rounds])
    assert accepted.eq(0).any() and accepted.eq(lookahead).any() and ((0 < accepted) & (accepted < lookahead)).any()
    hit = torch.cat([speculation.hit for speculation, _ in rounds])
    assert (hit.any() if hits else True) and not hit.all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_is_that_of_generate(family, mode):
    name, changes = FAMILIES[family]
    net = network(name, num_hidden_layers=2, **changes)
    generations, rounds = greedy_texts(net, imitation(net, 0.1), mode, RAGGED, 24)
    assert [g.tokens for g in generations] == [greedy_reference(net, prompt, 24) for prompt in RAGGED]
    if mode != "ar":
        assert_all_kinds_of_rounds(rounds, hits=mode != "sd")


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("draft_vocabulary", (33, 40, 48))
def test_vocabularies_padded_differently_make_no_difference(mode, draft_vocabulary):
    """40 tokens, of which the prompts use 20; the draft's embedding has 33, as many, or 48 rows."""
    net = network()
    draft = imitation(net, 0.1)
    draft.resize_token_embeddings(draft_vocabulary, mean_resizing=False)
    generations, rounds = greedy_texts(net, draft, mode, RAGGED, 40, vocab_size=40)
    assert [g.tokens for g in generations] == [greedy_reference(net, prompt, 40) for prompt in RAGGED]
    assert all((speculation.tokens < 40).all() for speculation, _ in rounds)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_draft_of_another_architecture_and_a_shorter_context_does_no_harm(mode):
    net = network()
    generations, _ = greedy_texts(net, network("gpt2", seed=5, max_position_embeddings=24), mode, RAGGED, 50)
    assert [g.tokens for g in generations] == [greedy_reference(net, prompt, 50) for prompt in RAGGED]


@pytest.mark.parametrize("mode", MODES)
def test_an_end_of_sequence_token_ends_the_text_wherever_in_a_round_it_falls(mode):
    net = network()
    draft = imitation(net, 0.1)
    plain, rounds = greedy_texts(net, draft, mode, RAGGED, 24)
    first = {g.tokens[0] for g in plain}
    bonus = {int(token) for _, outcome in rounds for token in outcome.bonus} - first
    accepted = {int(token) for s, o in rounds for row, k in enumerate(o.num_accepted) for token in s.tokens[row, :k]}
    accepted -= bonus | first
    assert first and bonus and (accepted or mode == "ar")
    for eos in [min(first)], [min(bonus)], [min(accepted or bonus)], [39, max(accepted or bonus), 0]:
        generations, _ = greedy_texts(net, draft, mode, RAGGED, 24, eos)
        assert [g.tokens for g in generations] == [greedy_reference(net, prompt, 24, eos) for prompt in RAGGED]
        assert all(g.finish_reason == ("eos" if g.tokens[-1] in eos else "length") for g in generations)
        assert any(g.finish_reason == "eos" for g in generations)


@pytest.mark.parametrize("mode", MODES)
def test_max_new_tokens_cuts_anywhere_in_a_round(mode):
    net = network()
    draft = imitation(net, 0.1)
    reference = [greedy_reference(net, prompt, 12) for prompt in RAGGED]
    for count in range(1, 13):
        generations, _ = greedy_texts(net, draft, mode, RAGGED, count)
        assert [g.tokens for g in generations] == [text[:count] for text in reference]
        assert {g.finish_reason for g in generations} == {"length"}


@pytest.mark.parametrize("mode", MODES)
def test_the_context_limit_ends_a_text_cleanly(mode):
    net = network(max_position_embeddings=24)
    prompts = [[1, 2, 3], list(range(1, 24)), [5] * 20, list(range(10))]
    generations, _ = greedy_texts(net, imitation(net, 0.1), mode, prompts, 50)
    assert [g.tokens for g in generations] == [greedy_reference(net, prompt, 24 - len(prompt)) for prompt in prompts]
    assert {g.finish_reason for g in generations} == {"context"}


@lru_cache
def embedded_pair():
    """The trained pair in float32, its end-of-sequence ids, and four of its prompts, cut to ragged lengths."""
    networks = []
    for path in (saguaro.TINY / "target", saguaro.TINY / "draft"):
        networks.append(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    tokenizer = saguaro.open_model("--target", str(saguaro.TINY / "target"))[1]
    texts = list(saguaro.read_json_lines(saguaro.TINY / "prompts.jsonl"))[:4]
    return *networks, [ids[-40 - 20 * row:] for row, ids in enumerate(tokenizer(texts)["input_ids"])]


@lru_cache
def embedded_reference() -> list[list[int]]:
    target, _, prompts = embedded_pair()
    return [greedy_reference(target, prompt, 24) for prompt in prompts]


@slow
@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_of_the_embedded_pair_is_that_of_generate(mode):
    target, draft, prompts = embedded_pair()
    generations, _ = greedy_texts(target, draft, mode, prompts, 24, CausalLM(target).eos_tokens, lookahead=5, budget=16)
    assert [g.tokens for g in generations] == embedded_reference()


# ---- 5. sampled text: frequencies against the target's exact probabilities ----

VOCAB, K, PROMPT, SAMPLES = 6, 2, [1, 2], 120_000
EXACT = dict(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
             intermediate_size=8, max_position_embeddings=32, initializer_range=0.7)


def goodness_of_fit(observed: torch.Tensor, probability: torch.Tensor) -> float:
    """p-value of Pearson's chi-square test for counts `[cells, bins]`, every cell with a distribution of its own.
    Bins with an expected count below 5 are pooled, cell by cell; an impossible observation has p-value 0."""
    if observed[probability == 0].any():
        return 0.0
    expected, order = (observed.sum(1, keepdim=True) * probability).sort(1)
    rare = (expected < 5) | (expected.cumsum(1) - expected < 5)  # as many of the smallest as make up an expected 5
    observed, expected = (torch.cat([counts.where(~rare, 0), counts.where(rare, 0).sum(1, keepdim=True)], 1).double()
                          for counts in (observed.gather(1, order), expected))
    used = expected > 0
    freedom = used.sum() - used.any(1).sum()
    chi_square = ((observed - expected).square() / expected)[used].sum()
    return float(torch.special.gammaincc(freedom / 2, chi_square / 2)) if freedom else 1.0


def code(tokens: torch.Tensor) -> torch.Tensor:
    """Texts `[N, n]` as numbers `[N]`: the digits of base VOCAB, in the order of `itertools.product`."""
    return (tokens * VOCAB ** torch.arange(tokens.shape[1]).flip(0)).sum(1)


def count(cells: torch.Tensor, bins: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return torch.bincount(cells * shape[1] + bins, minlength=shape[0] * shape[1]).view(shape)


@lru_cache
def exact_pair():
    target = network(seed=2, **EXACT)
    return target, imitation(target, 0.3)


def following(net, n: int, warpers) -> torch.Tensor:
    """The next-token distributions `[VOCAB^n, VOCAB]` after the prompt and every text of n tokens, by plain
    passes."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=n)), dtype=torch.long).view(VOCAB ** n, n)
    with torch.inference_mode():
        logits = net(torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1), use_cache=False).logits[:, -1]
    return sampling.probabilities(logits, warpers)


def joint(net, n: int, warpers) -> torch.Tensor:
    """The probability `[VOCAB^n]` of every text of n tokens."""
    probability = torch.ones(1, dtype=torch.float64)
    for length in range(n):
        probability = (probability[:, None] * following(net, length, warpers)).flatten()
    return probability


@lru_cache(maxsize=None)
def simulate(temperature=1.0, top_k=0, top_p=1.0, downweight=1.0, samples=SAMPLES, seed=0, chunk=20_000):
    """Two rounds of SSD after round 0, in many rows with the same prompt: [(speculation, outcome)], q left out."""
    warpers = sampling.logits_warpers(temperature, top_k, top_p)
    target_net, draft_net = exact_pair()
    target = TargetWorker(CausalLM(target_net), warpers, 2 * seed)
    worker = ahead(draft_worker(draft_net, warpers, 2 * seed + 1, lookahead=K, budget=4, downweight=downweight))
    chunks = [run_rounds(target, worker, [PROMPT] * min(chunk, samples), 2, K) for _ in range(-(-samples // chunk))]
    return [(Speculation(torch.cat([s.tokens for s, _ in parts]), None, torch.cat([s.hit for s, _ in parts])),
             Outcome(*map(torch.cat, zip(*(o for _, o in parts))))) for parts in zip(*chunks)]


def warpers_of(temperature=1.0, top_k=0, top_p=1.0, **_):
    return sampling.logits_warpers(temperature, top_k, top_p)


def exact_joint(**setting) -> torch.Tensor:
    """`[1, VOCAB^3]`: the target's probability of every text of three tokens."""
    return joint(exact_pair()[0], 3, warpers_of(**setting))[None]


def joint_p_value(record, **setting) -> float:
    """The central statistic: the first three tokens against the target's exact joint distribution."""
    texts, _ = written(record)
    return goodness_of_fit(torch.bincount(code(texts[:, :3]), minlength=VOCAB ** 3)[None], exact_joint(**setting))


def setting(temperature, top_k, top_p, downweight, marks=slow):
    return pytest.param(dict(temperature=temperature, top_k=top_k, top_p=top_p, downweight=downweight),
                        id=f"T={temperature} k={top_k} p={top_p} C={downweight}", marks=marks)


SETTINGS = [setting(1.4, 4, 1.0, 0.5, marks=()),  # this one also in the edit loop
            setting(0.7, 0, 1.0, 0.0)]


def upper_tail(freedom: float, alpha: float) -> float:
    """The value that chi-square exceeds with probability alpha, by bisection."""
    low, high = 0.0, 100.0 * freedom + 1000
    for _ in range(100):
        middle = (low + high) / 2
        tail = torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(middle / 2).double())
        low, high = (middle, high) if tail > alpha else (low, middle)
    return low


def test_the_sample_is_large_enough_to_see_two_percent():
    """The chi-square of N samples from a distribution at total variation d is noncentral, with a noncentrality of at
    least 4 N d^2: a Poisson mixture of chi-squares with more degrees of freedom."""
    freedom, half = float((exact_joint() * SAMPLES >= 5).sum()), torch.tensor(4 * SAMPLES * 0.02 ** 2 / 2).double()
    threshold, j = torch.tensor(upper_tail(freedom, ALPHA)).double(), torch.arange(2000).double()
    poisson = (j * half.log() - half - torch.lgamma(j + 1)).exp()
    power = (poisson * torch.special.gammaincc(freedom / 2 + j, threshold / 2)).sum()
    assert power > 0.999, f"{float(power):.5f} with {freedom:.0f} bins"


def test_the_statistic_accepts_the_truth_and_rejects_a_distribution_at_two_percent():
    probability = exact_joint()[0]
    coins = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def p_value(distribution):
        texts = sampling.inverse_cdf(distribution.expand(SAMPLES, -1), coins)
        return goodness_of_fit(torch.bincount(texts, minlength=VOCAB ** 3)[None], probability[None])

    assert p_value(probability) > 0.001
    sign = torch.where(probability.argsort().argsort() % 2 == 0, 1.0, -1.0).double()
    moved = probability * sign / (probability * sign).abs().sum()
    moved = probability + 0.04 * (moved - probability * moved.sum())  # the hardest case: all off by the same share
    assert 0.019 < (moved - probability).abs().sum() / 2 < 0.021 and p_value(moved / moved.sum()) < ALPHA


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_first_three_tokens_have_exactly_the_targets_joint_distribution(setting):
    record = simulate(**setting)
    accepted = torch.cat([outcome.num_accepted for _, outcome in record[1:]])
    rate = accepted.sum() / (accepted.sum() + (accepted < K).sum())
    assert 0.3 < rate < 0.8, f"draft and target must differ, and agree at times: {rate}"
    assert joint_p_value(record, **setting) > ALPHA


@pytest.mark.parametrize("setting", SETTINGS)
def test_given_a_hit_and_given_a_miss_the_next_tokens_are_the_targets(setting):
    """Whether round 1 was served from the cache depends on the first token, on nothing that follows."""
    record = simulate(**setting)
    (speculation, _), (texts, _) = record[1], written(record)
    probability = exact_joint(**setting).view(VOCAB, VOCAB ** 2)
    probability = probability / probability.sum(1, keepdim=True).clamp(min=1e-300)
    for rows in (speculation.hit, ~speculation.hit):
        assert rows.sum() > 3000
        observed = count(texts[rows, 0], code(texts[rows, 1:3]), probability.shape)
        assert goodness_of_fit(observed, probability) > ALPHA


@pytest.mark.parametrize("setting", SETTINGS)
def test_given_k_and_given_a_hit_or_miss_the_token_after_is_the_targets(setting):
    """The first token of round 2, given everything before it, k of round 1 included: branch by branch of the
    cache."""
    record = simulate(**setting)
    (_, outcome), (speculation, _), (texts, _) = record[1], record[2], written(record)
    for k, hit in itertools.product(range(K + 1), (True, False)):
        rows = (outcome.num_accepted == k) & (speculation.hit == hit)
        assert rows.sum() > 500, (k, hit)
        probability = following(exact_pair()[0], k + 2, warpers_of(**setting))
        observed = count(code(texts[rows, :k + 2]), texts[rows, k + 2], probability.shape)
        assert goodness_of_fit(observed, probability) > ALPHA, (k, hit)


def round_law(setting: dict, fan_out: list[int]) -> list[torch.Tensor]:
    """P(k, s_1..s_k, t* | x) of a round that follows a first token x: for each k, `[VOCAB, VOCAB^(k+1)]`.

    s_1..s_k accepted: product of min(p, q); then t*: max(p - q, 0), or p after all K."""
    warpers = warpers_of(**setting)
    target, draft = exact_pair()
    path, law = torch.ones(VOCAB, dtype=torch.float64), []
    for k in range(K + 1):
        p = following(target, k + 1, warpers)
        q = torch.zeros_like(p)
        if k < K:
            q = sampling.saguaro_distribution(following(draft, k + 1, warpers), fan_out[k], setting["downweight"])
        law.append((path[:, None] * (p - q).clamp(min=0)).view(VOCAB, -1))
        path = (path[:, None] * torch.minimum(p, q)).flatten()
    return law


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_round_accepts_as_often_as_theory_says_and_given_k_its_tokens_are_as_theory_says(setting):
    """Stronger than losslessness: a verifier that rejected everything would be lossless too."""
    record = simulate(**setting)
    (_, first), (speculation, outcome) = record[:2]
    shapes = FanOut("geometric", 4, K, 0.7, 0.4, 1.0).shapes
    for hit in (True, False):
        law, rows = round_law(setting, shapes[hit]), speculation.hit == hit
        shares = torch.stack([part.sum(1) for part in law], 1)
        assert goodness_of_fit(count(first.bonus[rows], outcome.num_accepted[rows], shares.shape), shares) > ALPHA, hit
        for k, probability in enumerate(law):
            chosen = rows & (outcome.num_accepted == k)
            tokens = torch.cat([speculation.tokens[chosen, :k], outcome.bonus[chosen, None]], 1)
            given_k = probability / probability.sum(1, keepdim=True).clamp(min=1e-300)
            assert chosen.sum() > 500
            assert goodness_of_fit(count(first.bonus[chosen], code(tokens), given_k.shape), given_k) > ALPHA, (hit, k)


# ---- every setting at once, over long texts ----

def long_text_p_value(net, warpers, prompts: list[list[int]], texts: list[list[int]]) -> float:
    """Were these texts drawn from the target? Replays them through it. At every place the token's rank in the
    target's distribution p (0: the likeliest) has probability p_(rank); summed over all places, observed minus
    expected counts of the ranks have mean 0 and covariance sum diag(p) - p p^T whatever the texts (they are a
    martingale), hence a chi-square of their own."""
    difference, covariance = 0, 0
    for prompt, text in zip(prompts, texts):
        with torch.inference_mode():
            logits = net(torch.tensor([prompt + text])).logits[0, len(prompt) - 1:-1]
        p, order = sampling.probabilities(logits, warpers).sort(-1, descending=True)
        drawn = order == torch.tensor(text)[:, None]
        if (p[drawn] == 0).any():
            return 0.0
        difference = difference + (drawn.double() - p).sum(0)
        covariance = covariance + torch.diag(p.sum(0)) - p.T @ p
    ranks = covariance.diagonal() > 5  # without ranks that hardly occur, and without the last: p sums to one
    ranks[ranks.nonzero()[-1]] = False
    difference, covariance = difference[ranks], covariance[ranks][:, ranks]
    chi_square = difference @ torch.linalg.solve(covariance, difference)
    return float(torch.special.gammaincc(ranks.sum() / 2, chi_square / 2))


GRID = [dict(downweight=C, backup=backup, shape=shape) for C in (1.0, 0.5, 0.0) for backup in ("neural", "fast")
        for shape in ("geometric", "uniform")] + [dict(downweight=None, backup="auto", shape="auto")]


@slow
@pytest.mark.parametrize("prompts, length", (([[1, 2, 3]], 60), ([[row] * (1 + row % 4) for row in range(7)], 30)),
                         ids=("one row", "seven ragged rows"))
@pytest.mark.parametrize("warping", ((0.7, 0, 1.0), (1.0, 6, 0.95)), ids=str)
@pytest.mark.parametrize("choices", GRID, ids=lambda choices: " ".join(map(str, choices.values())))
def test_long_texts_are_the_targets_in_every_setting(choices, warping, prompts, length):
    net = network(vocab_size=12, initializer_range=0.15, max_position_embeddings=512)  # many tokens are likely
    warpers = sampling.logits_warpers(*warping)
    speculator, stats = ahead(draft_worker(imitation(net, 0.3), warpers, **choices)), Stats()
    generations = decode(TargetWorker(CausalLM(net), warpers, 0), speculator, prompts, length, 3, [], stats)
    assert 0 < stats.hits < stats.row_rounds and stats.accepted > 0 and stats.rejected > 0
    assert long_text_p_value(net, warpers, prompts, [g.tokens for g in generations]) > ALPHA


# ---- the same through two real processes ----

def work_off(jobs) -> None:
    """A process: does job after job, each a function and its arguments, until None comes."""
    torch.set_num_threads(1)
    for job, *arguments in iter(jobs.get, None):
        job(*arguments)


@contextmanager
def other_process():
    """The queue of a process that does `work_off`."""
    jobs = FORKS.SimpleQueue()
    process = FORKS.Process(target=work_off, args=(jobs,), daemon=True)
    process.start()
    yield jobs
    jobs.put(None)
    process.join(60)
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def draft_process():
    """One for all tests, for its start takes seconds."""
    with other_process() as jobs:
        yield jobs


@contextmanager
def joined(meeting_point: str, rank: int, ranks: int = 2):
    """This process as one of `ranks`: the group of the target ranks, if they are several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saguaro, "DRAFT", ranks - 1)
        patch.setenv("RANK", str(rank))
        dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=ranks,
                                timeout=timedelta(minutes=2))
        try:
            yield dist.new_group(list(range(ranks - 1))) if ranks > 2 else None
        finally:
            dist.destroy_process_group()


def serve_drafts(meeting_point: str, ranks: int, net, vocab_size: int, warping: dict, batches: list, longest: int,
                 choices: dict) -> None:
    """The draft's job."""
    with joined(meeting_point, ranks - 1, ranks):
        warpers = warpers_of(**warping)
        worker, wire = draft_worker(net, warpers, **choices), wire_for(warpers, choices["lookahead"], vocab_size)
        for prompts in batches:
            saguaro.serve(worker, wire, prompts, longest, early_outcome=True)


def wire_for(warpers, lookahead: int, vocab_size: int, targets=None) -> saguaro.Wire:
    q_dtype = None if warpers is None else torch.float64
    return saguaro.Wire(torch.device("cpu"), lookahead, vocab_size, q_dtype, targets)


def two_processes(draft_process, tmp_path: Path, target_net, draft_net, warping: dict, batches: list,
                  max_new_tokens: int, **choices):
    """Generations of all batches, hit flags of all rounds, statistics; target in this process, draft in another."""
    meeting_point = f"file://{tmp_path}/{time.monotonic_ns()}"
    longest = max(len(prompt) for prompts in batches for prompt in prompts) + max_new_tokens
    vocab_size, warpers = target_net.config.vocab_size, warpers_of(**warping)
    draft_process.put((serve_drafts, meeting_point, 2, draft_net, vocab_size, warping, batches, longest, choices))
    with joined(meeting_point, saguaro.TARGET):
        speculator = saguaro.RemoteSpeculator(wire_for(warpers, choices["lookahead"], vocab_size))
        speculations, stats, target = recorded(speculator), Stats(), TargetWorker(CausalLM(target_net), warpers, 0)
        generations = [g for prompts in batches
                       for g in decode(target, speculator, prompts, max_new_tokens, choices["lookahead"], [], stats)]
    return generations, [speculation.hit.tolist() for speculation in speculations], stats


@slow
@pytest.mark.parametrize("setting, batches", [(dict(temperature=1.0, downweight=0.5), 6),
                                              (dict(temperature=0.9, top_p=0.85, downweight=1.0), 2)])
def test_two_processes_write_the_targets_joint_distribution(draft_process, tmp_path, setting, batches):
    """The whole: rows that end in different rounds, real messages, the early outcome whenever it comes."""
    prompts = [[PROMPT] * 20_000] * batches
    generations, _, stats = two_processes(draft_process, tmp_path, *exact_pair(), setting, prompts, 3, lookahead=K,
                                          budget=4, downweight=setting["downweight"])
    texts = torch.tensor([g.tokens for g in generations])
    assert goodness_of_fit(torch.bincount(code(texts), minlength=VOCAB ** 3)[None], exact_joint(**setting)) > ALPHA
    assert 0.3 < stats.summary(K)["hit_rate"] < 0.95 and 0.3 < stats.summary(K)["acceptance_rate"] < 0.8


def test_the_wire_carries_every_bit(monkeypatch):
    """Above all of q, which must be what the tokens were drawn from and not what it is rounded to."""
    posted = []
    monkeypatch.setattr(dist, "send", lambda tensor, rank: posted.append(tensor.clone()))
    monkeypatch.setattr(dist, "recv", lambda tensor, rank: tensor.copy_(posted.pop(0)))
    for dtype in (torch.float32, torch.float64):
        wire = saguaro.Wire(torch.device("cpu"), 3, 11, dtype)
        sent = Speculation(torch.randint(11, (4, 3)), torch.rand(4, 3, 11, dtype=dtype), torch.rand(4) < 0.5)
        wire.send_speculation(sent)
        assert all(a.equal(b) for a, b in zip(sent, wire.receive_speculation(4)))
        outcome = Outcome(torch.tensor([2, -1, 0, 3]), torch.tensor([1, 5, 10, 0]))
        wire.send_outcome(outcome)
        assert all(a.equal(b) for a, b in zip(outcome, wire.receive_outcome(4))) and not posted


@slow
@pytest.mark.parametrize("temperature", (0, 1))
def test_two_processes_write_the_same_text_with_the_same_hits_as_one_process_does(draft_process, tmp_path, temperature):
    net, warpers = network(), sampling.logits_warpers(temperature)
    draft, chosen = imitation(net, 0.15), dict(lookahead=3, budget=7, downweight=0.7)
    batches = [RAGGED, RAGGED[:1]]
    apart, hits, _ = two_processes(draft_process, tmp_path, net, draft, {"temperature": temperature}, batches, 40,
                                   **chosen)
    worker, target = ahead(draft_worker(draft, warpers, **chosen)), TargetWorker(CausalLM(net), warpers, 0)
    speculations = recorded(worker)
    together = [g for prompts in batches for g in decode(target, worker, prompts, 40, 3, [], Stats())]
    assert apart == together and hits == [speculation.hit.tolist() for speculation in speculations]
    assert any(sum(hits, [])) and not all(sum(hits, []))


# ---- 6. classic mistakes: each must be caught by the statistic of chapter 5 ----

def replace_line(monkeypatch, owner, name: str, right: str, wrong: str) -> None:
    """Plant a mistake: rewrite one line of a function of the program."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{name} no longer holds {right!r}: adapt this mistake"
    planted = {}
    exec(source.replace(right, wrong), vars(sys.modules[function.__module__]), planted)
    monkeypatch.setattr(owner, name, planted[name])


DRAWN = "return sampling.inverse_cdf(q, coins), q"
MISTAKES = {
    "q reported without the C-rescaling":
        (DraftWorker, "draw", DRAWN,
         "return sampling.inverse_cdf(q, coins), sampling.probabilities(logits, self.warpers)"),
    "temperature applied to p and to the draw, but not to the reported q":
        (DraftWorker, "draw", DRAWN, "return sampling.inverse_cdf(q, coins), logits.softmax(-1)"),
    "temperature applied to q only":
        (TargetWorker, "verify", "p = sampling.probabilities(logits, self.warpers)", "p = logits.softmax(-1)"),
    "greedy drafts reported as if drawn from q":
        (DraftWorker, "draw", DRAWN, "return q.argmax(-1), q"),
    "after a miss, tokens accepted if and only if they equal the argmax":
        (TargetWorker, "verify", "num_accepted, bonus = sampling.verify(p, drafted, q, coins)",
         "coins[:, :-1] = coins[:, :-1].where(speculation.hit[:, None], (drafted != p[:, :-1].argmax(-1)).float())\n"
         "        num_accepted, bonus = sampling.verify(p, drafted, q, coins)"),
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
        (sampling, "verify", "residual(p[row, num_accepted], q[row, num_accepted])", "p[row, num_accepted]"),
    "bonus token drawn with the coin that rejected":
        (sampling, "verify", "coins[:, lookahead])", "coins[row, num_accepted])"),
    "drafted token possible as the bonus token of its own rejection":
        (sampling, "residual", "excess = (p - q).clamp(min=0)", "excess = (p - 0.5 * q).clamp(min=0)"),
    "a hit served with the tokens of another row":
        (SpeculationCache, "take", "[row, :, branch]", "[row.roll(1), :, branch]"),
    "a hit served with the tokens of another branch":
        (SpeculationCache, "take", "[row, :, branch]", "[row, :, branch - 1]"),
    "a speculation that was judged already served again":
        (DraftWorker, "speculate", "self.drafted, self.hit, self.cache = tokens, hit, None",
         "tokens, q = self.served = getattr(self, 'served', (tokens, q))\n"
         "    self.drafted, self.hit, self.cache = tokens, hit, None"),
    "all tokens of a branch drawn with the same coin":
        (DraftWorker, "grow", "tree.coins[..., step]", "tree.coins[..., 0]"),
    "the target's coins the same in every round":
        (TargetWorker, "verify", "generator=self.generator", "generator=torch.Generator().manual_seed(7)"),
}
# Wrong, and yet lossless: whatever is proposed for whatever reason, it is verified against the q it was drawn from.
HARMLESS = {
    "a hit served with the tokens and the q of another row":
        (SpeculationCache, "take", "row = torch.arange(len(branch), device=branch.device)",
         "row = torch.arange(len(branch)).roll(1)"),
    "a hit served though the bonus token is another":
        (SpeculationCache, "look_up", "& (self.guesses.bonus == outcome.bonus[:, None])", ""),
    "branches that see each other":
        (DraftWorker, "plant", "self.ancestors.expand", "torch.ones_like(self.ancestors).expand"),
    "branches that overwrite the trunk's KV":
        (DraftWorker, "plant", "slots=(trunk_end + torch.arange(budget, device=device))",
         "slots=(1 + torch.arange(budget))"),
    "a draft that guesses at random":
        (DraftWorker, "draw", "q = sampling.probabilities(logits, self.warpers)",
         "q = torch.full_like(logits, 1 / logits.shape[-1])"),
}
CONTROL = dict(temperature=0.7, top_k=0, top_p=1.0, downweight=0.5)


def p_value_with(monkeypatch, change: tuple) -> float:
    replace_line(monkeypatch, *change)
    return joint_p_value(simulate.__wrapped__(**CONTROL, samples=20_000), **CONTROL)


@slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_classic_mistake_is_caught(monkeypatch, mistake):
    assert p_value_with(monkeypatch, MISTAKES[mistake]) < ALPHA


@slow
@pytest.mark.parametrize("change", HARMLESS)
def test_it_is_lossless_whatever_the_cache_holds(monkeypatch, change):
    assert p_value_with(monkeypatch, HARMLESS[change]) > ALPHA


@pytest.mark.parametrize("change, arguments", [("branches that overwrite the trunk's KV", (RAGGED, "ssd", 0)),
                                               ("branches that see each other", ("llama",))])
def test_what_is_lossless_and_yet_wrong_is_caught_in_chapter_3(monkeypatch, change, arguments):
    replace_line(monkeypatch, *HARMLESS[change])
    claim = (test_after_twenty_rounds_of_hits_and_misses_all_KV_equals_a_fresh_prefill if "KV" in change else
             test_every_branch_of_the_tree_sees_what_a_plain_forward_over_its_own_tokens_sees)
    with pytest.raises(AssertionError):
        claim(*arguments)


def detection_table() -> None:
    print(f"p-value of the first three tokens of 20,000 texts ({CONTROL}); caught below {ALPHA:g}\n")
    print(f"{joint_p_value(simulate(**CONTROL, samples=20_000), **CONTROL):9.1e}  the program as it is")
    for title, changes in (("mistakes", MISTAKES), ("wrong, and yet lossless", HARMLESS)):
        print(f"\n{title}")
        for name, change in changes.items():
            with pytest.MonkeyPatch.context() as monkeypatch:
                print(f"{p_value_with(monkeypatch, change):9.1e}  {name}", flush=True)


# ---- 7. the real thing: processes, started as a user starts them ----

PYTHON = [sys.executable, str(HERE / "saguaro.py")]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), PYTHON[-1]]


def run(*commands: list) -> list[subprocess.CompletedProcess]:
    """Side by side, for most of their time is that of starting Python and importing PyTorch."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda command: subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=400, env=QUIET), commands))


def run_for_json(tmp_path: Path, *commands: list) -> list[dict]:
    files = [tmp_path / f"{number}.json" for number in range(len(commands))]
    for done in run(*([*command, "--json", file] for command, file in zip(commands, files))):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("tokens per round") == 1  # only rank 0 speaks
    return [json.loads(file.read_text("utf-8")) for file in files]


def short_prompts(folder: Path) -> Path:
    """A file of three embedded prompts, cut short, each under another of the field names."""
    texts = saguaro.read_json_lines(saguaro.TINY / "prompts.jsonl")
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({name: text[:end]}) for name, text, end in
                              zip(saguaro.PROMPT_FIELDS, texts, (60, 100, 140))), "utf-8")
    return path


def saguaro_here(monkeypatch, *arguments) -> None:
    """`python saguaro.py ...` in this process, whose number of threads stays as it is."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["saguaro.py", *map(str, arguments)])
    saguaro.main()


STATS = {"tokens", "seconds", "tokens_per_second", "rounds", "tokens_per_round", "acceptance_rate", "hit_rate",
         "verifier_utilisation", "T_p", "T_b", "prefill_seconds"}
MODE_LAUNCHES = {"ar": PYTHON, "sd": PYTHON, "ssd": torchrun(3)}  # two ranks, the usual number, come below


def launch_all_modes(folder: Path) -> list[dict]:
    chosen = ("--prompts", short_prompts(folder), "--batch-size", 2, "--max-new-tokens", 16)
    return run_for_json(folder, *([*command, "--mode", mode, *chosen] for mode, command in MODE_LAUNCHES.items()))


def launch_twice(folder: Path) -> list[dict]:
    """By torchrun with two ranks, and by `python saguaro.py`, which starts them itself."""
    chosen = ("--prompts", short_prompts(folder), "--batch-size", 3, "--max-new-tokens", 32, "--temperature", 1,
              "--downweight", 0.5, "--seed", 3)
    return run_for_json(folder, *([*command, *chosen] for command in (torchrun(2), PYTHON)))


def launch_without_arguments(_: Path) -> subprocess.CompletedProcess:
    """By a torchrun of one process: that process starts the two ranks."""
    return run(torchrun(1))[0]


def save_pair(folder: Path, **changes) -> None:
    """Checkpoints of a small random target and draft, with the tokenizer of the embedded pair."""
    target = network(vocab_size=2048, max_position_embeddings=128, **changes)
    for name, net in (("target", target), ("draft", imitation(target, 0.15))):
        copy.deepcopy(net).float().save_pretrained(folder / name)
        for file in (saguaro.TINY / name).glob("tokenizer*.json"):
            (folder / name / file.name).write_bytes(file.read_bytes())


def launch_benchmark(folder: Path) -> tuple:
    """The comparison, and what it wrote, of a pair and a prompt so small that it takes seconds; likewise all figures,
    but in processes that have their imports already."""
    chosen = ("--target", folder / "target", "--draft", folder / "draft", "--quick", "--max-new-tokens", 22,
              "--prompts", folder / "prompt.jsonl")
    (folder / "prompt.jsonl").write_text('{"text": "def f(x):"}', "utf-8")
    comparison, = run([sys.executable, HERE / "bench.py", *chosen, "--out", folder / "out.json"])
    sweeps = run_ranks(folder, 2, 0, [("bench.py", *chosen, "--sweep", *bench.SWEEPS, "--figures", folder)])
    return comparison, sweeps, json.loads((folder / "out.json").read_text("utf-8")), sorted(folder.glob("*.svg"))


KILLS = ((torchrun(3), 2), (PYTHON, 0))  # a draft rank, a target rank


def launch_and_kill(folder: Path) -> list[tuple[int, float, str]]:
    return [kill_while_decoding(command, rank, folder / f"{rank}") for command, rank in KILLS]


def kill_while_decoding(command: list[str], rank: int, errors: Path) -> tuple[int, float, str]:
    """Exit status of a job one of whose ranks is killed, the seconds that it took to end, and its standard error."""
    with open(errors, "w") as file:
        job = subprocess.Popen([*command, "--prompts", str(saguaro.TINY / "prompts.jsonl"), "--max-new-tokens", "400",
                                "--ignore-eos"], stdout=subprocess.DEVNULL, stderr=file, env=QUIET)
    try:
        wait_for(lambda: re.search(r"\d(token/s|s/token)", errors.read_text()))  # tqdm's bar has moved
        victim = next(child for child in psutil.Process(job.pid).children(recursive=True)
                      if child.environ().get("RANK") == str(rank))
        started = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        return job.wait(timeout=60), time.monotonic() - started, errors.read_text()
    finally:
        if job.poll() is None:
            for process in psutil.Process(job.pid).children(recursive=True):
                process.kill()
            job.kill()


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


LAUNCHES = {  # by the test that looks at the results
    "test_every_mode_writes_the_same_greedy_text": launch_all_modes,
    "test_same_seed_and_flags_give_same_text_and_hits_however_started": launch_twice,
    "test_without_arguments_the_embedded_pair_continues_an_embedded_prompt": launch_without_arguments,
    "test_the_benchmark_compares_and_draws": launch_benchmark,
    "test_two_ranks_complain_once": lambda _: run([*PYTHON, "--draft", "./nowhere"])[0],
    "test_a_killed_rank_ends_the_job_within_seconds_and_is_named": launch_and_kill,
    "test_the_text_is_the_same_wherever_the_models_are": lambda folder: launch_on_gpus(folder),
    "test_the_benchmark_runs_on_a_gpu": lambda folder: launch_benchmark_on_a_gpu(folder),
}
PAIRS = {  # for which of them a pair is saved in their folder, and how it is shaped
    "test_the_benchmark_compares_and_draws": {},
    "test_the_text_is_the_same_wherever_the_models_are": {"num_hidden_layers": 3, "intermediate_size": 512},
    "test_the_benchmark_runs_on_a_gpu": {}}


@pytest.fixture(scope="module", autouse=True)
def background(request, tmp_path_factory):
    """The launches run beside all other tests, two at a time, politely: this is the dictionary of their
    futures."""
    wanted = LAUNCHES.keys() & {item.originalname for item in request.session.items}
    folders = {name: tmp_path_factory.mktemp("launch") for name in LAUNCHES if name in wanted}
    for name in PAIRS.keys() & wanted:
        save_pair(folders[name], **PAIRS[name])  # here: random weights are drawn by one thread at a time
    if PAIRS.keys() & wanted:
        forkserver.ensure_running()  # it will have done the imports when the first process is wanted
    with ThreadPoolExecutor(2, initializer=os.nice, initargs=(10,)) as pool:  # on Linux threads have their own niceness
        yield {name: pool.submit(LAUNCHES[name], folder) for name, folder in folders.items()}


@pytest.fixture
def launched(request, background):
    """What the launch for the test that asks has brought."""
    return background[request.node.originalname].result()


@slow
def test_every_mode_writes_the_same_greedy_text(launched):
    for mode, result in zip(MODE_LAUNCHES, launched):
        outputs, stats = result["outputs"], result["stats"]
        assert result["config"]["mode"] == mode and result["config"]["max_new_tokens"] == 16
        assert set(outputs[0]) == {"prompt", "text", "tokens", "finish_reason"} and STATS <= set(stats)
        assert all(len(o["tokens"]) == 16 or o["finish_reason"] == "eos" and len(o["tokens"]) < 16 for o in outputs)
        assert stats["tokens"] == sum(len(o["tokens"]) for o in outputs)
        assert 0 < stats["verifier_utilisation"] <= 1 and stats["tokens_per_second"] > 0
        assert [o["tokens"] for o in outputs] == [o["tokens"] for o in launched[0]["outputs"]]
    rates = [result["stats"]["hit_rate"] for result in launched]
    assert rates[:2] == [None, 0] and rates[2] > 0


@slow
def test_same_seed_and_flags_give_same_text_and_hits_however_started(launched):
    first, second = launched
    assert first["outputs"] == second["outputs"]
    for name in ("hit_rate", "rounds", "acceptance_rate", "tokens"):
        assert first["stats"][name] == second["stats"][name]


def test_another_seed_gives_another_text(monkeypatch, tmp_path):
    """In this process, where importing torch costs nothing; mode sd, which needs no second process."""
    texts = []
    for seed in (3, 3, 4):
        saguaro_here(monkeypatch, "--mode", "sd", "--temperature", 1, "--max-new-tokens", 8, "--seed", seed,
                     "--json", tmp_path / "out.json")
        texts.append(json.loads((tmp_path / "out.json").read_text("utf-8"))["outputs"][0]["tokens"])
    assert texts[0] == texts[1] != texts[2]


@slow
def test_without_arguments_the_embedded_pair_continues_an_embedded_prompt(launched):
    prompt = next(saguaro.read_json_lines(saguaro.TINY / "prompts.jsonl"))
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert launched.stdout.startswith(prompt)
    assert "tokens with ssd" in launched.stdout and "verifier utilisation" in launched.stdout


WRONG = {
    "--lookahead 0": "--lookahead is 0",
    "--lookahead two": "--lookahead",
    "--budget 0": "--budget is 0",
    "--temperature -1": "--temperature is -1",
    "--temperature nan": "--temperature is nan",
    "--top-k -1": "--top-k is -1",
    "--top-p 0": "--top-p is 0",
    "--top-p 1.5": "--top-p is 1.5",
    "--downweight 1.1": "--downweight is 1.1",
    "--downweight -0.1": "--downweight is -0.1",
    "--acceptance-rate 2": "--acceptance-rate is 2",
    "--miss-exponent 0": "--miss-exponent is 0",
    "--max-new-tokens 0": "--max-new-tokens is 0",
    "--batch-size 0": "--batch-size is 0",
    "--seed -1": "--seed is -1",
    "--mode fast": "invalid choice: 'fast'",
    "--frobnicate": "unrecognized arguments: --frobnicate",
    "--prompt": "expected at least one argument",
    "--prompt a --prompts FILE": "exclude each other",
    "--prompts nowhere.jsonl": "nowhere.jsonl: No such file",
    "--prompts EMPTY": "holds no prompt",
    "--prompts TORN": "line 2: not a JSON object",
    "--prompts FIELDLESS": "line 1: not a JSON object",
    "--json nowhere/out.json": "not a file in an existing", "--json EMPTYFOLDER": "not a file in an existing",
    "--target ./nowhere": "--target ./nowhere: no such folder",
    "--draft ./nowhere": "--draft ./nowhere: no such folder",
    "--target EMPTYFOLDER": "neither a folder with a model",
    "--draft RENAMED": "different vocabularies",
    "--target BART": "cannot be decoded here",
    "--target T5": "cannot be decoded here",
    "--apply-chat-template": "has no chat template",
    "--prompts BLANK": "prompt 2 of 2 is empty",
    "--prompts LONG": "context is 512",
}


@pytest.fixture(scope="module")
def wrong_inputs(tmp_path_factory) -> dict[str, Path]:
    """What the capital letters in WRONG stand for."""
    folder = tmp_path_factory.mktemp("wrong")
    texts = {"FILE": '{"text": "a"}', "EMPTY": "\n",
             "TORN": '{"text": "a"}\n{"text": "b', "FIELDLESS": '{"words": "a"}',
             "BLANK": '{"text": "a"}\n{"text": ""}', "LONG": json.dumps({"text": "if x :\n" * 2000})}
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    (folder / "EMPTYFOLDER").mkdir()
    for name in ("RENAMED", "BART", "T5"):  # all with the pair's tokenizer
        (folder / name).mkdir()
        for file in (saguaro.TINY / "draft").glob("*.json"):
            (folder / name / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((folder / "RENAMED" / "tokenizer.json").read_text("utf-8"))
    names = vocabulary["model"]["vocab"]
    names["unheard-of"] = names.pop(list(names)[-1])
    vocabulary["model"]["merges"] = [merge for merge in vocabulary["model"]["merges"] if "".join(merge) in names]
    (folder / "RENAMED" / "tokenizer.json").write_text(json.dumps(vocabulary), "utf-8")
    for family in ("bart", "t5"):
        AutoConfig.for_model(family, vocab_size=2048).save_pretrained(folder / family.upper())
    return {path.name: path for path in folder.iterdir()}


def test_a_chat_template_makes_each_prompt_a_user_turn():
    tokenizer = saguaro.open_model("--target", str(saguaro.TINY / "target"))[1]
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}<assistant>{% endif %}")
    prompts = saguaro.encode(tokenizer, ["Why?", "How?"], chat=True, context=512)
    assert tokenizer.batch_decode(prompts) == ["<user>Why?<assistant>", "<user>How?<assistant>"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_invocation_gets_one_sentence_and_exit_status_2(arguments, wrong_inputs, monkeypatch, capsys):
    words = [str(wrong_inputs.get(word, word)) for word in arguments.split()]
    with pytest.raises(SystemExit) as stopped:
        saguaro_here(monkeypatch, *([] if "--mode" in words else ["--mode", "sd"]), *words)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("saguaro.py: error:")]
    assert stopped.value.code == 2 and len(lines) == 1 and WRONG[arguments] in lines[0], lines


@slow
@pytest.mark.filterwarnings("ignore")
def test_too_little_memory_is_said_in_one_sentence(monkeypatch, capsys):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...")

    monkeypatch.setattr(CausalLM, "run", refuse)
    with pytest.raises(SystemExit) as stopped:
        saguaro_here(monkeypatch, "--mode", "ar")
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and "rank 0 (target) lacks GPU memory" in said


def test_two_ranks_complain_once(launched):
    assert launched.stderr.count("saguaro.py: error:") == 1 and "no such folder" in launched.stderr
    assert launched.returncode == 2


@slow
def test_the_benchmark_compares_and_draws(launched):
    comparison, (codes, said), written, figures = launched
    assert comparison.returncode == 0, comparison.stderr[-3000:]
    assert codes == [0, 0], said[-3000:]
    names = {result["name"] for result in written["results"]}
    assert {"ar", "sd", "ssd", "generate", "generate, assisted", "generate, look-up"} < names
    for result in written["results"]:
        assert min(result["tokens_per_second"]) > 0
        assert result["name"] in comparison.stdout and len(result["tokens_per_second"]) == 1
    assert [figure.stem for figure in figures] == sorted(bench.SWEEPS)
    assert all("</svg>" in figure.read_text("utf-8") for figure in figures)


@pytest.mark.parametrize("changes", (dict(num_key_value_heads=2), dict(tie_word_embeddings=True)), ids=str)
def test_a_larger_body_computes_the_same_function(changes):
    small = copy.deepcopy(network(**changes))
    with torch.no_grad():
        for norm in filter(lambda weight: weight.ndim == 1, small.parameters()):
            norm += 0.3 * torch.randn_like(norm)
    large = bench.enlarge(small, hidden_size=80, num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=4,
                          head_dim=24, intermediate_size=90)
    assert large.num_parameters() > 5 * small.num_parameters()
    with torch.inference_mode():
        tokens = torch.randint(40, (2, 30))
        torch.testing.assert_close(large(tokens).logits, small(tokens).logits, rtol=0, atol=1e-4)  # float32 rotation
    with pytest.raises(UserError, match="--body"):
        bench.enlarge(large, hidden_size=40)


def test_the_benchmark_stops_when_a_greedy_text_differs():
    competitors = [SimpleNamespace(name=name, texts=[text], settings=SimpleNamespace(temperature=0))
                   for name, text in (("ar", [1, 2]), ("ssd", [1, 3]))]
    run = SimpleNamespace(settings=SimpleNamespace(max_new_tokens=2), target=SimpleNamespace(dtype=torch.float32))
    bench.check_texts(run, competitors[:1] * 2)
    with pytest.raises(SystemExit, match="other greedy text than ar"):
        bench.check_texts(run, competitors)


def test_the_benchmark_predicts_by_theorem_7():
    nothing = dict.fromkeys(("hit_rate", "E_hit", "T_p", "T_b"))
    plain = nothing | {"E_miss": 1.0, "rows": 1.0, "verify_seconds": 0.02}
    assert bench.predicted_speed(plain) == pytest.approx(50)
    assert bench.predicted_speed(plain | {"E_miss": 3.0, "hit_rate": 0.0, "T_b": 0.5}) == pytest.approx(100)
    ssd = plain | {"hit_rate": 0.8, "E_hit": 4.0, "E_miss": 3.0, "T_p": 1.2, "T_b": 0.5}
    assert bench.predicted_speed(ssd) == pytest.approx(50 * (0.8 * 4 + 0.2 * 3) / (0.8 * 1.2 + 0.2 * 1.5))


def test_a_fitted_acceptance_rate_gives_back_the_speed_it_was_fitted_to(capsys):
    assert bench.fitted_acceptance_rate(cache.expected_tokens(0.7, 5), 5) == pytest.approx(0.7)
    bench.predict(bench.BenchSettings())
    large, small = (row for row in capsys.readouterr().out.splitlines() if " fitted  " in row)
    assert large.count("161.8") == 2 and small.count("136.8") == 2  # SD: predicted, and measured in the paper


@slow
def test_a_killed_rank_ends_the_job_within_seconds_and_is_named(launched):
    for (_, rank), (status, seconds, errors) in zip(KILLS, launched):
        assert status != 0 and seconds < 20
        assert re.search(rf"rank\s*:?\s*{rank}\b.*?-9", errors, re.DOTALL), errors[-3000:]


# ---- the target on several ranks, each of which holds a part of every layer ----

SHARDED = {"llama": dict(num_key_value_heads=2),
           "llama, tied, biased": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
           "qwen3": dict(num_key_value_heads=2, head_dim=8),
           "phi3": {}}  # whose plan gathers what it has split
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@pytest.fixture(scope="module")
def shard_process():
    """Rank 1; the test is rank 0."""
    with other_process() as jobs:
        yield jobs


def load_shard(folder: Path, mesh: DeviceMesh) -> CausalLM:
    config = AutoConfig.from_pretrained(folder)
    return load_sharded(str(folder), config, torch.float64, parallel_plan(config, mesh.size()), mesh)


def logits_of_shards(meeting_point: str, rank: int, folders: list[Path]) -> list[tuple[torch.Tensor, float]]:
    """For every checkpoint the logits of TOKENS, computed by two ranks, and the part of its layers' matrices that this
    one holds."""
    results = []
    with joined(meeting_point, rank):
        for folder in folders:
            lm = load_shard(folder, DeviceMesh("cpu", [0, 1]))
            lm.allocate(*TOKENS.shape)
            matrices = [weight for weight in lm.network.model.layers.parameters() if weight.ndim == 2]
            held = sum(weight.to_local().numel() for weight in matrices) / sum(weight.numel() for weight in matrices)
            results.append((lm.causal(TOKENS, torch.zeros(len(TOKENS), dtype=torch.long)), held))
    return results


@slow
def test_half_a_target_each_gives_the_logits_of_the_whole(shard_process, tmp_path):
    folders, networks = [tmp_path / name for name in SHARDED], []
    for folder, changes in zip(folders, SHARDED.values()):
        networks.append(copy.deepcopy(network(folder.name.split(",")[0], **changes)))
        with torch.no_grad():
            for vector in filter(lambda weight: weight.ndim == 1, networks[-1].parameters()):
                vector += 0.3 * torch.randn_like(vector)  # biases are not 0, norms not 1
        networks[-1].save_pretrained(folder, max_shard_size="20KB")  # several files
    meeting_point = f"file://{tmp_path}/meeting"
    shard_process.put((logits_of_shards, meeting_point, 1, folders))
    for net, (logits, held) in zip(networks, logits_of_shards(meeting_point, 0, folders)):
        with torch.inference_mode():
            torch.testing.assert_close(logits, net(TOKENS, use_cache=False).logits, rtol=1e-9, atol=1e-9)
        assert held == 0.5


def decode_shard(rank: int, meeting_point: str, folder: Path, warping: dict, batches: list, max_new_tokens: int,
                 lookahead: int):
    """Generations of all batches, statistics. The coins of every rank are others: none but rank 0's may count."""
    warpers, stats = warpers_of(**warping), Stats()
    with joined(meeting_point, rank, 3) as targets:
        lm = load_shard(folder, DeviceMesh.from_group(targets, "cpu"))
        wire = wire_for(warpers, lookahead, lm.vocab_size, targets)
        speculator = (saguaro.OverheardSpeculator if rank else saguaro.RemoteSpeculator)(wire)
        target = saguaro.TargetShard(lm, warpers, rank, wire)
        return [g for prompts in batches
                for g in decode(target, speculator, prompts, max_new_tokens, lookahead, [], stats)], stats


@slow
def test_three_processes_write_the_targets_joint_distribution(draft_process, shard_process, tmp_path):
    setting, batches = dict(temperature=1.0, downweight=0.5), [[PROMPT] * 20_000] * 2
    net = network(seed=2, **EXACT | dict(num_attention_heads=2, num_key_value_heads=2))
    net.save_pretrained(tmp_path / "target")
    meeting_point, choices = f"file://{tmp_path}/meeting", dict(lookahead=K, budget=4, downweight=0.5)
    draft_process.put((serve_drafts, meeting_point, 3, imitation(net, 0.3), VOCAB, setting, batches, len(PROMPT) + 3,
                       choices))
    job = meeting_point, tmp_path / "target", setting, batches, 3, K
    shard_process.put((decode_shard, 1, *job))
    generations, stats = decode_shard(0, *job)
    observed = torch.bincount(code(torch.tensor([g.tokens for g in generations])), minlength=VOCAB ** 3)
    assert goodness_of_fit(observed[None], joint(net, 3, warpers_of(**setting))[None]) > ALPHA
    assert 0.3 < stats.summary(K)["hit_rate"] < 0.95 and 0.3 < stats.summary(K)["acceptance_rate"] < 0.8


def tune_all(meeting_point: str, rank: int) -> list[tuple]:
    """What each of three ranks finds to be the best lookahead and budget; each target rank is slow in its own way."""
    with joined(meeting_point, rank, 3):
        run = SimpleNamespace(settings=saguaro.Settings(lookahead="auto", budget="auto"), prompts=[[1]], context=512)
        model = SimpleNamespace(seconds_per_pass=lambda rows, count, length: (0.01, 0.1, 0.002)[rank])
        saguaro.Run.tune(run, *((None, model) if rank == 2 else (model, None)))
        found = [None] * 3
        dist.all_gather_object(found, (run.lookahead, run.budget, run.times))
        return found


@slow
def test_all_ranks_find_the_same_lookahead_in_rank_0s_measurements(draft_process, shard_process, tmp_path, capsys):
    meeting_point = f"file://{tmp_path}/meeting"
    draft_process.put((tune_all, meeting_point, 2))
    shard_process.put((tune_all, meeting_point, 1))
    found = tune_all(meeting_point, 0)
    assert found == found[:1] * 3 and found[0][0] == 4 and found[0][2]["T_p"] == pytest.approx(1)


PLACES = {  # (GPUs, ranks here, local rank, target ranks, draft), (target's device, draft's, NCCL between them?)
    "no GPU": ((0, 2, 0, 1, "small"), ("cpu", "cpu", False)),
    "one GPU, small draft": ((1, 2, 0, 1, "small"), ("cuda:0", "cpu", False)),
    "one GPU, large draft": ((1, 2, 0, 1, "large"), ("cuda:0", "cuda:0", False)),
    "two GPUs": ((2, 2, 1, 1, "large"), ("cuda:0", "cuda:1", True)),
    "five GPUs, two ranks": ((5, 2, 0, 1, "large"), ("cuda:0", "cuda:4", True)),
    "five GPUs, five ranks": ((5, 5, 3, 4, "large"), ("cuda:3", "cuda:3", True)),
    "two machines, a rank each": ((8, 1, 0, 1, "large"), ("cuda:0", "cuda:0", True)),
    "more ranks than GPUs": ((2, 3, 0, 2, "large"), "3 ranks were started on a machine with 2 GPUs")}
DRAFTS = {"small": dict(hidden_size=64), "large": dict(hidden_size=1024)}


@pytest.mark.parametrize("case", PLACES)
def test_every_rank_finds_its_device(case, monkeypatch, capsys):
    """Of devices that need not be there: it is a decision, not a run on them."""
    (gpus, ranks_here, local_rank, shards, draft), expected = PLACES[case]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    config = AutoConfig.for_model("llama", num_hidden_layers=1, vocab_size=60_000, **DRAFTS[draft])
    run = SimpleNamespace(settings=saguaro.Settings(), shards=shards, draft_config=config)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            saguaro.Run.place(run)
        return
    saguaro.Run.place(run)
    assert (str(run.target_device), str(run.draft_device), run.apart) == expected
    dtypes = [str(saguaro.Run.dtype(run, device)) for device in (run.target_device, run.draft_device)]
    assert dtypes == ["torch.float32" if place == "cpu" else "torch.bfloat16" for place in expected[:2]]
    assert ("will not overlap" in capsys.readouterr().err) == (case == "one GPU, large draft")


UNSHARABLE = {
    "gpt2": (dict(), "no tensor-parallel plan"),
    "mixtral": (dict(), "no tensor-parallel plan"),
    "llama": (dict(num_key_value_heads=1), "target ranks must divide 1"),
    "mistral": (dict(intermediate_size=45, sliding_window=None), "target ranks must divide 1"),
    "qwen3": (dict(quantization_config=dict(quant_method="fp8")), "quantized"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", UNSHARABLE)
def test_a_target_that_two_ranks_cannot_share_is_refused_with_one_sentence(family, tmp_path, monkeypatch, capsys):
    changes, sentence = UNSHARABLE[family]
    shape = dict(vocab_size=2048, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    AutoConfig.for_model(family, **shape | changes).save_pretrained(tmp_path)
    for file in (saguaro.TINY / "target").glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(saguaro, "DRAFT", 2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(sys, "argv", ["saguaro.py", "--target", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        saguaro.main()
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and sentence in lines[0], lines


def test_a_checkpoint_that_lacks_a_weight_is_not_loaded_in_parts(tmp_path):
    net = network()
    net.save_pretrained(tmp_path / "torn", state_dict={name: w for name, w in net.state_dict().items()
                                                       if "layers.0.mlp.up_proj" not in name})
    net.config.save_pretrained(tmp_path / "empty")
    with joined(f"file://{tmp_path}/meeting", 0, 1):
        for name in ("torn", "empty"):
            with pytest.raises(UserError, match=f"{name} in parts: Missing key in checkpoint state_dict: .*weight"):
                load_shard(tmp_path / name, DeviceMesh("cpu", [0]))


# ---- 8. GPUs: real ones where there are enough, else a stand-in for them ----

def within(value, change):
    """`value` with every tensor in it, in tuples, lists and dictionaries, too, replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([within(part, change) for part in value])
    return {name: within(part, change) for name, part in value.items()} if isinstance(value, dict) else value


def indexed(device: torch.device | str) -> torch.device:
    """"cuda" as the GPU that is current."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


class OnGPU(torch.Tensor):
    """Stands in for a tensor on a GPU: all of PyTorch takes it for one, but its numbers are in host memory, in `host`.
    As on a GPU, tensors of different devices cannot meet in one operation, and none can cross over while a graph is
    captured."""
    aten, function = torch.ops.aten, torch.nn.functional
    COPIES = {torch.Tensor.copy_, aten.copy_.default, aten._to_copy.default}
    INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__, aten.index.Tensor, aten.index_put_.default}
    WAITS = {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
             torch.Tensor.nonzero, aten.nonzero.default, aten._local_scalar_dense.default}
    EARLY = {torch.Tensor.copy_, torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.__bool__,
             torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero,
             torch.Tensor.__invert__, torch.Tensor.contiguous, torch.Tensor.unfold, torch.Tensor.detach,
             function.scaled_dot_product_attention}  # they ask CUDA something before they dispatch
    crossings: list[str] = []  # the host waits: until something is "in" the GPU, or until it is computed and "out"

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device):
        tensor = torch.Tensor._make_wrapper_subclass(cls, host.shape, strides=host.stride(), dtype=host.dtype,
                                                     storage_offset=host.storage_offset(), device=device)
        tensor.host = host
        return tensor

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.host.data_ptr()

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.clone())

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in cls.EARLY:
            return cls.compute(function, arguments, options or {})
        arguments = [indexed(value) if isinstance(value, torch.device) else value for value in arguments]
        return torch._C._disabled_torch_function_impl(function, types, tuple(arguments), options or {})

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        options = options or {}
        parts = operation.decompose(*arguments, **options) if torch.is_inference_mode_enabled() else NotImplemented
        return cls.compute(operation, arguments, options) if parts is NotImplemented else parts

    @classmethod
    def compute(cls, operation, arguments, options):
        tensors: list[torch.Tensor] = []
        host_arguments, host_options = within((arguments, options),
                                              lambda tensor: tensors.append(tensor) or getattr(tensor, "host", tensor))
        devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.is_cuda}  # numbers may be anywhere
        device = tensors[0].device if operation in cls.COPIES | cls.INDEXING or not devices else next(iter(devices))
        if options.get("device") is not None:
            device, host_options["device"] = indexed(options["device"]), "cpu"
        if len(devices) > 1 and operation not in cls.COPIES:
            values = {value.device for value in arguments[2:] if isinstance(value, torch.Tensor) and value.dim()}
            if operation not in cls.INDEXING or device.type == "cpu" or values - {device}:  # the CPU's indices may pass
                raise RuntimeError(f"{operation}: tensors on {devices}")
        places = {place.type for place in devices}
        masked = operation in cls.INDEXING and any(part.dtype is torch.bool and part.is_cuda for part in tensors[1:])
        if operation in cls.WAITS or masked or "cuda" in places and device.type == "cpu":
            cls.cross("out")
        if "cpu" in places and device.type == "cuda" and not (operation in cls.COPIES and arguments[2:] == (True,)):
            cls.cross("in")  # the last argument of copies is non_blocking
        if operation in (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default):  # gloo's and NCCL's never meet
            host_arguments = (*host_arguments[:-1], host_arguments[-1] + 1)  # the tag
        if operation is cls.aten._to_copy.default:
            operation, host_options = torch.Tensor.to, {"dtype": options.get("dtype") or tensors[0].dtype, "copy": True}
        host_options.pop("pin_memory", None)
        result = operation(*host_arguments, **host_options)
        if device.type == "cpu":
            return result
        ours = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, cls)}  # of operations in place
        return within(result, lambda host: ours[id(host)] if id(host) in ours else cls(host, device))

    @classmethod
    def cross(cls, way: str) -> None:
        if isinstance(_get_current_dispatch_mode(), Tape):
            raise RuntimeError("operation not permitted when stream is capturing")
        cls.crossings.append(way)


def stand_in(gpus: int, free: int) -> None:
    """From now on this process, which will never again be what it was, has so many GPUs of so many free bytes each.
    gloo plays NCCL, a tape a graph, and nothing is compiled."""
    current = torch.device("cuda:0")
    init_gloo, move, place = dist.init_process_group, torch.nn.Module.to, placement.infer_auto_device_map

    def empty(size, stride=None, *, dtype=None, device=None, **_):
        options = {"dtype": dtype, "device": "cpu"}
        host = torch.empty(size, **options) if stride is None else torch.empty_strided(size, stride, **options)
        return OnGPU(host, indexed(device))

    def set_device(device):
        nonlocal current
        current = device

    def init_process_group(backend, timeout, device_id):
        assert (backend, device_id) == (("cpu:gloo,cuda:nccl", current) if device_id else ("gloo", None))
        init_gloo("gloo", timeout=timedelta(minutes=1))

    def infer_auto_device_map(*arguments, **options):
        return {part: f"cuda:{gpu}" if isinstance(gpu, int) else gpu
                for part, gpu in place(*arguments, **options).items()}

    OnGPU.library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided"):  # what every new tensor begins as
        OnGPU.library.impl(name, empty, "CUDA")
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda"): first made, then moved
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new parameters
    torch.compiler.set_stance("force_eager")
    for name, value in (GRAPHS | dict(
            _lazy_init=lambda: None, is_available=lambda: True, device_count=lambda: gpus, set_device=set_device,
            current_device=lambda: current.index, synchronize=lambda *_: None, mem_get_info=lambda _: (free, 2 ** 36),
            get_device_name=lambda _: "stand-in", get_device_capability=lambda _: (8, 0))).items():
        setattr(torch.cuda, name, value)
    dist.init_process_group, placement.infer_auto_device_map = init_process_group, infer_auto_device_map
    torch.nn.Module.to = lambda module, device: move(module, indexed(device))


PLACEMENTS = {  # GPUs, ranks, and what else is special
    "no GPU": (0, 2, {}),
    "one GPU, small draft": (1, 2, {}),
    "one GPU, large draft": (1, 2, {"small_draft": 0}),
    "two GPUs": (2, 2, {}),
    "two machines": (1, 2, {"machines": 2}),
    "a target on two GPUs": (3, 2, {"free": 1_100_000}),
    "a target shared by two GPUs": (3, 3, {}),
    "a target that fits nowhere": (3, 2, {"free": 500_000})}


def launch_on_gpus(folder: Path) -> dict[str, tuple[list[int], list[dict], str]]:
    """By placement: exit codes of the ranks, what the commands wrote, and what they said."""
    chosen = ("saguaro.py", "--target", folder / "target", "--draft", folder / "draft", "--max-new-tokens", 8,
              "--dtype", "float32", "--prompt", "def f(x):", "class A:", "--batch-size", 2, "--budget", 6,
              "--lookahead", 3)
    greedy, sampled = (*chosen, "--backup", "fast"), (*chosen, "--temperature", 0.5, "--downweight", 0.5)
    results = {}
    for place, (gpus, ranks, options) in PLACEMENTS.items():
        files = [folder / f"{place}, {number}.json" for number in range(2)]
        commands = [(*command, "--json", file) for command, file in zip((greedy, sampled), files)]
        codes, said = run_ranks(folder, ranks, gpus, commands, **options)
        results[place] = codes, [json.loads(file.read_text("utf-8")) for file in files if file.exists()], said
    return results


def launch_benchmark_on_a_gpu(folder: Path) -> tuple[list[int], str]:
    """The comparison, with the target in a larger body, and the steps."""
    (folder / "prompts.jsonl").write_text('{"text": "def f(x):"}\n{"text": "class Argument:"}', "utf-8")
    command = ("bench.py", "--target", folder / "target", "--draft", folder / "draft", "--dtype", "float32", "--quick",
               "--max-new-tokens", 22, "--prompts", folder / "prompts.jsonl", "--body", "0.6b")
    codes, said = run_ranks(folder, 2, 1, [command])
    more_codes, more_said = run_ranks(folder, 1, 1, [("bench.py", "--gpu-steps")])
    return codes + more_codes, said + more_said


def run_ranks(folder: Path, ranks: int, gpus: int, commands: list, **options) -> tuple[list[int], str]:
    """Exit codes of `one_rank`, once for each rank, and what they said."""
    sockets = [socket.create_server(("localhost", 0)) for _ in commands]
    ports = [free.getsockname()[1] for free in sockets]
    for free in sockets:
        free.close()
    said = [folder / f"said by {rank}" for rank in range(ranks)]
    each = [(file, GPUS, rank, ranks, gpus, ports, commands) for rank, file in enumerate(said)]
    codes = exit_codes(one_rank, each, **options)
    return codes, "\n".join(file.read_text("utf-8") for file in said)


def exit_codes(job, arguments: list[tuple], **options) -> list[int]:
    """Of a process for each tuple of arguments, all at once."""
    processes = [FORKS.Process(target=job, args=each, kwargs=options) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
        process.kill()  # if it is still there
    return [process.exitcode for process in processes]


def one_rank(said: Path, real: list[str], rank: int, ranks: int, gpus: int, ports: list[int], commands: list,
             machines: int = 1, small_draft: int = saguaro.SMALL_DRAFT, free: int = 2 ** 36) -> None:
    """A process: a rank of one launch after the other."""
    sys.stdout = sys.stderr = open(said, "w", encoding="utf-8")
    torch.set_num_threads(1)
    here = ranks // machines
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % here),
                   "LOCAL_WORLD_SIZE": str(here), "MASTER_ADDR": "localhost",
                   "CUDA_VISIBLE_DEVICES": ",".join(real[:gpus]),
                   "NCCL_HOSTID": str(rank // here)}  # without it, NCCL sees that both machines are one
    if gpus > len(real) or free < 2 ** 36:
        stand_in(gpus, free)
    saguaro.DRAFT, saguaro.SMALL_DRAFT, torch.set_num_threads = ranks - 1, small_draft, lambda count: None
    bench.BODIES["0.6b"] = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                                head_dim=16, intermediate_size=64)
    bench.LLAMA_8B = bench.LLAMA_1B = bench.BODIES["0.6b"] | dict(vocab_size=40, tie_word_embeddings=True)
    bench.STEP_CONTEXT, bench.STEP_REPEATS, bench.COPIED = 24, 4, 2 ** 20
    bench.threads_alone, saguaro.MEASURED = lambda: [1], (1, 32)
    for port, command in zip(ports, commands):
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = list(map(str, command))
        {"saguaro.py": saguaro.main, "bench.py": bench.main}[command[0]]()
    assert not gpus or rank or OnGPU.crossings or torch.cuda.max_memory_allocated(), "the target was not on a GPU"


@slow
@pytest.mark.parametrize("place", PLACEMENTS)
def test_the_text_is_the_same_wherever_the_models_are(launched, place):
    """Greedy text with the fast backup, sampled text with the neural one."""
    codes, results, said = launched[place]
    assert ("will not overlap" in said) == (place == "one GPU, large draft") and "run eagerly" not in said
    if place == "a target that fits nowhere":
        assert codes[0] == 2 and "does not fit into the free memory of 2 GPUs" in said
        return
    assert codes == [0] * len(codes), said
    for here, there in zip(results, launched["no GPU"][1], strict=True):
        assert here["outputs"] == there["outputs"] and 0 < here["stats"]["hit_rate"] < 1
    assert results[1]["stats"]["hit_rate"] == launched["no GPU"][1][1]["stats"]["hit_rate"]


def wait_as_expected() -> None:
    """The job of the next test."""
    def meanwhile(work, *arguments):
        OnGPU.crossings.clear()
        return work(*arguments), " ".join(OnGPU.crossings)

    stand_in(1, 2 ** 36)
    forward, net = CausalLM.forward, network()
    CausalLM.forward = lambda *arguments: OnGPU.crossings.append("pass") or forward(*arguments)
    on_gpu = [copy.deepcopy(each).to("cuda") for each in (net, imitation(net, 0.15))]
    for temperature in (0, 1):
        warpers = sampling.logits_warpers(temperature)
        target, draft = TargetWorker(CausalLM(on_gpu[0]), warpers, 0), draft_worker(on_gpu[1], warpers)
        draft.start(RAGGED[:1], 60)
        outcome, replies = target.prefill(RAGGED[:1], 60, 3), {True: set(), False: set()}
        for _ in range(12):
            _, prepared = meanwhile(draft.pre_speculate)
            speculation, reply = meanwhile(draft.speculate, outcome)
            outcome, verified = meanwhile(target.verify, speculation)
            assert re.fullmatch("(in )*pass out( in)* pass pass pass", prepared), prepared
            assert re.fullmatch("(in )*pass out", verified), verified
            replies[bool(speculation.hit)].add(reply)
        assert replies[True] == {"out in"} and all(re.fullmatch("out( in)* pass pass pass", reply)
                                                   for reply in replies[False]), replies


@slow
def test_the_host_waits_for_the_gpu_once_a_verification():
    """And never while there is work that it could queue: not between a pass and its verdict, not between the passes of
    a backup."""
    assert exit_codes(wait_as_expected, [()]) == [0]


@slow
def test_the_benchmark_runs_on_a_gpu(launched):
    codes, said = launched
    assert codes == [0, 0, 0] and "in a body of" in said and "Theorem 7" in said, said
    assert len(re.findall(r"^  (target|draft), .* \d+\.\d\d$", said, re.MULTILINE)) == 5, said


if __name__ == "__main__":
    detection_table()
