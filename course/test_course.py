"""The assignment, tried out: nothing is solved when it is handed out; every solution solves exactly
its exercise, written differently, too; and plausible wrong answers are found to be wrong.

    python -m pytest course -v         each answer by its name

Only one test starts pytest in a real hand-out, which takes seconds. The others give functions of
this very program other bodies, the ones that the hand-out would hold, and call the grading tests.
"""
import ast
import csv
import functools
import io
import keyword
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache import geometric_fan_out
from cli import launch
from cli.settings import Settings
from course import grading, handout, mark, page
from course.exam import Said, failure
from course.handout import CONTENTS, EXERCISES, ROOT, missing, replaced, write_program
from course.options import PageSettings
from engine.errors import UserError
from ideas import VERIFICATIONS
from run.decoder import Decoder, make_plan
from run.job import Job

HAND_IN = ("sampling.py", "cache.py", "draft_worker.py", "saguaro.py")
FUNCTIONS = {number: [f"{exercise['module']}.{function}" for function in exercise["functions"]]
             for number, exercise in EXERCISES.items()}

# By function: a right answer, written differently.
DIFFERENT = {
    "sampling.residual": """
both = torch.minimum(p, q)
left = 1 - both.sum(-1, keepdim=True)
return torch.where((p == q).all(-1, keepdim=True), p, (p - both) / left)""",
    "sampling.verify": """
ks, bonus = [], []
for b in range(len(p)):
    k, K = 0, tokens.shape[1]
    own = q[b] if q.shape[-1] else point_mass(tokens[b], like=p[b])
    while k < K and uniforms[b, k] < acceptance_probability(p[b, k], own[k], tokens[b, k]):
        k += 1
    r = residual(p[b, k], torch.cat([own, p[b, K:]])[k])
    bonus.append(inverse_cdf(r, uniforms[b, K]))
    ks.append(k)
return torch.tensor(ks), torch.stack(bonus)""",
    "sampling.saguaro_distribution": """
z, F = q.log(), min(F, q.shape[-1])
if F == 0 or downweight == 1:
    return q
top = torch.zeros_like(q, dtype=torch.bool).scatter(-1, z.topk(F).indices, True)
weight = torch.where(top, downweight * z.exp(), z.exp())
return torch.where(weight.sum(-1, keepdim=True) > 0, weight / weight.sum(-1, keepdim=True), q)""",
    "cache.geometric_fan_out": """
a, power = acceptance_rate, 1 / (1 + miss_exponent)
series = [a ** (k * power) for k in range(lookahead + 1)]
series[-1] *= (1 - a) ** -power
share = [budget * F / sum(series) for F in series]
whole = [int(F + 1e-9) for F in share]
left = sorted(range(lookahead + 1), key=lambda k: whole[k] - share[k])
for k in left[:budget - sum(whole)]:
    whole[k] += 1
return whole""",
    "cache.likely_outcomes": """
ks, tokens = [], []
for b in range(len(candidates)):
    guesses = [(k, int(t)) for k, F in enumerate(fan_out[b].tolist())
               for t in (candidates[b, k].tolist() + [candidates[b, k, -1]] * F)[:F]]
    ks.append([k for k, _ in guesses])
    tokens.append([t for _, t in guesses])
return Outcome(torch.tensor(ks), torch.tensor(tokens))""",
    "cache.critical_batch_size": """
def gain(x):  # of the neural backup, where p^b = x
    fast, neural = ((hit_rate * E_hit + (1 - hit_rate) * tokens)
                    / (x * max(1.0, T_p) + (1 - x) * (1 + T))
                    for tokens, T in ((E_fast, T_fast), (E_neural, T_neural)))
    return neural - fast

if gain(0) >= 0:
    return math.inf
if hit_rate == 0 or gain(1) <= 0:
    return 0.0
low, high = 0.0, 1.0
for _ in range(100):
    x = (low + high) / 2
    low, high = (low, x) if gain(x) > 0 else (x, high)
return math.log(x) / math.log(hit_rate)""",
    "cache.expected_tokens": """
return (1 - acceptance_rate ** (lookahead + 1)) / (1 - acceptance_rate)""",
    "draft_worker.tree_layout": """
B, n = num_accepted.shape
slots = trunk + torch.arange(lookahead * n).view(lookahead, n)
visible = torch.zeros(B, n, trunk + lookahead * n, dtype=torch.bool)
for b in range(B):
    for j in range(n):
        visible[b, j, :length[b] + num_accepted[b, j]] = True
        visible[b, j, slots[:, j]] = True
return Tree(length[:, None] + num_accepted, slots, visible)""",
    "draft_worker.tree_pass": """
logits = []
for j, slot in enumerate(tree.slots[step]):
    visible = tree.visible[:, j:j + 1, :slot + 1]  # its own tokens to come lie above
    logits.append(model.forward(tokens[:, j:j + 1], tree.positions[:, j:j + 1] + step,
                                slot.expand(len(tokens), 1), visible))
return torch.cat(logits, 1)""",
    "draft_worker.DraftWorker.speculate": """
self.advance(speculation, outcome)
rows = range(len(outcome.bonus))
tokens, q, hit = cache.look_up(outcome)
missed = [b for b in rows if not hit[b]]
if any(not outcome.finished[b] for b in missed):
    with self.clock("backup"):
        drafted = BACKUPS[self.plan.backup](self)
    tokens[missed] = drafted[0][missed]
    q[missed] = drafted[1][missed]
return Speculation(tokens, q, torch.tensor([BACKUP if b in missed else PRIMARY for b in rows]))""",
    "draft_worker.DraftWorker.pre_speculate": """
B, K = speculation.tokens.shape
if not sum(self.plan.fan_out[PRIMARY]):
    return SpeculationCache.empty(B, self.lookahead, self.q_template)
with self.clock("trunk"):
    candidates = self.trunk_pass(speculation)
fan_out = [self.plan.fan_out[s] for s in speculation.source] if K else [[self.plan.budget]] * B
guesses = likely_outcomes(candidates, torch.tensor(fan_out))
guesses = Outcome(guesses.num_accepted.flip(1), guesses.bonus.flip(1))
start = int(self.length.max()) + K
tree = tree_layout(self.length, guesses.num_accepted, start, self.lookahead)
tokens, all_tokens, all_q = guesses.bonus, [], []
with self.clock("tree"):
    for step in range(self.lookahead):
        logits = tree_pass(self.model, tree, tokens, step)
        u = self.uniforms[PRIMARY].draw(*tokens.shape)
        tokens, q = self.sampler.sample(logits, u, self.plan.fan_out[PRIMARY][step])
        all_tokens.append(tokens)
        all_q.append(q)
return SpeculationCache(guesses, torch.stack(all_tokens, -1), torch.stack(all_q, -2))""",
    "saguaro.serve": """
draft.start(prompts, max_length)
sent, B = Speculation.empty(len(prompts)), len(prompts)
cache, outcome = draft.pre_speculate(sent), channel.receive_outcome(B)
while max(outcome.num_accepted.tolist()) >= 0:
    sent = draft.speculate(outcome=outcome, speculation=sent, cache=cache)
    channel.send_speculation(sent)
    cache, outcome = draft.pre_speculate(sent), channel.receive_outcome(B)"""}

def edits(text: str) -> list[tuple]:
    """Below each function `name | before --> after`, where \\n is a line break: edits of the answer
    above, or, where `before` is none of its, of the program's. Deeper lines go on. A name may end
    with the points that marking leaves: at least half, but where the idea is missed."""
    found = []
    for line in re.sub(r"\n {6}", " ", text.strip("\n")).splitlines():
        if not line.startswith(" "):
            function = line
            continue
        name, edit = line.strip().split(" | ", 1)
        name, left = re.fullmatch(r"(.*?)(?:, (\d+) left)?", name).groups()
        before, after = edit.replace(r"\n", "\n").split(" -->")
        found.append((function, name, before, after[1:], left and int(left)))
    return found


WRONG = edits(r"""
sampling.acceptance_probability
  q / p, 2 left | p.gather(-1, tokens) / q.gather(-1, tokens) --> q.gather(-1, tokens) /
      p.gather(-1, tokens)
  changes p | p.gather(-1, tokens) / q.gather(-1, tokens) --> p.div_(q).gather(-1, tokens)
  token numbers of 16 bits | tokens = tokens[..., None] --> tokens = tokens[...,
      None].to(torch.int16).long()
sampling.residual
  not normalised, 2 left | (p - both) / left --> p - both
  nothing where p = q | (p == q).all(-1, keepdim=True) --> left < 0
  nothing where p is near q | (p == q) --> torch.isclose(p, q, atol=1e-3)
  p = q is decided for the batch | (p == q).all(-1, keepdim=True) --> (p == q).all()
  p = q in any row | (p == q).all(-1, keepdim=True) --> (p == q).all(-1, keepdim=True).any()
  p = q in all rows of a dimension | (p == q).all(-1, keepdim=True) --> (p == q).all(-1,
      keepdim=True).all(0)
  changes q | torch.minimum(p, q) --> torch.where(p == q, q, q.clamp_(max=p))
  nothing where p is near q, token by token | (p == q) --> torch.isclose(p, q)
sampling.verify
  u equal to the probability accepts, 11 left | k] < --> k] <=
  t* of shape [B 1], 11 left | torch.stack(bonus) --> torch.stack(bonus)[:, None]
  t* as real numbers, 11 left | torch.stack(bonus) --> torch.stack(bonus).double()
  from the last p in every row, if a row accepts all, 10 left | r = residual(p[row, num_accepted],
      q[row, num_accepted]) --> r = residual(p[row, num_accepted], q[row, num_accepted])\n    if
      (num_accepted == lookahead).any():\n        r = p[:, -1]
  never from p, if a row rejects, 10 left | q = torch.cat([q, torch.zeros_like(p[:, :1])], 1) -->
      last = q[:, -1:] * (num_accepted < lookahead).any()\n    q = torch.cat([q, last if lookahead
      else torch.zeros_like(p)], 1)
  point masses, all accepted: p without the last token, 11 left | torch.cat([own, p[b, K:]]) -->
      torch.cat([own, own[-1:] if K and not q.shape[-1] else p[b, K:]])
  bonus token from p, 4 left | residual(p[b, k], torch.cat([own, p[b, K:]])[k]) --> p[b, k]
  after all accepted, the residual against the last q, 9 left | torch.cat([own, p[b, K:]]) -->
      torch.cat([own, own[K - 1:], p[b, K:]])
  counts what follows a rejection, 2 left | .cumprod(1).sum(1) --> .sum(1)
  a batch accepts what all its rows accept, 6 left | return torch.tensor(ks) --> return
      torch.tensor([min(ks)] * len(ks))
  a number for one row | return num_accepted, --> return num_accepted.squeeze(),
  changes the uniform numbers | accepted = uniforms[:, :lookahead] < --> accepted = uniforms[:,
      :lookahead].neg_().neg_().add_(1).sub_(1) <
  changes p | r = residual(p[row, num_accepted], q[row, num_accepted]) --> r =
      residual(p[row, num_accepted], q[row, num_accepted])\n    p[row, num_accepted] = r
  draws a token of probability 0 with u = 0 | inverse_cdf(r, uniforms[b, K]) -->
      (r.cumsum(-1) < uniforms[b, K] * r.sum()).sum()
  uniform numbers in float32 | uniforms[:, lookahead]) --> uniforms[:,
      lookahead].float().double())
  a q of width 0 with K = 0 | if not q.shape[-1] --> if lookahead and not q.shape[-1]
  a uniform numbers of six digits | uniforms[:, lookahead]) --> uniforms[:,
      lookahead].mul(1e6).round() / 1e6)
sampling.saguaro_distribution
  C = 0 is decided for the batch | torch.where(total > 0, sigma / total, q) --> sigma / total if
      total.all() else q
  fails in float32 | downweight * q.gather(-1, cached)) --> downweight * q.gather(-1,
      cached).double())
  changes q | sigma = q.scatter( --> old = q\n    q = q.clone()\n    sigma = old.scatter_(
  of equally likely tokens all, 10 left | top = torch.zeros_like(q, dtype=torch.bool).scatter(-1,
      z.topk(F).indices, True) --> top = z >= z.topk(F).values[..., -1:]
  more than F tokens, where some are equally likely | cached = q.topk(min(F,
      q.shape[-1])).indices\n    sigma = q.scatter(-1, cached, downweight * q.gather(-1, cached))
      --> least = q.topk(min(F, q.shape[-1])).values[..., -1:]\n    sigma = torch.where(q >= least,
      downweight * q, q)
sampling.Sampler.sample
  draws from sigma, reports q, 5 left | return inverse_cdf(q, uniforms), q --> return inverse_cdf(q,
      uniforms), self.probabilities(logits)
  draws from q, reports sigma | return inverse_cdf(q, uniforms) --> return
      inverse_cdf(self.probabilities(logits), uniforms)
  temperature, top-k and top-p ignored | self.probabilities(logits), F --> logits.softmax(-1), F
  no top-k beside a temperature | q = saguaro --> self.warpers = self.warpers[:1]\n        q =
      saguaro
  no top-p | q = saguaro --> self.warpers = [w for w in self.warpers if not hasattr(w,
      'top_p')]\n        q = saguaro
  C before the temperature | saguaro_distribution(self.probabilities(logits), F, self.downweight)
      --> self.probabilities(\n            saguaro_distribution(logits.softmax(-1), F,
      self.downweight).log())
  the likeliest after C | return logits.argmax(-1) --> return
      saguaro_distribution(logits.softmax(-1), F, self.downweight).argmax(-1)
  sums in float32, 10 left | return inverse_cdf(q, uniforms), q --> cdf =
      q.cumsum(-1)\n        return torch.searchsorted(cdf.double(), uniforms[..., None] * cdf[...,
      -1:], right=True).squeeze(-1).clamp(max=q.shape[-1] - 1), q
  sums in float32, the likeliest first | return inverse_cdf(q, uniforms), q --> sorted_q,
      ids = q.sort(-1, descending=True)\n        cdf = sorted_q.cumsum(-1)\n        place =
      torch.searchsorted(cdf.double(), uniforms[..., None] * cdf[..., -1:],
      right=True)\n        return ids.gather(-1, place.clamp(max=q.shape[-1] - 1)).squeeze(-1), q
cache.acceptance_distribution
  1 - a for k = K, too, 8 left | + [a ** lookahead] --> + [a ** lookahead * (1 - a)]
cache.best_fan_out
  the first row's for all | likelihood[..., None] --> likelihood[:1, :, None]
  a budget above (K + 1) n | min(budget, probability.shape[1]) --> budget
cache.geometric_fan_out
  rounds and loses count, 7 left | return whole --> return [round(F) for F in share]
  rounded, and the rest is F_0 | return whole --> whole = [round(F) for F in share]\nwhole[0] +=
      budget - sum(whole)\nreturn whole
cache.likely_outcomes
  guesses wrap round, 8 left | (candidates[b, k].tolist() + [candidates[b, k, -1]] * F)[:F] -->
      (candidates[b, k].tolist() * (F + 1))[:F]
  changes the fan-outs | guessed = place < fan_out[..., None] --> fan_out -= 1\n    guessed = place
      <= fan_out[..., None]
cache.matches
  k or t* will do, 8 left | same_k & same_bonus --> same_k | same_bonus
  one number for k and t* | same_k & same_bonus --> (100 * guesses.num_accepted +
      guesses.bonus\n            == (100 * outcome.num_accepted + outcome.bonus)[:, None])
  changes the guesses | return same_k & same_bonus --> guesses.bonus.mul_(same_k)\n    return same_k
      & same_bonus
  2^17 k + t* | same_k & same_bonus --> (2**17 * guesses.num_accepted +
      guesses.bonus\n            == (2**17 * outcome.num_accepted + outcome.bonus)[:, None])
  k + t* 10^-9 | same_k & same_bonus --> (guesses.num_accepted + 1e-9 *
      guesses.bonus\n            == (outcome.num_accepted + 1e-9 * outcome.bonus)[:, None])
  the first row's guesses for all, 8 left | same_k & same_bonus --> (
      guesses.num_accepted[:1] == outcome.num_accepted[:, None]) & (
      guesses.bonus[:1] == outcome.bonus[:, None])
cache.SpeculationCache.look_up
  hits as 0 and 1, 7 left | match.any(1) --> match.any(1).long()
  q of the first branch, 4 left | self.q[row, branch] --> self.q[:, 0]
  the first row's branch for all | match.long().argmax(1) -->
      match.long().argmax(1)[:1].expand(len(match))
  fails with one row | match.any(1) --> match.squeeze().any(1)
cache.expected_tokens
  no bonus token | lookahead + 1 --> lookahead
cache.throughput
  a miss delays its own row, 8 left | hit_rate ** batch_size --> hit_rate
  half a row is none | hit_rate ** batch_size --> hit_rate ** max(1, batch_size)
  to first order in the misses | hit_rate ** batch_size --> max(0, 1 - batch_size * (1 - hit_rate))
      if hit_rate > 0.99 else hit_rate ** batch_size
cache.critical_batch_size
  fails without a cache | hit_rate == 0 or  --> 
  b* up to 1000 | return math.log(x) / math.log(hit_rate) --> return min(1000, math.log(x) /
      math.log(hit_rate))
  whole batches | return math.log(x) / math.log(hit_rate) --> return max(1, math.log(x) /
      math.log(hit_rate))
draft_worker.tree_layout
  a token too many of the trunk, 9 left | torch.arange(trunk) < fork --> torch.arange(trunk) <= fork
  a trunk of its own, 15 left | B, n = num_accepted.shape --> B, n = num_accepted.shape\ntrunk =
      int(length.max()) + lookahead
  positions are one too large | return Tree(length[:, None] + num_accepted, --> return
      Tree(length[:, None] + num_accepted + 1,
  branches see the whole trunk | :length[b] + num_accepted[b, j] --> :trunk
  a token too few of the trunk | torch.arange(trunk) < fork[..., None] -->
      torch.arange(trunk) < fork[..., None] - 1
  not written, 5 left | rows, n = num_accepted.shape --> raise NotImplementedError("exercise 7")
  changes the lengths | fork = length[:, None] + num_accepted --> fork = length[:, None] +
      num_accepted\n    length += 1
draft_worker.tree_pass
  not written, 6 left | still_empty = --> raise NotImplementedError("exercise 7")\n    still_empty =
  changes the tree, 15 left | still_empty = --> tree.visible[..., tree.slots[step + 1:].flatten()] =
      False\n    still_empty =
  changes the positions | tree.positions + step, slots, visible) --> tree.positions.add_(step),
      slots, visible)
draft_worker.DraftWorker.speculate
  the text does not grow, 2 left | self.advance(speculation, outcome) --> pass
  finished rows wait for the backup | any(not outcome.finished[b] for b in missed) --> missed
  source as booleans, 7 left | PRIMARY for b in rows] --> PRIMARY for b in rows]).bool(
  source as a list, 7 left | torch.tensor([BACKUP if b in missed else PRIMARY for b in rows]) -->
      [BACKUP if b in missed else PRIMARY for b in rows]
  finished texts grow, 7 left | self.advance(speculation, outcome) --> self.advance(speculation,
      outcome)\nself.length += outcome.finished
  drafts before the clock runs, 7 left | with self.clock("backup"):\n        drafted =
      BACKUPS[self.plan.backup](self) --> drafted = BACKUPS[self.plan.backup](self)\n    with
      self.clock("backup"):\n        pass
  always the neural backup | BACKUPS[self.plan.backup](self) --> neural_backup(self)
  nothing is timed, 7 left | with self.clock("backup"): --> if True:
  who finished hides who missed | if any(not outcome.finished[b] for b in missed): --> if missed and
      not outcome.finished.any():
  the last row hides who missed | if any(not outcome.finished[b] for b in missed): --> if missed and
      not outcome.finished[-1]:
  changes the outcome | return Speculation( --> outcome.num_accepted.clamp_(min=0)\nreturn
      Speculation(
  changes the cache | return Speculation( --> cache.tokens[:] = 0\nreturn Speculation(
  fails with one row | tokens, q, hit = cache.look_up(outcome) --> tokens, q, hit =
      cache.look_up(outcome)\nhit = hit.squeeze()
  fails when greedy |     q[missed] = drafted[1][missed] -->     q[missed] = drafted[1][missed] *
      (drafted[1].max() > 0)
  greedy, a backup without a model | tokens = tokens.where(keep, backup_tokens) --> tokens =
      tokens.where(keep | (backup_q.shape[-1] == 0), backup_tokens)
draft_worker.DraftWorker.pre_speculate
  numbers that no seed decides, 13 left | self.uniforms[PRIMARY].draw(*tokens.shape) -->
      torch.rand(tokens.shape).double()
  one number for all rows | draw(*tokens.shape) -->
      draw(tokens.shape[1]).expand(tokens.shape)
  F of the next step, 12 left | [PRIMARY][step] --> [PRIMARY][step + 1]
  q of point masses in full | torch.stack(all_q, -2) --> torch.stack([q if q.shape[-1] else
      q.new_zeros(*q.shape[:-1], 9) for q in all_q], -2)
  no downweighting | self.plan.fan_out[PRIMARY][step] --> 0
  the primary's shape after a backup, 13 left | self.plan.fan_out[s] --> self.plan.fan_out[PRIMARY]
  shapes exchanged | self.plan.fan_out[s] --> self.plan.fan_out[1 - s]
  the longer row's trunk is overwritten | self.length.max() --> self.length.min()
  tokens of another branch, 5 left | torch.stack(all_tokens, -1) --> torch.stack(all_tokens,
      -1).roll(1, 1)
  every step begins with t* | tree_pass(self.model, tree, tokens, step) --> tree_pass(self.model,
      tree, guesses.bonus, step)
  stacked in front | torch.stack(all_tokens, -1), torch.stack(all_q, -2) -->
      torch.stack(all_tokens), torch.stack(all_q)
  drafts without a budget | if not sum(self.plan.fan_out[PRIMARY]): --> if False:
  two trunk passes | candidates = self --> candidates = self.trunk_pass(speculation)\n    candidates
      = self
  nothing is timed, 14 left | with self.clock("tree"): --> if True:
  the tree grows after its clock, 14 left | with self.clock("tree"): --> with
      self.clock("tree"):\n    pass\nif True:
  every second round shares | u = self.uniforms[PRIMARY].draw(*tokens.shape) --> u =
      self.uniforms[PRIMARY].draw(*tokens.shape)\n        self.old = getattr(self, "old", []) +
      [u]\n        if len(self.old) % (2 * self.lookahead) > self.lookahead:\n            u =
      self.old[-1 - self.lookahead]
  branches share in reverse in the next row | u = self.uniforms[PRIMARY].draw(*tokens.shape) --> u =
      self.uniforms[PRIMARY].draw(*tokens.shape)\n        u[1:] = u[:-1].flip(1)
  one step and the next branch share | u = self.uniforms[PRIMARY].draw(*tokens.shape) --> u =
      self.uniforms[PRIMARY].draw(*tokens.shape)\n        u[:, 1:] = before[:, :-1] if step else
      u[:, 1:]\n        before = u.clone()
  one number for all branches in round 0 | u = self.uniforms[PRIMARY].draw(*tokens.shape) --> u =
      self.uniforms[PRIMARY].draw(*tokens.shape)\n        u = u if K else u[:, :1].expand_as(u)
  changes the text | guesses = likely_outcomes( --> self.text[:, -1] = 9\nguesses = likely_outcomes(
  changes the speculation | guesses = likely_outcomes( --> speculation.tokens[:, -1:] = 9\nguesses =
      likely_outcomes(
  the first row's source for all | for s in speculation.source] --> for s in [speculation.source[0]]
      * B]
  after 300 rounds the same numbers | u = self.uniforms[PRIMARY].draw(*tokens.shape) --> u =
      self.uniforms[PRIMARY].draw(*tokens.shape)\n        self.old = getattr(self, "old", []) +
      [u]\n        u = self.old[(len(self.old) - 1) % (300 * self.lookahead)]
  numbers of 32 bits | u = self.uniforms[PRIMARY].draw(*tokens.shape) --> u =
      self.uniforms[PRIMARY].draw(*tokens.shape).float().double()
saguaro.serve
  waits, and then pre-speculates, 2 left | \n        cache = draft.pre_speculate(speculation)  #
      while the target verifies it\n        outcome = channel.receive_outcome(len(prompts)) -->
      \n        outcome = channel.receive_outcome(len(prompts))\n        cache =
      draft.pre_speculate(speculation)
  waits for the rows that are left, 3 left | outcome = channel.receive_outcome(len(prompts)) -->
      ended = locals()["outcome"].finished.sum() if "outcome" in locals() else 0\n        outcome =
      channel.receive_outcome(len(prompts) - int(ended))
  answers the rows that are left, 3 left | draft.speculate(speculation, outcome, -->
      draft.speculate(speculation, Outcome(*(part[~outcome.finished] for part in outcome)),
  the cache of the round before | cache = draft.pre_speculate(speculation) --> old =
      locals().get('new')\n        new = draft.pre_speculate(speculation)\n        cache = old or
      new
  prepares for an empty speculation, 3 left | draft.pre_speculate(speculation) -->
      draft.pre_speculate(Speculation.empty(len(prompts)))
  forgets what was verified | draft.speculate(speculation, -->
      draft.speculate(Speculation.empty(len(prompts)),
  stops with the first row | finished.all() --> finished.any()
  never stops | return\n        speculation = --> pass\n        speculation =
  the draft never reads the prompts | draft.start(prompts, max_length) --> pass
  too short a text | draft.start(prompts, max_length) --> draft.start(prompts, 9)
  prepares once more | return\n        speculation = --> return
      draft.pre_speculate(speculation)\n        speculation =
  stops when as many are accepted as rows are finished | outcome.finished.all() -->
      outcome.num_accepted.sum() < 0
  stops when the first row is finished | finished.all() --> finished[0]
  stops when the last row is finished | finished.all() --> finished[-1]
  stops when two rows are finished | outcome.finished.all() --> outcome.finished.sum() >= min(2,
      len(prompts))
  stops when one row is left | outcome.finished.all() --> outcome.finished.sum() >= max(1,
      len(prompts) - 1)
  changes the outcome |         channel.send_speculation(speculation)
      -->         channel.send_speculation(speculation)\n        outcome.num_accepted.zero_()
  real numbers as tokens | speculation = Speculation.empty(len(prompts)) --> speculation =
      Speculation(*(part.double() for part in Speculation.empty(len(prompts))))
  stops when most rows are finished, and no token is accepted | outcome.finished.all() -->
      outcome.num_accepted.double().mean() < -0.75
  stops after 200 rounds | outcome.finished.all(): --> outcome.finished.all() or
      draft.speculate.call_count > 200:
  an error is the end | outcome = channel.receive_outcome(len(prompts)) -->
      try:\n             outcome = channel.receive_outcome(len(prompts))\n        except
      OSError:\n            return
""")
RIGHT = edits(r"""
sampling.residual
  in float64 | (p - both) / left --> ((p - both) / left).double()
sampling.verify
  compares products | accepted = uniforms[:, :lookahead] < acceptance --> s = tokens[...,
      None]\n    accepted = (uniforms[:, :lookahead] * q.gather(-1, s)[..., 0]\n                <
      p[:, :lookahead].gather(-1, s)[..., 0])
  draws in the order of probability | bonus.append(inverse_cdf(r, uniforms[b, K])) --> order =
      r.argsort(descending=True)\n    bonus.append(order[inverse_cdf(r[order], uniforms[b, K])])
sampling.saguaro_distribution
  by rank | sigma = q.scatter(-1, cached, downweight * q.gather(-1, cached)) --> rank =
      q.argsort(descending=True, stable=True).argsort()\n    sigma = torch.where(rank < F,
      downweight * q, q)
sampling.Sampler.sample
  token numbers of 32 bits | return inverse_cdf(q, uniforms), q --> return inverse_cdf(q,
      uniforms).int(), q.double()
  from the last token on | return inverse_cdf(q, uniforms) --> last = q.shape[-1] -
      1\n        return last - inverse_cdf(q.flip(-1), uniforms)
cache.geometric_fan_out
  rounded down, the rest by remainder | return whole --> return whole[:]
  a tensor | return whole --> return torch.tensor(whole)
cache.likely_outcomes
  the last k first | torch.tensor(ks), torch.tensor(tokens) --> torch.tensor(ks).flip(1),
      torch.tensor(tokens).flip(1)
cache.SpeculationCache.look_up
  zeros after a miss | return self.tokens[row, branch], self.q[row, branch], match.any(1) --> hit =
      match.any(1)\n        return (self.tokens[row, branch] * hit[:,
      None],\n                self.q[row, branch] * hit[:, None, None], hit)
draft_worker.tree_layout
  branch after branch | .view(lookahead, n) --> .view(n, lookahead).T
draft_worker.DraftWorker.speculate
  a finished row is no miss | if not hit[b]] --> if not hit[b] and not outcome.finished[b]]
draft_worker.DraftWorker.pre_speculate
  all numbers at once | u = self.uniforms[PRIMARY].draw(*tokens.shape) --> us = us if step else
      self.uniforms[PRIMARY].draw(*tokens.shape, self.lookahead)\n        u = us[..., step]
saguaro.serve
  an empty speculation of its own, in float64 | speculation =
      Speculation.empty(len(prompts))\n    while --> B = len(prompts)\n    speculation =
      Speculation(torch.zeros(B, 0).long(), torch.zeros(B, 0, 0).double(),
      torch.zeros(B).long())\n    while
  an empty speculation of its own, with the draft's q | speculation =
      Speculation.empty(len(prompts))\n    while --> B = len(prompts)\n    speculation =
      Speculation(torch.zeros(B, 0).long(), draft.q_template.expand(B, 0, -1),
      torch.zeros(B).long())\n    while
""")


def module_of(function: str) -> str:
    return (ROOT / f"{function.split('.')[0]}.py").read_text("utf-8")


def bodies(function: str) -> list[str]:
    """The lines of a function below its docstring."""
    name = function.split(".")[-1]
    module = module_of(function)
    node = next(node for node in ast.walk(ast.parse(module)) if getattr(node, "name", "") == name)
    lines = module.splitlines()[node.body[0].end_lineno:node.end_lineno]
    return [line.strip() for line in lines]


def with_body(function: str, body: str) -> str:
    """The module of a function, with another body for it."""
    return replaced(module_of(function), function.split(".", 1)[1], body)


def install(monkeypatch, function: str, source: str) -> None:
    """Let a function of this program do, wherever it was imported, what it does in this source."""
    module, *names = function.split(".")
    target, code = sys.modules[module], compile(source, function, "exec")
    for name in names:
        target = getattr(target, name)
        code = next(part for part in code.co_consts if getattr(part, "co_name", "") == name)
    monkeypatch.setattr(target, "__code__", code)


def number_of(function: str) -> str:
    return next(number for number in EXERCISES if function in FUNCTIONS[number])


@functools.cache
def program_says(name: str, seed: int) -> list[Said]:
    """What this very program says in a test: asked before a function gets another body."""
    return grading.exam_of(name, seed)


def solution(name: str, seed: int) -> list:
    return [each.value for each in program_says(name, seed)]


def fault_in(name: str, seed: int = grading.SEED) -> str:
    mine = grading.exam_of(name, seed)
    return failure(mine, [each.value for each in mine], solution(name, seed))


def names_of(number: str) -> list[str]:
    """The tests of an exercise."""
    return [name for name, test in grading.TESTS.items() if test.exercise == number]


def fault(number: str) -> str:
    """What the tests of one exercise first find, or ""."""
    faults = map(fault_in, names_of(number))
    return next(filter(None, faults), "")


def asked_with(function: str) -> list[str]:
    """The tests in which marking asks this function."""
    number = number_of(function)
    _, function = function.split(".", 1)
    return [name for name in names_of(number) if function in mark.asked(name, number)]


MARKED = 1  # the seed of marking
SECONDS = {}  # that each test takes


@pytest.fixture(autouse=True, scope="module")
def solutions():
    for name in grading.TESTS:
        began = time.perf_counter()
        solution(name, grading.SEED)
        SECONDS[name] = time.perf_counter() - began


# ---- exercises ----

NEEDS = {"2": ["1", "2"], "8a": ["3", "5", "8a"], "8b": ["3", "5", "7", "8b"]}


@pytest.mark.slow
@pytest.mark.parametrize("number", EXERCISES)
def test_what_is_put_back_passes_and_nothing_else(monkeypatch, number):
    """The second solution, where there is one."""
    put_back = NEEDS.get(number, [number])
    for exercise in EXERCISES:
        for function in FUNCTIONS[exercise]:
            if exercise not in put_back:
                install(monkeypatch, function, with_body(function, missing(exercise)))
            elif function in DIFFERENT:
                install(monkeypatch, function, with_body(function, DIFFERENT[function]))
    assert [number for number in EXERCISES if not fault(number)] == put_back


def edited(function: str, before: str, after: str) -> str:
    """The module of a function, with this edit of the second solution, or else of the first."""
    body = DIFFERENT.get(function, "")
    if before in body:
        return with_body(function, body.replace(before, after))
    assert before in module_of(function)
    return module_of(function).replace(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("function, mistake, right, wrong, left", WRONG)
def test_wrong_answers_fail_and_a_slip_costs_its_own_points(
        monkeypatch, function, mistake, right, wrong, left):
    """The latter as `mark` counts them, with other arguments than the hand-out's."""
    number = number_of(function)
    asked = asked_with(function)
    for name in asked if left else ():
        program_says(name, MARKED)
    install(monkeypatch, function, edited(function, right, wrong))
    assert any(map(fault_in, sorted(asked, key=SECONDS.get)))  # the fastest first
    faults = {}
    for name in asked if left else ():
        mine = [each.value for each in grading.exam_of(name, MARKED)]
        faults[name] = mark.fault_in(mine, program_says(name, MARKED))
    lost = sum(grading.TESTS[name].points for name in faults if faults[name])
    assert not left or EXERCISES[number]["points"] - lost == left, faults
    assert all("; yours" in said and "; expected" in said for said in faults.values() if said)


@pytest.mark.parametrize("function, variant, before, after, _", RIGHT)
def test_right_answers_pass(monkeypatch, function, variant, before, after, _):
    number = number_of(function)
    for other in DIFFERENT.keys() & set(FUNCTIONS[number]):
        install(monkeypatch, other, with_body(other, DIFFERENT[other]))
    install(monkeypatch, function, edited(function, before, after))
    assert not fault(number)


ALIAS = """
def table(r):  # the share of each column that is its own token's, and whose the rest is
    share, other = [len(r) * x for x in r.tolist()], [*range(len(r))]
    small = [token for token in other if share[token] < 1]
    large = [token for token in other if share[token] >= 1]
    while small and large:
        token = small.pop()
        other[token] = large[-1]
        share[large[-1]] -= 1 - share[token]
        if share[large[-1]] < 1:
            small.append(large.pop())
    return share, other

tables = {}"""
DRAWN = """
    tables[r.numpy().tobytes()] = tables.get(r.numpy().tobytes()) or table(r)
    share, other = tables[r.numpy().tobytes()]
    column = int(uniforms[b, K] * len(r))
    own = uniforms[b, K] * len(r) - column < share[column]
    bonus.append(torch.tensor(column if own else other[column]))"""


@pytest.mark.slow
def test_an_alias_method_draws_the_bonus_token_as_well(monkeypatch):
    body = DIFFERENT["sampling.verify"]
    drawn = "\n    bonus.append(inverse_cdf(r, uniforms[b, K]))"
    assert drawn in body
    assert not fault_of(monkeypatch, "sampling.verify", ALIAS + body.replace(drawn, DRAWN), "2")


@pytest.mark.parametrize("number", EXERCISES)
def test_an_empty_submission_gets_no_points(monkeypatch, number):
    """And `mark`, which has only its values, says that it is not attempted."""
    for body, said in (missing(number), "NotImplementedError"), ("return None", "yours"):
        for function in FUNCTIONS[number]:
            install(monkeypatch, function, with_body(function, body))
        for name in names_of(number):
            assert said in fault_in(name)


def test_the_points_of_the_tests_are_those_of_the_exercises():
    for number, exercise in EXERCISES.items():
        points = [grading.TESTS[name].points for name in names_of(number)]
        assert exercise["points"] == sum(points)


def fault_of(monkeypatch, function: str, answer: str, number: str) -> str:
    install(monkeypatch, function, with_body(function, answer))
    return fault(number)


def test_failures_say_what_was_asked_and_expected(monkeypatch):
    said = fault_of(monkeypatch, "cache.throughput", "return {}['a key']", "6")
    for part in ("a verification hides T_p", "arguments hit_rate = 0.", "T_b = ",
                 "yours     KeyError: 'a key' (throughput, line "):
        assert part in said
    said = fault_of(monkeypatch, "sampling.verify", "return torch.zeros(len(p)), 0", "2")
    shapes = re.search(r"uniforms = tensor\(\[\[(.*?)\]", said)[1].count(",") + 1
    assert shapes == 2 and "p = tensor([[[" in said  # K + 1, in the test with K = 1
    body = DIFFERENT["draft_worker.tree_layout"].replace("slots[:, j]", "slots")
    said = fault_of(monkeypatch, "draft_worker.tree_layout", body, "7")
    assert re.match(r"branch 0 of row 0 sees slot \d+; all of tree_layout, what is seen of", said)
    body = DIFFERENT["draft_worker.DraftWorker.speculate"]
    body = body.replace("self.advance(speculation, outcome)", "").replace(
        "return Spec", "self.advance(speculation, outcome)\nreturn Spec")
    said = fault_of(monkeypatch, "draft_worker.DraftWorker.speculate", body, "8a")
    assert said.startswith("the backup drafted after the old text")


SAID = (  # by wrong answer: in the first line of what is found
    ("sampling.Sampler.sample", "draws from sigma, reports q", "the reported q of sample"),
    ("sampling.Sampler.sample", "draws from q, reports sigma",
     "drawn tokens' shares, by 400 uniform numbers"),
    ("cache.geometric_fan_out", "rounds and loses count", "the sum F_0 + .. + F_K of geometric"),
    ("cache.matches", "k or t* will do", "the guess (k, t*) = ["),
    ("draft_worker.DraftWorker.pre_speculate", "F of the next step",
     "the q reported of s_1 is that with F = "),
    ("draft_worker.DraftWorker.pre_speculate", "no downweighting", "F = 0; after a hit it is "),
    ("draft_worker.DraftWorker.pre_speculate", "the longer row's trunk is overwritten",
     "s_1 is that after another text. Where does the tree begin?"),
    ("draft_worker.DraftWorker.pre_speculate", "every step begins with t*",
     "s_2 is that after another text."),
    ("draft_worker.DraftWorker.pre_speculate", "one number for all rows",
     "rows that are not drawn alike; draws, rows"),
    ("draft_worker.DraftWorker.pre_speculate", "one step and the next branch share",
     "by (round, row, branch, step) = (0, 0, 0, 0) and (0, 0, 1, 1); draws, rounds"),
    ("draft_worker.DraftWorker.pre_speculate", "stacked in front", "the shapes of guesses [B, n]"),
    ("saguaro.serve", "waits, and then pre-speculates", "call 1 of `serve` after `start`"))


@pytest.mark.parametrize("function, mistake, said", SAID)
def test_failures_tell_mistakes_apart(monkeypatch, function, mistake, said):
    right, wrong = next(answer[2:4] for answer in WRONG if answer[:2] == (function, mistake))
    install(monkeypatch, function, edited(function, right, wrong))
    assert said in fault(number_of(function)).splitlines()[0]


def test_a_failure_is_not_blamed_on_the_next_test(monkeypatch):
    """The next one's budget is 0, so that it reads no clock but its own."""
    body = DIFFERENT["draft_worker.DraftWorker.pre_speculate"]
    said = fault_of(monkeypatch, "draft_worker.DraftWorker.pre_speculate",
                    body.replace("u = self.uniforms[PRIMARY]", "u = self.no_such_stream"), "8b")
    assert "AttributeError" in said
    name = "pre_speculate, no budget"
    assert not fault_in(name)


@pytest.mark.parametrize("seed", range(3))
def test_fan_outs_are_asked_where_the_program_is_nowhere_a_guess_away_from_theorem_12(
        monkeypatch, seed):
    asked = []
    monkeypatch.setitem(grading.FUNCTIONS, "geometric_fan_out",
                        lambda budget, lookahead, acceptance_rate, miss_exponent: asked.append(
                            (budget, lookahead, acceptance_rate, miss_exponent)) or [budget])
    for name in grading.TESTS:
        if name.startswith("geometric_fan_out"):
            grading.exam_of(name, seed)
    assert len(asked) > 100
    for budget, K, a, r in set(asked):
        closed = [a ** (k / (1 + r)) for k in range(K)] + [(a ** K / (1 - a)) ** (1 / (1 + r))]
        for F, theorem in zip(geometric_fan_out(budget, K, a, r), closed):
            assert abs(F - budget * theorem / sum(closed)) < 1


COUNTED = ("tree_pass, positions", "later steps are hidden", "the source", "the clock",
           "no budget", "p_hit of 0", "rows", "branches", "steps", "and all of these",
           "hundreds of rounds", "the order", "sample, float32, V = 66,000")  # whatever is asked


@pytest.mark.slow
def test_the_solution_raises_nothing_and_another_seed_asks_other_things():
    for name in grading.TESTS:
        said = grading.exam_of(name, grading.SEED + 1, solved=True)
        values = [each.value for each in said]
        assert not failure(said, values, values), name
        if not name.endswith(COUNTED):
            assert values != solution(name, grading.SEED), name


# ---- the hand-out ----

def test_a_hand_out_shows_no_solution_before_it_is_asked_to(tmp_path):
    write_program(tmp_path, list(EXERCISES))
    given = {file.relative_to(tmp_path).as_posix(): file.read_text("utf-8", "ignore")
             for file in tmp_path.rglob("*") if file.suffix in (".py", ".md", ".toml", ".ini")}
    assert {"test_exercises.py", "SHEET.md", "LAB.md", "docs/WORDS.md", "values.toml"} < set(given)
    assert not any(path.name.startswith(".") for path in tmp_path.rglob("*"))  # `cp *` has all
    assert not (tmp_path / "expected.json").exists()  # `write_expected` adds it
    assert given["SHEET.md"] == (ROOT / "course/SHEET.md").read_text("utf-8")
    assert not {"README.md", "handout.toml", "ideas/block.py"} & set(given)  # block: verifies, too
    assert not [*tmp_path.glob("figures/*.svg"), *tmp_path.rglob("*.pyc")]
    assert (tmp_path / "tiny/target/model.safetensors").is_file()
    for number, exercise in EXERCISES.items():
        row = f"| {number} | {exercise['title']} |"
        assert any(line.startswith(row) and f"| {exercise['points']} |" in line
                   for line in given["SHEET.md"].splitlines()), row
        module = given[f"{exercise['module']}.py"]
        assert module.count(missing(number)) == len(exercise["functions"])
    assert sum(exercise["points"] for exercise in EXERCISES.values()) == 100
    whole = "".join((ROOT / file).read_text("utf-8") for file in HAND_IN)
    holes = "".join(given[file] for file in (*HAND_IN, "test_exercises.py"))
    for function in (name for names in FUNCTIONS.values() for name in names):
        for line in bodies(function):
            assert len(line) < 30 or holes.count(line) < whole.count(line), line
            value = line.split(" = ")[-1]
            assert len(value) < 20 or value not in given["test_exercises.py"], line
    for file in HAND_IN:
        compile(given[file], file, "exec")
    for formula in ("a^k", "F_0 a^", "(1 - a)", "p E_hit", "C exp", "largest gains"):
        assert not any(formula in given[file] for file in ("cache.py", "sampling.py")), formula


@pytest.mark.parametrize("module, names", (
    (handout, ["\u0141ukasz", "--solutions"]),  # \xff: not in UTF-8
    (mark, ["\u0141ukasz", os.fsdecode(b"\xff"), "--csv", "marks", "--only", "6"])))
def test_names_are_printed_whatever_the_encoding_of_the_output_is(
        module, names, tmp_path, monkeypatch):
    for name in names[:2] if module is mark else []:
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command", *names])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
    module.main()
    sys.stdout.flush()
    printed = sys.stdout.buffer.getvalue()
    assert rb"\u0141ukasz" in printed and (rb"\udcff" in printed) == (module is mark)


def test_contracts_name_what_the_draft_has():
    """In the docstrings that students get in exercise 8."""
    draft, *_ = grading.start(grading.Exam("", "", 0), [[1, 1], [2, 0]], 1)
    said = "".join(change["text"] for change in CONTENTS["docstring"])
    names = set(re.findall(r"self\.(\w+)", said))
    assert len(names) > 2 and all(hasattr(draft, name) for name in names), names


def names_in(code: str) -> set[str]:
    """What a module defines, uses or imports, and the words in its strings, docstrings apart."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        fields = dict(ast.iter_fields(node))
        if isinstance(fields.get("value"), ast.Constant) and isinstance(node, ast.Expr):
            fields["value"].value = ""  # a docstring: it is walked later, and says nothing
        for field in ("id", "attr", "name", "arg", "module", "value"):
            if isinstance(fields.get(field), str):
                names.update(re.findall(r"\w+", fields[field]))
    return names


def test_what_the_hand_out_names_is_there(tmp_path):
    """Modules; and names between backquotes in docstrings, comments, hints and sheets."""
    write_program(tmp_path, list(EXERCISES))
    given = {file.name: file.read_text("utf-8") for file in tmp_path.rglob("*")
             if file.suffix in (".py", ".md", ".toml") and file.parent.name != "tiny"}
    files = {file.name for part in CONTENTS["afterwards"] for file in ROOT.glob(part)} | set(given)
    there = {*dir(torch), *dir(torch.Tensor), *keyword.kwlist}
    for file, text in given.items():
        if file.endswith(".py"):
            there |= names_in(text)
    for file, text in given.items():
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        named = set(re.findall(r"[\w-]+\.(?:py|md|toml)\b", text))
        assert named <= files, f"{file} names {named - files}"
        for code in re.findall(r"`([^`]+)`", text):
            if code.startswith(("python", "pip", "-m", ". ")):  # commands
                continue
            # without shapes and files
            code = re.sub(r"\[[^]]*,[^]]*\]|[\w/]+\.(py|html|txt|jsonl)", "", code)
            for name in re.findall(r"(?<![\w.'\"/-])[A-Za-z_]\w+(?:\.\w+)*(?![\w*])", code):
                first, *others = name.split(".")
                assert {first, *others} <= there, f"{file} names `{name}`"
                if first in vars(grading) and others:
                    assert hasattr(getattr(grading, first), others[0]), f"{file} names `{name}`"


def test_a_verification_that_is_not_handed_out_is_one_sentence_before_all_that_is_missing(
        monkeypatch):
    function = "cache.geometric_fan_out"
    install(monkeypatch, function, with_body(function, missing("4")))
    monkeypatch.delitem(VERIFICATIONS, "block")  # as in the hand-out
    with pytest.raises(UserError, match="^--verification block: not one of token"):
        make_plan(Settings(verification="block"))


def test_the_first_hour_runs_and_any_q_is_exact():
    """The code of the sheet, and what LECTURER.md says that it gives."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "course/SHEET.md").read_text("utf-8"), re.S)
    sheet = {}
    exec(code[0], sheet)
    p = sheet["p"]
    q = sheet["q"]
    bent = sheet["saguaro_distribution"]
    for other, expected_share, expected_residual in (
            (q, 0.9, [0, 0, 1]), (bent(q, 1, 0.5), 0.87, [0.56, 0, 0.44]),
            (bent(q, 1, 0.0), 0.5, [1, 0, 0]),
            (torch.tensor([0.1, 0.1, 0.8]), 0.4, [0.67, 0.33, 0]),
            (torch.tensor([0.0, 1.0, 0.0]), 0.3, [0.71, 0, 0.29])):
        accepted, residual, text = sheet["one_token"](p, other)
        assert accepted.item() == pytest.approx(expected_share, abs=0.006)
        assert residual.tolist() == pytest.approx(expected_residual, abs=0.006)
        assert text.tolist() == pytest.approx(p.tolist())


def test_a_shorter_hand_out_has_a_shorter_sheet(tmp_path):
    write_program(tmp_path, ["4", "8b"])
    given = (tmp_path / "SHEET.md").read_text("utf-8")
    rows = [line.split(" | ")[0] for line in given.splitlines() if re.match(r"\| \d", line)]
    hints = [line.split(".")[0] for line in given.splitlines() if re.match(r"- \d", line)]
    assert rows == ["| 4", "| 8b"] and hints == ["- 4", "- 8b"]
    assert "These are 24 points" in given
    whole = (ROOT / "course/SHEET.md").read_text("utf-8").replace("100 points", "24 points")
    assert set(given.splitlines()) < set(whole.splitlines())
    for words in ("You may take 0 < a < 1.", "ever the same?", "**Hand in**"):  # ends of hints
        assert words in given
    for words in ("With C = 0", "returned then?", "What lies in", "while it waits?"):
        assert words in whole and words not in given


def test_afterwards_all_is_handed_out(tmp_path):
    write_program(tmp_path, [])
    for file in ("sampling.py", "saguaro.py", "test_equivalence.py", "cli/test_cli.py",
                 "docs/PORTING.md", "figures/shape.svg"):
        assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes()
    readme = (tmp_path / "README.md").read_text("utf-8")
    assert "](SHEET.md)" in readme and "](https://" in readme


@pytest.mark.parametrize("numbers", ([], ["4", "8b"], list(EXERCISES)))
def test_no_link_of_a_hand_out_is_dead(tmp_path, numbers):
    write_program(tmp_path, numbers)
    found = 0
    for file in (*tmp_path.rglob("*.md"), *tmp_path.rglob("*.html")):
        text = file.read_text("utf-8")
        for link in re.findall(r'\]\(([^)]+)\)|(?:href|src)="([^"]+)"', text):
            target = max(link).partition("#")[0]
            if not re.match(r"\w+:", target):
                assert (file.parent / target).exists(), f"{file.name} links to {target}"
                found += 1
    assert found > (60 if not numbers else 0)


# ---- wrong arguments ----


@pytest.mark.parametrize("module, arguments, said", [
    (handout, "file", "FOLDER 'file': Not a directory"),
    (handout, "file/new", "FOLDER 'file/new': Not a directory"),
    (handout, "full", "FOLDER 'full': it is not empty; name a new or empty folder"),
    (handout, "", "required: folder"),
    (handout, "new --only 9", "--only: invalid choice: '9'"),
    (handout, "new --solutions --only 4", "not allowed with argument"),
    (mark, "", "required: FOLDER"),
    (mark, "full --timeout soon", "--timeout: invalid float value: 'soon'"),
    (mark, "full --seed one", "--seed: invalid int value: 'one'"),
    (mark, "full --only 4 10", "--only: invalid choice: '10'"),
    (mark, "full --csv full", "--csv 'full': Is a directory"),
    (mark, "full --csv file", "--csv: file exists, and is not written over: name a new file"),
    (mark, "full --results full/cache.py", "--results: full/cache.py exists, and is not written"),
    (mark, "full --csv new --results ./new", "--csv and --results are one file, new: name two"),
    (mark, "full file --results new", "--results is for one submission: name one FOLDER"),
    (mark, "full --csv missing/marks.csv", "--csv 'missing/marks.csv': No such file"),
])
def test_a_wrong_argument_gets_one_sentence(
        tmp_path, monkeypatch, capsys, module, arguments, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/cache.py").touch()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command", *arguments.split()])
    assert launch.exit_status(module.main) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err and err.startswith("command: error: ") and err.count("\n") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"full", "file"}


@pytest.mark.parametrize("out, said", (
    ("full", "Is a directory"), ("missing/page.html", "No such file"),
    ("full/page.html", "race.svg': Is a directory")))
def test_a_page_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, out, said):
    (tmp_path / "full/race.svg").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "Bench", None)
    with pytest.raises(UserError, match=said):
        page.main(PageSettings(out=out))


@pytest.mark.parametrize("command", ("handout", "mark", "explain", "page"))
def test_help_names_the_command_that_was_typed(command):
    shown = subprocess.run([sys.executable, "-m", f"course.{command}", "--help"], cwd=ROOT,
                           text=True, stdout=subprocess.PIPE).stdout
    assert shown.startswith(f"usage: python -m course.{command} [-h]")


@pytest.mark.parametrize("sign", ("=", "+", "-", "@", ""))
def test_a_row_has_points_their_sum_the_seed_and_remarks(capsys, sign):
    """Of several exercises, in the order of --only; no name is a formula of a spreadsheet."""
    marks = {"6": (3, "lost: a tab\t" + 999 * "x"), "1": (4, ""), "2": (0, "not attempted")}
    file = io.StringIO()
    mark.write_marks(file, Path(f"{sign}ann"), marks, 5)
    name, *numbers, remarks = next(csv.reader(io.StringIO(file.getvalue(), newline="")))
    assert name == (f"./{sign}ann" if sign else "ann")
    assert numbers == ["3", "4", "0", "7", "5"]
    lost, other = remarks.split("; ")
    assert lost.startswith(r"6: lost: a tab\tx") and len(lost) == 700
    assert other == "2: not attempted"
    assert capsys.readouterr().out == f"3\t4\t0\t7\t{name}\n\t{lost}\n\t{other}\n"


def test_gradescope_gets_every_exercise():
    found = mark.for_gradescope({"6": (3, "lost"), "1": (4, "")})["tests"]
    assert [(test["score"], test["max_score"], test["output"]) for test in found] == [
        (3, 11, "lost"), (4, 4, "")]


def test_other_arguments_are_asked_at_each_marking(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mark.py", "."])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda _, stop: stop - 1)
    assert mark.arguments().seed == 999_999


@pytest.mark.parametrize("module", (handout, mark))
def test_no_answer_is_measured_by_an_error_of_the_solution(tmp_path, monkeypatch, capsys, module):
    install(monkeypatch, "cache.throughput", with_body("cache.throughput", "return {}['x']"))
    monkeypatch.setattr(sys, "argv", ["command", str(tmp_path)])
    grading.expected.cache_clear()
    assert launch.exit_status(module.main) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and not [*tmp_path.iterdir()]
    assert "the solution itself fails, KeyError: 'x' (throughput, line " in err


@pytest.mark.slow
def test_a_hand_out_grades_itself(tmp_path):
    """All exercises but 4, and a wrong answer in 6. It is made by a process that has imported
    nothing before."""
    numbers = [number for number in EXERCISES if number != "4"]
    subprocess.run([sys.executable, "-m", "course.handout", tmp_path, "--only", *numbers], cwd=ROOT,
                   check=True)
    module = tmp_path / "cache.py"
    module.write_text(replaced(module.read_text("utf-8"), "expected_tokens", "return 7"), "utf-8")
    report = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, text=True,
                            stdout=subprocess.PIPE).stdout
    assert re.search(r"yours     7\n  expected  \d\.\d", report)
    assert re.findall(r"SKIPPED .*: exercise (\w+): .*\w\n", report) == numbers
    assert "geometric_fan_out" not in report and report.count("\n") < 60


@pytest.mark.slow
def test_the_greedy_rows_of_the_lecturers_first_table():
    job = Job(Settings(device="cpu", lookahead=7, budget=24, fan_out="uniform"))
    models = job.load()

    @functools.cache
    def summary(**changes) -> dict:
        decoder = Decoder(replace(job.settings, **changes), models)
        decoder(job.prompts)
        return decoder.stats.summary()

    lecturer = (ROOT / "course/LECTURER.md").read_text("utf-8")
    for axis, values, changes in (
            ("mode", ("ar",), {}), ("budget", (24,), {}), ("budget", (6, 12, 24, 48), {}),
            ("fan_out", ("geometric",), {}), ("lookahead", (2, 4, 10), dict(fan_out="geometric"))):
        columns = []
        for name in ("rounds", "tokens_per_round", "acceptance_rate", "hit_rate"):
            numbers = [summary(**changes, **{axis: value})[name] or "" for value in values]
            texts = [f"{number:.2f}" if isinstance(number, float) else str(number)
                     for number in numbers]
            columns.append(", ".join(texts if len({*texts}) > 1 else texts[:1]))
        row = f"| {' | '.join(columns)} |".replace("1.00", "1").replace("|  |", "| |")
        assert row.replace("|  |", "| |") in lecturer, axis
