"""What every rank reads before a run (configurations, prompts), and loading its models."""
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, __version__

from cli.settings import DecodingSettings, read_prompts
from engine.check import check_model
from engine.cuda_graphs import GraphRunner
from engine.errors import UserError, reported_as
from engine.model import CausalLM, check_family, context_length, load
from engine.tensor_parallel import check_shardable, fingerprint, split
from run.placement import Placement, gather, in_turn


class Models(NamedTuple):
    """Holds the models of this rank. None: another rank holds it, or nobody needs it."""
    target: CausalLM | None
    draft: CausalLM | None
    context: int         # the target's, in tokens
    vocab_size: int      # the target's
    max_length: int = 0  # tokens of the longest text to come, if known: buffers are made once
    placement: Placement | None = None  # None: this process is alone

    def set_pace(self, milliseconds: tuple[float, float]) -> None:
        """Let a pass of the target, and of the draft, take at least so long. 0 sets no limit."""
        for model, least in zip((self.target, self.draft), milliseconds):
            if model:
                model.clock.pace = least / 1000


class Job:
    """Holds settings, placement, configurations, and prompts as token ids."""

    def __init__(self, settings: DecodingSettings, placement: Placement | None = None,
                 rows: list[dict] | None = None):
        """`rows` are prompts as `read_prompts` returns them. None: those of the settings."""
        self.settings = settings
        self.placement = placement or Placement(settings)
        self.rows = read_prompts(settings) if rows is None else rows
        self.texts = [row["prompt"] for row in self.rows]
        self.target_config, self.tokenizer = open_model("--target", settings.target)
        self.context = context_length(self.target_config)
        self.vocab_size = self.target_config.get_text_config().vocab_size
        self.prompts = encode(self.tokenizer, self.texts, settings.apply_chat_template)
        if self.prompts:
            check_prompts(self.prompts, self.context, self.vocab_size)
        longest = max(map(len, self.prompts), default=0) + settings.max_new_tokens
        self.max_length = min(longest, self.context)
        self.weights = None  # the `fingerprint` of a target that several ranks share
        self.draft_config = None
        if settings.mode != "ar":
            self.draft_config, draft_tokenizer = open_model("--draft", settings.draft)
            check_family(self.draft_config)
            shared = self.tokenizer.get_vocab().items() & draft_tokenizer.get_vocab().items()
            if len(shared) < 0.99 * len(self.tokenizer):  # special tokens may differ
                raise UserError(f"--target {settings.target} and --draft {settings.draft} have "
                                "different vocabularies; a draft must propose the target's tokens")

    def load(self) -> Models:
        """Join the other ranks, if there are any, and load the models that this one holds. Raises
        `UserError`, on all ranks, for a model that one of them cannot load."""
        placement = self.placement
        if placement.world_size == 1 or placement.draft_process:
            draft = self.load_draft() if placement.holds_draft else None
            return self.models(self.prepare(self.load_target()), draft)
        with in_turn():
            return self.load_share(self.join())

    def load_share(self, group: dist.ProcessGroup | None) -> Models:
        """Load the draft, or a share of the target, which is split among the ranks of a group."""
        placement = self.placement
        target = None
        draft = None
        if placement.tp_size > 1:
            check_shardable(self.target_config, placement.tp_size)
        for turn in range(placement.tp_size):  # so that host memory holds one whole target
            with placement.raising_together():
                if turn == 0 and placement.holds_draft:
                    draft = self.load_draft()
                if turn == placement.rank:
                    target = self.load_target(group)
        if group and len({*gather(self.weights)[:placement.tp_size]}) > 1:
            raise UserError("all ranks must be started with the same weights of --target")
        with placement.raising_together():
            if target:
                self.prepare(target)
        return self.models(target, draft)

    def join(self) -> dist.ProcessGroup | None:
        """Meet the other ranks, which must have read the same."""
        may_differ = ("prompts", "output", "trace", "out", "figures", "device")
        read = {"target": str(self.target_config), "draft": str(self.draft_config),
                "prompt": str(self.prompts), "transformers": __version__}
        return self.placement.join(asdict(self.settings) | dict.fromkeys(may_differ) | read)

    def models(self, target: CausalLM | None, draft: CausalLM | None) -> Models:
        return Models(target, draft, self.context, self.vocab_size, self.max_length,
                      self.placement)

    def load_target(self, group: dist.ProcessGroup | None = None) -> CausalLM:
        """Load the target, or this rank's share of it."""
        device = "cpu" if group else self.placement.device
        model = load(self.settings.target, self.target_config, self.dtype, device)
        if group:
            self.weights = fingerprint(model)
            split(model, group)
            model.to(self.placement.device)
        return CausalLM(model)

    def prepare(self, target: CausalLM) -> CausalLM:
        """Check the target, and say why its text may not be that of transformers' `generate`."""
        check_model(self.with_graphs(target))
        if self.placement.rank == 0 and target.penalties:
            print(f"not applied, though {self.settings.target} asks for it in its generation "
                  f"config: {', '.join(target.penalties)}", file=sys.stderr, flush=True)
        return target

    def load_draft(self) -> CausalLM:
        model = load(self.settings.draft, self.draft_config, self.dtype, self.placement.device)
        return check_model(self.with_graphs(CausalLM(model, self.vocab_size)))

    def with_graphs(self, model: CausalLM) -> CausalLM:
        """Let a model whose ranks all have GPUs replay its passes, unless --passes says eager."""
        compiled = self.settings.passes == "compiled"
        if self.placement.on_gpus and self.settings.passes != "eager":
            if compiled and sys.stderr.isatty():
                print(f"rank {self.placement.rank}: compiling ...", file=sys.stderr, flush=True)
            model.forward_fn = GraphRunner(model, compiled)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """--dtype; auto: what suits the device. Name a type if the GPUs of one target differ."""
        if self.settings.dtype != "auto":
            return getattr(torch, self.settings.dtype)
        if not self.placement.on_gpus:
            return torch.float32
        is_ampere = torch.cuda.get_device_capability(self.placement.device) >= (8, 0)
        return torch.bfloat16 if is_ampere else torch.float16  # older ones emulate bfloat16


def open_model(flag: str, path: str):
    """Read the configuration and tokenizer of a checkpoint, and nothing big."""
    folder = Path(path)
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{flag} {path} holds an adapter (LoRA): merge it into its model, and save "
                        "that")
    is_gguf = folder.suffix == ".gguf" or any(folder.glob("*.gguf"))
    if is_gguf and not (folder / "config.json").exists():
        raise UserError(f"{flag} {path} is GGUF, which is not read here: take the folder with the "
                        "model's config.json and safetensors")
    with reported_as(f"{flag} {path} cannot be read, neither as a folder with a model and its "
                     "tokenizer nor from the Hugging Face Hub"):
        return (AutoConfig.from_pretrained(path, trust_remote_code=False),
                AutoTokenizer.from_pretrained(path, trust_remote_code=False))


def encode(tokenizer, texts: list[str], chat: bool) -> list[list[int]]:
    """Return the prompts as token ids; with `chat` each is a user turn of the chat template."""
    with reported_as(f"the {'chat template' if chat else 'tokenizer'} cannot read the prompts"):
        # a tokenizer would make one prompt of a pair, and a template a text of anything
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise ValueError("they must be a text, or a list of texts")
        if not texts:
            return []
        if not chat:
            return tokenizer(texts)["input_ids"]
        for user_turn in (turn_of_text, turn_of_parts):  # templates may ignore one of them
            if "Saguaro" in tokenizer.apply_chat_template(user_turn("Saguaro"), tokenize=False):
                return tokenizer.apply_chat_template(
                    [user_turn(text) for text in texts], add_generation_prompt=True,
                    return_dict=True)["input_ids"]
        raise ValueError("it drops them")


def turn_of_text(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def turn_of_parts(text: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def check_prompts(prompts: list[list[int]], context: int, vocab_size: int) -> None:
    """Raise `UserError` for a prompt that cannot go on, or if there is none."""
    if not prompts:
        raise UserError("there is no prompt")
    for number, prompt in enumerate(prompts, start=1):
        name = f"prompt {number} of {len(prompts)}"
        if not 0 < len(prompt) < context:
            raise UserError(f"{name} has {len(prompt)} tokens; it must have at least 1, and fewer "
                            f"than the target's context, {context}")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(f"{name} holds tokens {min(prompt)} to {max(prompt)}; the target's "
                            f"embedding has 0 to {vocab_size - 1}")
