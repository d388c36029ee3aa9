"""Who computes where: devices, process groups, loading."""
import os
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import psutil
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from runtime.check import context_length
from runtime.cuda_graphs import GraphRunner
from runtime.model import CausalLM, load
from runtime.settings import (DecodingSettings, UserError, first_line, in_standard_input,
                              read_prompts)
from runtime.tensor_parallel import check_shardable, load_sharded


class Placement:
    """Which rank this process is and where it computes: rank r of a machine on GPU r, if there is
    one, else on the CPU. In ssd the last of several ranks holds the draft; all others hold the
    target together."""

    def __init__(self, settings: DecodingSettings):
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        num_gpus = 0 if settings.device == "cpu" else torch.cuda.device_count()
        if settings.device == "cuda" and not num_gpus:
            raise UserError("--device cuda: PyTorch sees no CUDA device here")
        draft_ranks = 1 if settings.mode == "ssd" and self.world_size > 1 else 0
        self.tp_size = self.world_size - draft_ranks  # ranks that hold the target
        self.draft_rank = self.world_size - 1 if draft_ranks else 0
        self.holds_target = self.rank < self.tp_size
        self.holds_draft = self.rank == self.draft_rank and settings.mode != "ar"
        self.device = torch.device("cpu")
        if local_rank < num_gpus:
            self.device = torch.device("cuda", local_rank)
        self.devices = [str(self.device)]  # of all ranks
        self.tp_group = None  # of the ranks that hold the target, if there are several
        next_machine = self.rank - local_rank + self.local_world_size  # its first rank
        draft_is_here = draft_ranks == 1 and next_machine == self.world_size
        self.threads = self.num_threads(num_gpus, draft_is_here, any(settings.pace))
        torch.set_num_threads(self.threads)
        # cuDNN, which PyTorch prefers on Hopper, plans its attention anew for every length of text
        torch.backends.cuda.enable_cudnn_sdp(False)

    def num_threads(self, num_gpus: int, draft_is_here: bool, paced: bool) -> int:
        """One for a rank on a GPU, and for a draft whose machine computes the target's passes, too;
        the other ranks of a machine share its remaining cores, not their hyperthreads.
        One when paced: several are late as soon as another program wants a core."""
        if self.device.type == "cuda" or paced:
            return 1
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = min(cores, len(os.sched_getaffinity(0)))
        ranks_on_gpus = min(num_gpus, self.local_world_size)
        sharing = self.local_world_size - ranks_on_gpus
        cores -= ranks_on_gpus
        if draft_is_here and sharing > 1:
            if not self.holds_target:
                return 1
            cores -= 1
            sharing -= 1
        return max(1, cores // sharing)

    def join(self) -> None:
        """Meet the other ranks. Groups with a GPU for every rank use NCCL, others gloo."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # one rank may wait for another that downloads 140 GB; a rank that died closes its sockets
        timeout = timedelta(days=7)
        dist.init_process_group("gloo", timeout=timeout)
        self.devices = [""] * self.world_size
        dist.all_gather_object(self.devices, str(self.device))

        def new_group(size: int) -> dist.ProcessGroup:
            """Of the first `size` ranks."""
            backend = "gloo" if "cpu" in self.devices[:size] else "nccl"
            group = dist.new_group(list(range(size)), timeout=timeout, backend=backend)
            if backend == "nccl" and self.rank < size:  # connects at the first message: now
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            return group

        self.world_group = new_group(self.world_size)
        if self.tp_size > 1:
            self.tp_group = new_group(self.tp_size)
        self.channel_device = torch.device("cpu") if "cpu" in self.devices else self.device

    @property
    def any_gpu(self) -> bool:
        """Does any rank compute on a GPU?"""
        return any(device != "cpu" for device in self.devices)

    @property
    def on_gpus(self) -> bool:
        """Does this rank compute on a GPU, and all that hold the same model?"""
        peers = self.devices[:self.tp_size] if self.holds_target else self.devices[-1:]
        return "cpu" not in peers


class Models(NamedTuple):
    """What this rank decodes with; None: another rank holds it, or nobody needs it."""
    target: CausalLM | None
    draft: CausalLM | None
    context: int     # the target's, in tokens
    vocab_size: int  # the target's


class Job:
    """What all ranks know of a run before any model is loaded: configurations, token ids of the
    prompts, placement."""

    def __init__(self, settings: DecodingSettings):
        self.settings = settings
        self.placement = Placement(settings)
        self.texts = self.read_texts()
        self.target_config, self.tokenizer = open_model("--target", settings.target)
        self.context = context_length(self.target_config)
        self.vocab_size = self.target_config.get_text_config().vocab_size
        self.prompts = encode(self.tokenizer, self.texts, settings.apply_chat_template,
                              self.context, self.vocab_size)
        longest = max(map(len, self.prompts)) + settings.max_new_tokens
        self.max_length = min(longest, self.context)
        if settings.mode != "ar":
            self.draft_config, draft_tokenizer = open_model("--draft", settings.draft)
            if draft_tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise UserError(f"--target {settings.target} and --draft {settings.draft} have "
                                "different vocabularies; a draft must propose the target's tokens")
        if settings.lookahead >= self.context:
            raise UserError(f"--lookahead {settings.lookahead}: the target's context is "
                            f"{self.context}")
        num_outcomes = settings.lookahead * (self.vocab_size - 1) + self.vocab_size
        if settings.budget > num_outcomes:
            raise UserError(f"--budget {settings.budget}: {num_outcomes} outcomes are all there "
                            f"are with K = {settings.lookahead} and a vocabulary of "
                            f"{self.vocab_size}")
        if self.placement.tp_size > 1:
            enough = "one rank" if settings.mode != "ssd" else "two ranks"
            check_shardable(self.target_config, self.placement.tp_size, enough)

    def read_texts(self) -> list[str]:
        """The prompts. Standard input is read by rank 0, which tells the others."""
        placement = self.placement
        if placement.world_size == 1 or not in_standard_input(self.settings):
            return read_prompts(self.settings)
        placement.join()
        texts = [read_prompts(self.settings)] if placement.rank == 0 else [None]
        dist.broadcast_object_list(texts, 0)
        return texts[0]

    def load(self) -> Models:
        """Join the other ranks and load the models that this one holds."""
        placement = self.placement
        if placement.world_size > 1 and not dist.is_initialized():
            placement.join()
        target = self.load_target() if placement.holds_target else None
        draft = self.load_draft() if placement.holds_draft else None
        if placement.world_size > 1:
            dist.barrier()  # or one rank would time how long another loads
        return Models(target, draft, self.context, self.vocab_size)

    def load_draft(self) -> CausalLM:
        settings = self.settings
        model = load(settings.draft, self.draft_config, self.dtype, self.placement.device)
        scratch = settings.lookahead * (1 + settings.budget)
        return self.ready(CausalLM(model, self.vocab_size), scratch, settings.pace[1])

    def load_target(self) -> CausalLM:
        """Whole, or this rank's share of it."""
        settings = self.settings
        group = self.placement.tp_group
        given = (settings.target, self.target_config, self.dtype, self.placement.device)
        model = load_sharded(*given, group) if group else load(*given)
        return self.ready(CausalLM(model), settings.lookahead, settings.pace[0], group)

    def ready(self, model: CausalLM, scratch: int, pace: float,
              group: dist.ProcessGroup | None = None) -> CausalLM:
        """The model with slots for the longest text and `scratch` more, with CUDA graphs where they
        serve, and paced (ms a pass). `group`: the ranks that share it."""
        model.min_slots = self.max_length + scratch
        if self.placement.on_gpus and not self.settings.eager:
            model.forward_fn = GraphRunner(model, group)
        model.set_pace(pace)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """--dtype, or by default what suits the devices of all ranks that compute the same."""
        if self.settings.dtype != "auto":
            return getattr(torch, self.settings.dtype)
        return torch.bfloat16 if self.placement.on_gpus else torch.float32


def open_model(flag: str, path: str):
    """The configuration and tokenizer of a checkpoint; nothing big is read."""
    if not Path(path).is_dir():
        try:
            huggingface_hub.HfApi().model_info(path, timeout=10)
        except Exception:  # from here on what was downloaded before must do
            huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except Exception as problem:  # a damaged file raises what its reader pleases
        raise UserError(f"{flag} {path}: neither a folder with a model and its tokenizer nor a "
                        f"model on the Hugging Face Hub ({first_line(problem)})") from problem


def encode(tokenizer, texts: list[str], chat: bool, context: int,
           vocab_size: int) -> list[list[int]]:
    """The prompts as token ids below `vocab_size`, each with room for at least one more token."""
    if chat and not tokenizer.chat_template:
        raise UserError("--apply-chat-template: this model's tokenizer has no chat template")
    if chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        try:
            encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True,
                                                    return_dict=True)
        except Exception as problem:  # a template is a program
            raise UserError("--apply-chat-template: this model's template fails "
                            f"({first_line(problem)})") from problem
    else:
        encoded = tokenizer(texts)
    prompts = encoded["input_ids"]
    for number, prompt in enumerate(prompts, start=1):
        name = f"prompt {number} of {len(prompts)}"
        if not 0 < len(prompt) < context:
            raise UserError(f"{name} has {len(prompt)} tokens, and the target's context is "
                            f"{context}")
        largest = max(prompt)
        if largest >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise UserError(f"{name} holds the token {token!r}, number {largest}, and the target's "
                            f"embedding ends at {vocab_size - 1}: leave it out, or resize the "
                            "embedding")
    return prompts
