"""The shape of the cache, anew in every round, by how sure the draft is (`--fan-out confident`).
Theorem 12 has one acceptance rate for all tokens and rounds."""
import torch
from torch.nn.functional import pad

from cache import BACKUP, Outcome, Speculation, best_fan_out, power_law
from draft_worker import DraftWorker
from engine.model import to_device
from ideas import SPECULATORS


class ConfidentDraft(DraftWorker):
    """Shares the budget out by the draft model's own q. That q has no temperature, top-k or top-p:
    a greedy q would be sure of itself, and nothing would be guessed for k < K."""

    def __init__(self, *arguments):
        """`settings`, which `run.Decoder` adds, have a of the primary and of a backup, and r."""
        super().__init__(*arguments)
        a = self.settings.acceptance_rate
        a_backup = a
        given = self.settings.backup_acceptance_rate
        if self.plan.backup == "neural" and given is not None:
            a_backup = given
        self.acceptance_rates = torch.tensor([a, a_backup])  # by source

    def advance(self, speculation: Speculation, outcome: Outcome) -> None:
        super().advance(speculation, outcome)
        self.active = ~outcome.finished

    def candidates(self, logits: torch.Tensor, speculation: Speculation) -> torch.Tensor:
        self.q = logits.to(self.q_template.dtype).softmax(-1)  # [B, K+1, V], for `fan_out`
        return super().candidates(logits, speculation)

    def fan_out(self, speculation: Speculation) -> torch.Tensor:
        """Return the F_0..F_K of this round, `[B, K+1]`, in host memory."""
        if speculation.tokens.shape[1] == 0:
            return super().fan_out(speculation)
        drafted = to_device(speculation.tokens, self.q.device)[..., None]  # [B, K, 1]
        accepted = self.accepted(speculation, drafted)                     # [B, K]
        miss_exponent = self.settings.miss_exponent
        fan_out = likeliest(self.q, drafted, accepted, miss_exponent, self.plan.budget).cpu()
        source = speculation.source[self.active]
        self.guess_counts.fan_outs.index_add_(0, source, fan_out[self.active])  # for the summary
        return fan_out

    def accepted(self, speculation: Speculation, drafted: torch.Tensor) -> torch.Tensor:
        """Return a_1..a_K `[B, K]` for the `drafted` tokens `[B, K, 1]`. We take s_i to be accepted
        with probability

            a_i = c + (1 - c) q(s_i)           where the model drafted it: c = (3a - 1) / 2, which
                                               makes a_i = a at q(s_i) = 1/3, or 0 if negative
            a_i = q(s_i) / sent(s_i)           where another backup drew it, from `sent`, but no
                                               more than above, with the primary's a."""
        q_drafted = self.q[:, :-1].gather(-1, drafted)            # [B, K, 1]
        a = self.acceptance_rates[speculation.source].to(self.q)  # [B]
        c = (1.5 * a - 0.5).clamp(min=0)                          # [B]
        c = c[:, None, None]                                      # [B, 1, 1]
        accepted = c + (1 - c) * q_drafted                        # [B, K, 1]
        if self.plan.backup != "neural":
            sent = torch.ones_like(q_drafted)  # of point masses
            if speculation.q.shape[-1]:
                sent = speculation.q.gather(-1, drafted)          # [B, K, 1]
            of_backup = accepted.minimum(q_drafted / sent)
            is_backup = to_device(speculation.source == BACKUP, self.q.device)
            is_backup = is_backup[:, None, None]                  # [B, 1, 1]
            accepted = of_backup.where(is_backup, accepted)
        return accepted.squeeze(-1)


def likeliest(q: torch.Tensor, drafted: torch.Tensor, accepted: torch.Tensor,
              miss_exponent: float, budget: int) -> torch.Tensor:
    """Return the F_0..F_K `[B, K+1]` of the `budget` likeliest outcomes. q `[B, K+1, V]` are the
    draft's distributions before each drafted token and after the last, drafted `[B, K, 1]` these
    tokens, and accepted `[B, K]` their a_1..a_K. With a_(K+1) = 0 we take

        P(k)  = a_1 ... a_k (1 - a_(k+1))
        right = (q(t*) / (1 - q(s_(k+1))) + power law) / 2

    where t* is the likeliest, second likeliest, ... bonus token after k accepted ones.

    >>> q = torch.tensor([[[0.1, 0.9], [0.5, 0.5], [0.5, 0.5]]])
    >>> likeliest(q, torch.tensor([[[0], [1]]]), torch.tensor([[0.3, 0.6]]), 1.0, budget=1)
    tensor([[1, 0, 0]])
    >>> likeliest(q, torch.tensor([[[1], [1]]]), torch.tensor([[0.9, 0.6]]), 1.0, budget=1)
    tensor([[0, 0, 1]])
    """
    reached = pad(accepted.cumprod(1), (1, 0), value=1.0)  # [B, K+1] a_1 ... a_k
    likelihood = reached * (1 - pad(accepted, (0, 1)))     # [B, K+1] P(k)
    others = q.scatter(-1, drafted, 0.0)                   # [B, K+1, V]
    n = min(budget, q.shape[-1])
    total = others.sum(-1, keepdim=True)                   # [B, K+1, 1]
    by_q = others.topk(n).values / total                   # [B, K+1, n]
    by_q = by_q.nan_to_num()                               # 0 / 0: there is no other token
    by_rank = power_law(n, miss_exponent).to(q)            # [n]
    right = (by_q + by_rank) / 2                           # [B, K+1, n]
    return best_fan_out(likelihood, right, budget)


SPECULATORS["confident"] = ConfidentDraft
