"""Ideas beyond the paper, one in each file. Whatever module lies here is imported, and adds itself,
by a name that an option takes, to one of these:

    --backup        draft_worker.BACKUPS            who drafts after a miss: (draft) -> tokens, q
    --fan-out       cache.FAN_OUT_POLICIES          F_0..F_K: (budget, K, a, r) -> K+1 numbers
                    draft_worker.FAN_OUTS_BY_ROUND  of each round: (draft, speculation) -> [B, K+1]
    --verification  sampling.VERIFICATIONS          (p, tokens, q, uniforms) -> k, t*

What is guessed, and when, changes the speed alone. A text stays the target's if

(i)  the q that is reported is the distribution that the token was drawn from, and
(ii) whether a token is sent, and how many are, depends on what stands before it, never on the token
     itself: to drop drawn tokens whose q is small is to draw from another q.

A new verification needs a proof of its own. `python -m audit` finds what breaks the rules.
"""
from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
