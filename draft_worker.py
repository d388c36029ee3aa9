"""The speculator (Algorithm 1): answers every outcome with a speculation, prepared if it can be.

A round of the draft, and the shapes of its data (K = lookahead, V = the size of the vocabulary):

    speculation s^T   tokens [B, K], q [B, K, V], source [B]
      |  pre_speculate, while the target verifies s^T: one trunk pass over [t*, s_1..s_K]
    candidates        [B, K+1, n]: the n likeliest bonus tokens after k = 0..K accepted ones
      |  F_k of them for each k: `DraftWorker.fan_out`
    guesses           k and t*, [B, budget]
      |  K tree passes, each of which adds a token to every guess
    cache S^T         guesses, tokens [B, budget, K], q [B, budget, K, V]
      |  speculate, once the outcome v^T = (k, t*) is known, [B]
      |    hit:  what was prepared for this outcome, at once
      |    miss: a backup drafts (section 4.3):
      |          neural  the draft model itself, in K passes
      |          random  tokens drawn blindly (the paper's fast backup)
    speculation s^{T+1}

With a budget of 0 the same worker is the draft of plain speculative decoding: every round misses.
"""
from typing import NamedTuple

import torch

from cache import BACKUP, PRIMARY, Outcome, Speculation, SpeculationCache, likely_outcomes
from engine.counts import GuessCounts
from engine.model import CausalLM, to_device
from sampling import BACKUP_STREAM, BRANCH_STREAM, Sampler, UniformStream

Drafted = tuple[torch.Tensor, torch.Tensor]  # tokens and q, as in `Speculation`


class Plan(NamedTuple):
    """Holds the choices that sections 4.1 and 4.3 leave open, made before the first round."""
    fan_out: list[list[int]]  # F_0..F_K after the PRIMARY (paper: F^p), and after the BACKUP (F^b)
    backup: str               # a name in BACKUPS
    critical_batch_size: float | None = None  # Theorem 17's, if it chose the backup

    @property
    def lookahead(self) -> int:
        return len(self.fan_out[PRIMARY]) - 1

    @property
    def budget(self) -> int:
        return sum(self.fan_out[PRIMARY])


class DraftWorker:
    """Holds the draft model, and the verified text of every row of a batch of B."""

    def __init__(self, model: CausalLM, sampler: Sampler, seed: int, plan: Plan):
        """`sampler` has the C of Saguaro sampling. `seed` may be the target's: branches and backups
        have streams of their own, so the outcome that chooses a branch does not bias its tokens."""
        self.model = model
        self.sampler = sampler
        self.plan = plan
        self.lookahead = plan.lookahead
        self.clock = model.clock
        self.num_guesses = min(plan.budget, model.vocab_size)  # one F_k may be the whole budget
        self.guess_counts = GuessCounts(plan.lookahead, self.num_guesses)
        self.q_template = sampler.q_template(model.vocab_size, model.dtype, model.device)
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Begin with the random numbers of this seed."""
        self.uniforms = [UniformStream(seed, BRANCH_STREAM),  # PRIMARY's
                         UniformStream(seed, BACKUP_STREAM)]  # BACKUP's

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        """Read the prompts of a new batch, whose rows will have at most `max_length` tokens."""
        # KV slots for the text, the K tokens under verification, and K of every branch
        self.model.allocate(len(prompts), max_length, self.lookahead * (1 + self.plan.budget))
        self.model.prefill(prompts)
        width = max_length + self.lookahead + 1  # `advance` writes K + 1 tokens, some past the end
        padded = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
        self.text = torch.tensor(padded)                                 # [B, width]
        self.length = torch.tensor([len(prompt) for prompt in prompts])  # [B] verified tokens

    # ---- while the target verifies ----

    def pre_speculate(self, speculation: Speculation) -> SpeculationCache:
        """Guess how the verification of `speculation` will end, and draft what should follow each
        guess: the speculation cache S^T."""
        plan = self.plan
        device = self.model.device
        rows, num_drafted = speculation.tokens.shape
        if plan.budget == 0:  # an empty cache
            return SpeculationCache.empty(rows, self.lookahead, self.q_template)
        with self.clock("trunk"):
            candidates = self.trunk_pass(speculation)                         # [B, K+1, n]
            guesses = likely_outcomes(candidates, self.fan_out(speculation))  # [B, budget]
        branch_tokens = []
        branch_q = []
        with self.clock("tree"):
            trunk = int(self.length.max()) + num_drafted  # the end of the longest row's trunk
            tree = tree_layout(self.length, guesses.num_accepted, trunk, self.lookahead).to(device)
            uniforms = self.uniforms[PRIMARY].draw(self.lookahead, *guesses.bonus.shape)
            uniforms = to_device(uniforms, device)                  # [K, B, budget]
            tokens = to_device(guesses.bonus, device)               # [B, budget]
            for step in range(self.lookahead):
                logits = tree_pass(self.model, tree, tokens, step)  # [B, budget, V]
                # If this branch is sent, its token `step` is verified at k = step, while the draft
                # fills the next cache. So F is that of the next cache, after a hit.
                F = plan.fan_out[PRIMARY][step]
                tokens, q = self.sampler.sample(logits, uniforms[step], F)
                branch_tokens.append(tokens)                        # [B, budget]
                branch_q.append(q)                                  # [B, budget, V]
        return SpeculationCache(guesses, torch.stack(branch_tokens, 2), torch.stack(branch_q, 2))

    def trunk_pass(self, speculation: Speculation) -> torch.Tensor:
        """Put the speculation into the KV. Returns the n likeliest bonus tokens after k = 0..K
        accepted ones, `[B, K+1, n]`, the likeliest first, in host memory."""
        device = self.model.device
        last = to_device(self.text.gather(1, (self.length - 1)[:, None]), device)
        drafted = to_device(speculation.tokens, device)
        logits = self.model.causal(torch.cat([last, drafted], 1), self.length - 1)
        candidates = self.candidates(logits, speculation).cpu()
        # for the statistics: nothing that is drafted depends on these counts
        self.guess_counts.next_round(candidates, speculation.source, self.text, self.length)
        return candidates

    def candidates(self, logits: torch.Tensor, speculation: Speculation) -> torch.Tensor:
        """Return the n likeliest bonus tokens `[B, K+1, n]` by the trunk's logits `[B, K+1, V]`.

        After k < K accepted tokens s_{k+1} was rejected, so it cannot be the bonus token. No
        drafted token follows logits[:, K], so these stay."""
        drafted = to_device(speculation.tokens, logits.device)
        return logits.scatter(-1, drafted[..., None], -torch.inf).topk(self.num_guesses).indices

    def fan_out(self, speculation: Speculation) -> torch.Tensor:
        """Return the F_0..F_K of this round, `[B, K+1]`: those of the plan for what drafted each
        row. In round 0 all guesses are for k = 0."""
        rows, num_drafted = speculation.tokens.shape
        if num_drafted == 0:
            return torch.full((rows, 1), self.plan.budget)
        return torch.tensor(self.plan.fan_out)[speculation.source]

    # ---- the answer ----

    def speculate(self, speculation: Speculation, outcome: Outcome,
                  cache: SpeculationCache) -> Speculation:
        """The speculation that follows `outcome`, the result of verifying `speculation`: from the
        cache on a hit, from the backup on a miss. All rows wait for one miss. Shapes are
        static, so the backup drafts for all, and rows that hit keep what was prepared."""
        self.advance(speculation, outcome)
        tokens, q, hit = cache.look_up(outcome)
        if not (hit | outcome.finished).all():
            keep = to_device(hit[:, None], tokens.device)
            with self.clock("backup"):
                backup_tokens, backup_q = BACKUPS[self.plan.backup](self)
            tokens = tokens.where(keep, backup_tokens)
            q = q.where(keep[..., None], backup_q)
        return Speculation(tokens, q, torch.where(hit, PRIMARY, BACKUP))

    def advance(self, speculation: Speculation, outcome: Outcome) -> None:
        """Add s_1..s_k and t* to the verified text. All K tokens are written, and t* over the first
        rejected one; nothing beyond `length` is read. With k = FINISHED = -1 the length stays."""
        drafted = speculation.tokens.cpu()
        end = self.length + outcome.num_accepted
        self.text.scatter_(1, self.length[:, None] + torch.arange(drafted.shape[1]), drafted)
        self.text.scatter_(1, end[:, None], outcome.bonus[:, None])
        self.length = end + 1


# ---- tree attention: the draft's passes over all branches ----

class Tree(NamedTuple):
    """Says where the n branches of each row lie, K tokens each, and what they see."""
    positions: torch.Tensor  # [B, n] of each branch's first token, the guessed bonus token
    slots: torch.Tensor      # [K, n] of the tokens that each step adds: every n-th is one branch's
    visible: torch.Tensor    # [B, n, trunk + K n] the slots that a branch sees in the end

    def to(self, device: torch.device) -> "Tree":
        return Tree(*(to_device(part, device) for part in self))


def tree_layout(length: torch.Tensor, num_accepted: torch.Tensor, trunk: int,
                lookahead: int) -> Tree:
    """Lay out a branch for each of the guesses "k accepted", k = `num_accepted` `[B, n]`.

    A branch sees the trunk up to its own fork, and itself. The fork lies after the verified text,
    `length` `[B]` tokens, and k drafted ones. The tree begins in slot `trunk`. Here a text of 3
    tokens has two guesses, one for "0 accepted" and one for "1 accepted", of two tokens each:

    >>> tree = tree_layout(torch.tensor([3]), torch.tensor([[0, 1]]), trunk=5, lookahead=2)
    >>> tree.positions.tolist(), tree.slots.tolist()
    ([[3, 4]], [[5, 6], [7, 8]])
    >>> tree.visible.int().tolist()
    [[[1, 1, 1, 0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0, 1, 0, 1]]]
    """
    rows, n = num_accepted.shape
    fork = length[:, None] + num_accepted                           # [B, n]
    slots = trunk + torch.arange(lookahead * n).view(lookahead, n)  # [K, n]
    sees_trunk = torch.arange(trunk) < fork[..., None]              # [B, n, trunk]
    itself = torch.eye(n, dtype=torch.bool).repeat(1, lookahead)    # [n, K n]
    sees_itself = itself.expand(rows, -1, -1)                       # [B, n, K n]
    return Tree(fork, slots, torch.cat([sees_trunk, sees_itself], 2))


def tree_pass(model: CausalLM, tree: Tree, tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Read token number `step` of every branch, `[B, n]`. Returns the logits `[B, n, V]` of the
    next one. The slots of later steps, which come last, are hidden."""
    still_empty = tree.slots[step + 1:].numel()
    visible = tree.visible[..., :tree.visible.shape[-1] - still_empty]
    slots = tree.slots[step].expand(len(tokens), -1)
    return model.forward(tokens, tree.positions + step, slots, visible)


# ---- backups (section 4.3): they draft after a miss ----

def neural_backup(draft: DraftWorker) -> Drafted:
    """Draft with the draft model, a pass for each token. The first pass reads the last two verified
    tokens: where all were accepted, the last but one is s_K, which no pass has read yet if the
    budget is 0 and there was no trunk."""
    uniforms = draft.uniforms[BACKUP].draw(draft.lookahead, len(draft.text))
    uniforms = to_device(uniforms, draft.model.device)
    start = (draft.length - 2).clamp(min=0)  # a row that finished at once may have one token
    tokens = to_device(draft.text.gather(1, start[:, None] + torch.arange(2)), draft.model.device)
    drafted = []
    drafted_q = []
    for step in range(draft.lookahead):
        logits = draft.model.causal(tokens, start)[:, -1]
        start = start + tokens.shape[1]
        F = draft.plan.fan_out[BACKUP][step]  # of the cache that follows a backup
        sampled, q = draft.sampler.sample(logits, uniforms[step], F)
        drafted.append(sampled)
        drafted_q.append(q)
        tokens = sampled[:, None]
    return torch.stack(drafted, 1), torch.stack(drafted_q, 1)


def random_backup(draft: DraftWorker) -> Drafted:
    """Draw tokens from the uniform distribution, without a model."""
    vocab_size = draft.model.vocab_size
    uniforms = draft.uniforms[BACKUP].draw(len(draft.text), draft.lookahead)
    tokens = to_device((uniforms * vocab_size).long(), draft.model.device)
    q = draft.q_template.new_full((*tokens.shape, len(draft.q_template)), 1 / vocab_size)
    return tokens, q


BACKUPS = {"neural": neural_backup, "random": random_backup}  # --backup
