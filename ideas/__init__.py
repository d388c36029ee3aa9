"""Ideas beyond the paper, one in each file. Every module in this folder is imported (so its test
stands in test_equivalence.py), and adds itself, by a name that an option takes, to one of these:

    --backup        draft_worker.BACKUPS    who drafts after a miss: (draft) -> tokens, q
    --fan-out       cache.FAN_OUT_POLICIES  F_0..F_K of all rounds: (budget, K, a, r) -> K+1 ints
                    SPECULATORS             of each round: a kind of DraftWorker, see confident.py
    --verification  VERIFICATIONS           what accepts, as `sampling.verify`
                    GUESSERS                how the draft then guesses: a kind of DraftWorker

A backup's q `[B, K, V]` is as wide as `draft.q_template`: V = 0 for a greedy draft's point masses.
What is guessed, and when, changes the speed alone. A text stays the target's if

(i)  the q that is reported is the distribution that the token was drawn from, by random numbers
     that decide nothing else, as those of `draft.uniforms[BACKUP]`, and
(ii) whether a token is sent, and how many are, depends on what stands before it, never on the token
     itself. To drop drawn tokens whose q is small, for example, is to draw from another q.

Streams of an idea's own begin anew in `manual_seed`, as in race.py.

A new verification needs a proof of its own. The audit finds broken rules; this takes minutes:

    for i in $(seq 8); do cat tiny/prompts.jsonl; done > 8x.jsonl
    python saguaro.py --temperature 1 --OPTION NAME --prompts 8x.jsonl --batch-size 16 --output FILE
    python -m audit FILE --temperature 1
"""
from importlib import import_module
from pkgutil import iter_modules
from typing import Callable

from draft_worker import DraftWorker
from sampling import verify

ACCEPTANCE_RATES: dict[str, float] = {}  # a of what a backup drafts, if it is not 0.1
SPECULATORS: dict[str, type[DraftWorker]] = {}
VERIFICATIONS: dict[str, Callable] = {"token": verify}
GUESSERS: dict[str, type[DraftWorker]] = {}  # of verifications that tell more, see race.py

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
