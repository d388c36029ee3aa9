"""Tests of what larger models need: placement, CUDA graphs, tensor parallelism, GPUs. There need be
no GPU: `FakeGraph` stands in for a CUDA graph, `FakeCUDA` for GPUs.

    python -m pytest engine/test_engine.py
"""
import copy
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from huggingface_hub.utils import are_progress_bars_disabled
from transformers import AutoConfig, AutoModelForCausalLM

from cache import PRIMARY, Outcome
from cli.job import Job
from cli.placement import Placement
from cli.screen import print_times
from cli.settings import TINY, Settings
from engine import cuda_graphs
from engine.model import CausalLM, load
from engine.tensor_parallel import load_sharded
from saguaro import Decoder, Sequences
from testing.fake_cuda import CPU, FAKES, FakeCUDA, FakeGraph, fake_gpus
from testing.shared import (
    RAGGED,
    greedy_reference,
    imitation,
    in_ranks,
    make_decoder,
    random_model,
    run_rounds,
    windowed,
)

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.fixture
def fake_graphs(monkeypatch):
    """The code for CUDA graphs runs on a CPU."""
    for name, value in FAKES.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graphs, "WIDTHS", [16, 32, 64])


# ---- which folder may import which ----

PAPER = {"sampling", "cache", "target_worker", "draft_worker", "saguaro"}


@pytest.mark.parametrize("files, forbidden", (
    ("engine/*.py", PAPER | {"cli", "audit", "bench", "course"}),
    ("sampling.py", PAPER | {"cli", "engine", "audit"}),
    ("cache.py", PAPER | {"cli", "engine", "audit"}),
    ("*_worker.py", {"cli", "saguaro", "audit"}),
    ("audit/*.py", PAPER | {"cli", "engine.model", "engine.noise", "course"})))
def test_imports_run_one_way(files, forbidden):
    for file in Path(__file__).parents[1].glob(files):
        if not file.name.startswith("test"):
            imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text("utf-8"), re.M)
            assert not {name for name in imported if {name, name.split(".")[0]} & forbidden}, file


# ---- who computes where ----

# GPUs and their capability (0: their driver is too old), (mode, world size, ranks here, rank, local
# rank); device, threads, type
PLACEMENTS = {
    "no GPU, alone": (0, 0, ("sd", 1, 1, 0, 0), "cpu", 8, torch.float32),
    "no GPU, draft": (0, 0, ("ssd", 2, 2, 1, 1), "cpu", 4, torch.float32),
    "no GPU, second of two that share": (0, 0, ("ssd", 3, 3, 1, 1), "cpu", 2, torch.float32),
    "a GPU that is listed, and cannot be used": (1, 0, ("sd", 1, 1, 0, 0), "cpu", 8, torch.float32),
    "one GPU, target": (1, 8.0, ("ssd", 2, 2, 0, 0), "cuda:0", 1, torch.bfloat16),
    "one GPU, draft": (1, 8.0, ("ssd", 2, 2, 1, 1), "cpu", 4, torch.float32),
    "an old GPU": (1, 7.5, ("ar", 1, 1, 0, 0), "cuda:0", 1, torch.float16),
    "five GPUs, two ranks": (5, 9.0, ("ssd", 2, 2, 1, 1), "cuda:1", 1, torch.bfloat16),
    "two machines with GPUs": (8, 9.0, ("ssd", 2, 1, 1, 0), "cuda:0", 1, torch.bfloat16)}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_rank_finds_its_place(name, monkeypatch):
    """On a machine of 8 cores. The GPUs need not exist: nothing is computed."""
    num_gpus, capability, (mode, *environment), *expected = PLACEMENTS[name]
    variables = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    for variable, value in zip(variables, environment):
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    placement = Placement(Settings(mode=mode))
    dtype = Job.dtype.fget(SimpleNamespace(settings=Settings(), placement=placement))
    assert [str(placement.device), placement.threads, dtype] == expected
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it plans anew for every length of text"
    assert str(Placement(Settings(mode=mode, device="cpu")).device) == "cpu"
    assert Placement(Settings(mode=mode, pace=(60, 8))).threads == 1


def join_with_gpus(num_gpus: int) -> tuple[list[str], list[str]]:
    """A rank's job: the devices of all ranks; and what joining does: the device made current (NCCL
    takes that one), or cores of its own, the groups, and the messages that connect them."""
    fake_gpus()
    new_group = dist.new_group
    done = []

    def record_group(ranks=None, timeout=None, backend=None):
        if ranks:  # the others are for loading
            done.append(f"{backend} {len(ranks)}")
        return new_group(ranks, timeout, backend)

    torch.cuda.device_count = lambda: num_gpus
    torch.cuda.set_device = lambda device: done.append(str(device))
    os.sched_getaffinity = lambda _: set(range(8))
    os.sched_setaffinity = lambda _, cores: done.append(f"cores {cores}")
    dist.new_group = record_group
    dist.all_reduce = lambda tensor, group: done.append(f"from {tensor.device}")
    placement = Placement(Settings())
    placement.join({})
    return placement.devices, done


def test_joining_shares_the_cores_connects_the_gpus_and_tells_the_devices():
    cores = ["cores [0, 1, 2, 3]", "cores [4, 5, 6, 7]"]
    assert in_ranks(2, join_with_gpus, 0) == [
        (["cpu", "cpu"], [where, "gloo 2"]) for where in cores]
    assert in_ranks(2, join_with_gpus, 1) == [
        (["cuda:0", "cpu"], [where, "gloo 2"]) for where in ("cuda:0", cores[1])]
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    steps = [[gpu, "nccl 3", f"from {gpu}", "nccl 2", f"from {gpu}"] for gpu in devices]
    assert in_ranks(3, join_with_gpus, 3) == [
        (devices, steps[0]), (devices, steps[1]), (devices, steps[2][:-1])]


def test_downloads_show_their_progress_and_loading_shows_nothing(capsys):
    load(str(TINY / "draft"), None, torch.float32, "cpu")
    assert not capsys.readouterr().err and not are_progress_bars_disabled()


@pytest.mark.parametrize("T_p, advice", (
    (1.0, "hidden behind it"), (1.2, "the target waits: --lookahead 3 would be hidden"),
    (1.9, "--lookahead 1 would be"), (3.0, "use --mode sd, or a GPU for each rank")))
def test_the_summary_says_which_lookahead_would_be_hidden(T_p, advice, capsys):
    print_times(Settings(lookahead=4), {"T_p": T_p, "T_b": None, "seconds": 1})
    assert advice in capsys.readouterr().out


# ---- rounds on GPUs ----

ROUNDS = ({}, dict(temperature=1, top_k=20, top_p=0.9, downweight=0.5), dict(backup="lookup"),
          dict(temperature=1, backup="lookup"),
          dict(temperature=1, backup="random"), dict(temperature=1, mode="sd"),
          dict(temperature=1, mode="ar"))
BATCHES = (RAGGED[:1], RAGGED[:3], RAGGED[:1])  # in new buffers, and in those of more rows


def texts_of_rounds(decoder: Decoder) -> list[list[list[int]]]:
    """Of all batches with all choices."""
    texts = []
    for choices in ROUNDS:
        settings = replace(decoder.settings, max_new_tokens=12, **choices)
        texts += map(Decoder(settings, decoder.models), BATCHES)
    return texts


def decode_on_gpus(draft_device: str) -> list:
    """A rank's job."""
    fake_gpus()
    cuda_graphs.WIDTHS = [16]
    target = copy.deepcopy(random_model()).to("cuda:0")
    draft = copy.deepcopy(imitation(random_model(), 0.15)).to(draft_device)
    decoder = make_decoder(target, draft)
    models = [model for model in decoder.models[:2] if model.device != CPU]
    for model in models:
        model.forward_fn = cuda_graphs.GraphRunner(model)
    texts = texts_of_rounds(decoder)
    for model in models:
        assert model.kv.graphs and model.forward_fn != model.forward_eager
    return texts


@slow
@pytest.mark.parametrize("draft_device", ("cuda:0", "cpu"))
def test_rounds_on_gpus_write_the_same_texts(draft_device):
    """No tensor meets one of another device, and none is copied inside a capture."""
    expected = texts_of_rounds(make_decoder(random_model(), imitation(random_model(), 0.15)))
    assert in_ranks(1, decode_on_gpus, draft_device) == [expected]


def host_waits(temperature: float) -> dict[str, int]:
    """A rank's job: how often the host waits for the GPU in each step of a round that hits."""
    fake_gpus()
    model = copy.deepcopy(random_model()).to("cuda:0")
    decoder = make_decoder(model, model, temperature=temperature)
    record = run_rounds(decoder, RAGGED[:1], 2)
    draft = decoder.draft
    sequences = Sequences(RAGGED[:1], 20, 64, [])
    waits = {}

    def count(step: str, function, *given):
        before = FakeCUDA.host_waits
        result = function(*given)
        waits[step] = FakeCUDA.host_waits - before
        return result

    speculation, outcome = record[-1]
    speculation = draft.speculate(speculation, outcome, draft.pre_speculate(speculation))
    outcome = count("verify", decoder.target.verify, speculation)
    count("tell the outcome", sequences.extend, speculation, outcome)
    cache = count("pre-speculate", draft.pre_speculate, speculation)
    hit = Outcome(cache.guesses.num_accepted[:, 0], cache.guesses.bonus[:, 0])
    answer = count("answer", draft.speculate, speculation, hit, cache)
    assert answer.source == PRIMARY
    return waits


@pytest.mark.parametrize("temperature", (0, 1))
def test_how_often_the_host_waits_for_the_gpu(temperature):
    """For the outcome; for the tokens that were verified, twice; for guesses."""
    waits = {"verify": 1, "tell the outcome": 1, "pre-speculate": 1, "answer": 1}
    assert in_ranks(1, host_waits, temperature) == [waits]


# ---- CUDA graphs ----

def test_a_short_text_after_a_long_one_captures_nothing(fake_graphs):
    draft = imitation(random_model(), 0.15)
    decoder = make_decoder(random_model(), draft, mode="sd", max_new_tokens=18)
    for model in decoder.models[:2]:
        model.forward_fn = cuda_graphs.GraphRunner(model)
    decoder([[7] * 30])
    before = FakeGraph.captures
    assert decoder([[1, 2]]) == greedy_reference(random_model(), [[1, 2]], 18)
    assert FakeGraph.captures == before > 0


@pytest.mark.parametrize("family, changes", windowed(8))
def test_the_window_of_a_captured_pass_moves(family, changes, fake_graphs):
    target = random_model(family, num_hidden_layers=2, **changes)
    decoder = make_decoder(target, imitation(target, 0.15), max_new_tokens=18)
    for model in decoder.models[:2]:
        model.forward_fn = cuda_graphs.GraphRunner(model)
    assert decoder(RAGGED) == greedy_reference(target, RAGGED, 18)
    assert all(model.kv.graphs for model in decoder.models[:2])


def refuse(*_, **__):
    raise RuntimeError("operation not permitted")


def replay_wrongly(graph: FakeGraph, replay=FakeGraph.replay) -> None:
    replay(graph)
    *_, output = graph.operations[-1]
    output.add_(1)


@pytest.mark.parametrize("replay, reason", (
    (refuse, "operation not permitted"),
    (lambda graph: None, "the captured pass gives other logits"),  # nothing was captured
    (replay_wrongly, "the captured pass gives other logits")))
def test_what_cannot_be_captured_runs_eagerly(replay, reason, fake_graphs, monkeypatch, capsys):
    monkeypatch.setattr(FakeGraph, "replay", replay)
    decoder = make_decoder(random_model(), mode="ar", max_new_tokens=20)
    model = decoder.target.model
    model.forward_fn = cuda_graphs.GraphRunner(model)
    assert decoder([[1, 2]]) == greedy_reference(random_model(), [[1, 2]], 20)
    assert model.forward_fn == model.forward_eager
    assert capsys.readouterr().err.count(f"run eagerly: {reason}") == 1


# ---- a target that several ranks share ----

SHARED = {"llama": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
          "qwen3": dict(head_dim=8), "qwen2": {}, "olmo2": {}, "gpt_neox": {},
          "mistral": dict(sliding_window=3), "gemma2": dict(sliding_window=3), "phi": {},
          "gemma3": dict(text_config=dict(
              vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, intermediate_size=48, sliding_window=3,
              layer_types=["sliding_attention", "full_attention"], initializer_range=0.3),
              vision_config=dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=8, image_size=28))}  # of images and text
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def uneven(model):
    """A copy whose biases are not 0 and whose norms are not 1."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


def load_share(folder: Path) -> CausalLM:
    config = AutoConfig.from_pretrained(folder)
    share = load_sharded(str(folder), config, torch.float64, "cpu", dist.group.WORLD)
    return CausalLM(share)


def logits_of(model: CausalLM, passes: int = 1) -> list[list]:
    """The logits of TOKENS by every pass."""
    model.allocate(2, 8, 8)
    start = torch.zeros(2, dtype=torch.long)
    return [model.causal(TOKENS, start).tolist() for _ in range(passes)]


def assert_logits_are_those_of(model, logits: list[list]) -> None:
    with torch.inference_mode():
        whole = model(TOKENS, use_cache=False).logits
    computed = torch.tensor(logits).double()
    torch.testing.assert_close(computed, whole.expand_as(computed), rtol=1e-5, atol=1e-5)


def logits_of_shares(folders: list[Path]) -> list[list]:
    """A rank's job: for every checkpoint the logits of this rank."""
    dist.init_process_group("gloo")
    all_logits = []
    for folder in folders:
        share = load_share(folder)
        whole = AutoModelForCausalLM.from_config(share.model.config)
        assert share.model.num_parameters() < 0.8 * whole.num_parameters()
        all_logits.append(logits_of(share))
    return all_logits


def test_two_shares_of_a_target_give_the_logits_of_the_whole(tmp_path):
    models = [uneven(random_model.__wrapped__(family, **dict(num_key_value_heads=2) | changes))
              for family, changes in SHARED.items()]
    folders = [tmp_path / family for family in SHARED]
    for model, folder in zip(models, folders):
        model.save_pretrained(folder, max_shard_size="20KB")  # several files
    for all_logits in in_ranks(2, logits_of_shares, folders):
        for model, logits in zip(models, all_logits):
            assert_logits_are_those_of(model, logits)


def captured_shares(folder: Path, trouble: str) -> tuple[list, int, bool]:
    """A rank's job: logits of five passes, how many were replayed, and whether the rank still
    captures. Rank 1 has the trouble."""
    dist.init_process_group("gloo")
    for name, value in FAKES.items():
        setattr(torch.cuda, name, value)
    if dist.get_rank() == 1 and trouble == "capture":
        torch.cuda.graph = refuse
    if dist.get_rank() == 1 and trouble == "replay":
        FakeGraph.replay = replay_wrongly
    model = load_share(folder)
    model.forward_fn = cuda_graphs.GraphRunner(model, dist.group.WORLD)
    return logits_of(model, passes=5), FakeGraph.replays, model.forward_fn != model.forward_eager


@slow
@pytest.mark.parametrize("trouble", ("", "capture", "replay"))
def test_shares_are_captured_on_all_ranks_or_on_none(trouble, tmp_path):
    random_model().save_pretrained(tmp_path)
    for logits, replays, captures in in_ranks(2, captured_shares, tmp_path, trouble):
        assert_logits_are_those_of(random_model(), logits)
        assert captures == (not trouble)
        assert replays == 6 or trouble, "one on trial, and five passes"
