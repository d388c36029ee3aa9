"""Train the embedded pair: a deep, narrow target that writes Python and a shallow draft that
imitates it.

    python tiny/train.py      # corpus -> tokenizer -> target -> draft: tiny/target, tiny/draft

Corpus: the source of the Python standard library of the interpreter that runs this script, tests
included (CPython 3.11, Python Software Foundation licence), without generated tables and without
the files `HELD_OUT`: 9.4M tokens of a byte-level BPE with 2,048 tokens. The target (24 layers of
width 128, 5.1M parameters) learns to predict the next token; the draft (3 layers, 0.9M) starts
from the target's embedding, its first two layers, its last layer and its final norm, and then
minimises KL(target || draft). Optimiser: Muon for the matrices inside the layers, AdamW for the
rest.

The pair in this folder was made in stages. The target took 1,413 steps in all (two hours on two
cores), the draft 2,769; without the last 800, in windows of 512 tokens alone, it was of little use
beyond 256 tokens. Held-out loss of the target: 2.48 nats a token in windows of
512; KL(target || draft): 0.27. The defaults below are about the same numbers of steps in one go,
which was not tried. A target that was trained for longer (2.48 nats in the same windows in which
this one has 2.57) was harder to imitate: greedy acceptance fell from 0.86 to 0.82.
"""
import argparse
import copy
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

HERE = Path(__file__).parent
HELD_OUT = ("argparse.py bisect.py calendar.py csv.py dataclasses.py difflib.py fractions.py "
            "heapq.py json/decoder.py queue.py sched.py shelve.py statistics.py textwrap.py "
            "unittest/case.py "
            "test/test_deque.py test/test_fractions.py test/test_textwrap.py").split()
GENERATED = ("encodings", "pydoc_data", "site-packages")  # tables, help, other code
END_OF_TEXT = "<|endoftext|>"
VOCABULARY, CONTEXT = 2048, 512  # tokens
BATCH, SHORT = 6144, 256  # tokens a step; a short window
LONG_AFTER = 0.92  # of the target's steps; the draft, which is cheap, has long windows only
TARGET = dict(hidden_size=128, num_hidden_layers=24, intermediate_size=352, num_attention_heads=4)
DRAFT_LAYERS = (0, 1, 23)  # the target's layers that the draft starts from
ATTENTION = "eager"  # compiled, in bfloat16 on a CPU, a step takes 0.8 of the other kind's time


def read_corpus() -> tuple[list[str], list[str]]:
    """Source files of the running interpreter's standard library: (training, held out)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] in GENERATED:
            continue
        text = path.read_text("utf-8", errors="ignore")  # a few tests are deliberately not UTF-8
        (held_out if name.as_posix() in HELD_OUT else training).append(text)
    return training, held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` tokens; it can spell any text, so it has no unknown token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT,
                                   clean_up_tokenization_spaces=False)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All files as one row of token ids `[N]`, each file closed by the end-of-text token."""
    rows = tokenizer.backend_tokenizer.encode_batch([text + END_OF_TEXT for text in texts])
    return torch.tensor([token for row in rows for token in row.ids])


def windows(tokens: torch.Tensor, steps: int, long_after: float, generator: torch.Generator):
    """Yield `steps` batches `[B, length + 1]` of `BATCH` tokens: the corpus cut into windows at a
    new random offset in every epoch, shuffled. Short windows first, until the share `long_after` of
    the steps, because attention to a long context costs a third of a step."""
    queue: list[int] = []
    for step in range(steps):
        length = SHORT if step < long_after * steps else CONTEXT
        while len(queue) < BATCH // length:
            offset = int(torch.randint(CONTEXT, (1,), generator=generator))
            starts = torch.arange(offset, len(tokens) - CONTEXT - 1, length)
            queue = starts[torch.randperm(len(starts), generator=generator)].tolist() + queue
        starts = [queue.pop() for _ in range(BATCH // length)]
        yield torch.stack([tokens[start:start + length + 1] for start in starts])


def optimisers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding and norms; one learning rate
    fits both."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)]


def train(model: LlamaForCausalLM, loss_of, tokens: torch.Tensor, held_out: torch.Tensor,
          steps: int, long_after: float, learning_rate: float, folder: Path) -> None:
    """Minimise `loss_of(batch)` (nats a token) over `steps` steps, warm-up then cosine to zero, in
    `windows` of the share `long_after`.
    Saves the weights in bfloat16 to `folder` at every tenth of the way, with a word on the
    held-out loss."""
    generator = torch.Generator().manual_seed(0)
    check = list(windows(held_out, 10, long_after, generator))[:8]
    stages = optimisers(model, learning_rate)
    stages += [get_cosine_schedule_with_warmup(stage, 100, steps) for stage in stages]
    for layer in model.model.layers:
        layer.compile()
    bar = tqdm(windows(tokens, steps, long_after, generator), total=steps, mininterval=5)
    for step, batch in enumerate(bar, start=1):
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stage in stages:
            stage.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if step % max(1, steps // 10) == 0 or step == steps:
            with torch.no_grad():
                score = sum(loss_of(batch).item() for batch in check) / len(check)
            tqdm.write(f"step {step}: held-out loss {score:.3f} nats a token")
            copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def train_target(tokens: torch.Tensor, held_out: torch.Tensor, tokenizer, device: torch.device,
                 steps: int) -> None:
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, attn_implementation=ATTENTION,
        **TARGET)).to(device)

    def next_token_loss(batch):
        batch = batch.to(device)
        with autocast(device):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    train(model, next_token_loss, tokens, held_out, steps, LONG_AFTER, 5e-3, HERE / "target")


def train_draft(tokens: torch.Tensor, held_out: torch.Tensor, device: torch.device,
                steps: int) -> None:
    """Distil: start from some of the target's own layers, then minimise KL(target || draft) on the
    corpus."""
    target = AutoModelForCausalLM.from_pretrained(HERE / "target", dtype=torch.float32,
                                                  attn_implementation=ATTENTION)
    target = target.to(device).eval()
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(DRAFT_LAYERS)
    draft = LlamaForCausalLM(config).to(device)
    draft.load_state_dict(target.state_dict(), strict=False)  # embedding and norm
    for layer, number in zip(draft.model.layers, DRAFT_LAYERS):
        layer.load_state_dict(target.model.layers[number].state_dict())

    def distillation_loss(batch):
        tokens = batch[:, :-1].to(device)
        with autocast(device):
            with torch.no_grad():
                teacher = target(input_ids=tokens, use_cache=False).logits
            student = draft(input_ids=tokens, use_cache=False).logits
        student, teacher = (logits.flatten(0, 1).float().log_softmax(-1)
                            for logits in (student, teacher))
        return F.kl_div(student, teacher, log_target=True, reduction="batchmean")

    train(draft, distillation_loss, tokens, held_out, steps, 0, 3e-3, HERE / "draft")


def autocast(device: torch.device):
    """bfloat16 where the hardware multiplies in it, else float32."""
    fast = (device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
            or torch.cpu._is_amx_tile_supported())
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded pair.")
    parser.add_argument("--target-steps", type=int, default=1400,
                        help="0 keeps the target and trains only the draft")
    parser.add_argument("--draft-steps", type=int, default=2800)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out = read_corpus()
    if args.target_steps:
        tokenizer = train_tokenizer(training)
        tokenizer.save_pretrained(HERE / "target")
        tokenizer.save_pretrained(HERE / "draft")
    else:
        tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    training, held_out = encode(tokenizer, training), encode(tokenizer, held_out)
    print(f"{len(training):,} tokens to train on, {len(held_out):,} held out")
    if args.target_steps:
        train_target(training, held_out, tokenizer, device, args.target_steps)
    train_draft(training, held_out, device, args.draft_steps)


if __name__ == "__main__":
    main()
