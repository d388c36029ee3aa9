"""Tests of what larger models need: placement, CUDA graphs, tensor parallelism, GPUs. There need be
no GPU: `FakeGraph` stands in for a CUDA graph, `FakeCUDA` for GPUs.

    python -m pytest engine/test_engine.py
"""
import copy
import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from huggingface_hub.utils import are_progress_bars_disabled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM

from cache import PRIMARY, Outcome
from cli.job import Job
from cli.placement import Placement
from cli.screen import print_times
from cli.settings import TINY, Settings
from cli.stats import Stats
from engine import cuda_graphs
from engine.model import CausalLM, load
from engine.tensor_parallel import load_sharded
from saguaro import Decoder, Sequences
from test_equivalence import (
    RAGGED,
    decoder,
    greedy_reference,
    imitation,
    in_ranks,
    random_model,
    run_rounds,
)

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


# ---- stand-ins for CUDA graphs and GPUs ----

class FakeGraph(TorchDispatchMode):
    """Stands in for a CUDA graph: remembers the operations of a pass with the very tensors that
    they took and gave, and repeats them on these. As on a GPU all-reduces are captured, but wait
    for no other rank before the graph is replayed."""
    captures = 0
    replays = 0
    capturing = False

    def __init__(self):
        super().__init__()
        self.operations = []

    def pool(self) -> None:
        return None

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        given = operation(*arguments, **options or {})
        self.operations.append(on_host((operation, arguments, options or {}, given)))
        return given

    @contextmanager
    def capture(self, *_, **__):
        FakeGraph.captures += 1
        all_reduce = dist.all_reduce

        def remember(tensor, group):
            self.operations.append(on_host((all_reduce, (tensor,), {"group": group}, None)))

        with mock.patch.object(dist, "all_reduce", remember), self:
            FakeGraph.capturing = True
            yield
            FakeGraph.capturing = False

    def replay(self) -> None:
        FakeGraph.replays += 1
        with _disable_current_modes():
            for operation, arguments, options, given in self.operations:
                again = operation(*arguments, **options)
                for old, new in zip(tensors_in(given), tensors_in(again)):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)  # else: a view, or in place


EVENT = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 0.0)


class FakeStream:
    def wait_stream(self, other) -> None:
        """Nothing runs beside anything."""


FAKES = {"CUDAGraph": FakeGraph, "graph": FakeGraph.capture, "Event": lambda enable_timing: EVENT,
         "Stream": FakeStream, "current_stream": FakeStream,
         "stream": lambda _: nullcontext()}  # in place of those of torch.cuda


@pytest.fixture
def fake_graphs(monkeypatch):
    """The code for CUDA graphs runs on a CPU."""
    for name, value in FAKES.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graphs, "WIDTHS", [16, 32, 64])


CPU = torch.device("cpu")
READS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}


class FakeCUDATensor(Tensor):
    """Stands in for a tensor on a GPU: it has the device, and its numbers are in host memory."""

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device):
        with torch.inference_mode(False):
            return Tensor._make_wrapper_subclass(
                cls, numbers.shape, numbers.stride(), numbers.storage_offset(),
                dtype=numbers.dtype, device=device)

    def __init__(self, numbers: Tensor, device: torch.device):
        self.numbers = numbers

    def tolist(self) -> list:
        return self.cpu().tolist()

    def __torch_dispatch__(self, *_, **__):
        raise RuntimeError("a tensor on a GPU, and no FakeCUDA")


class FakeCUDA(TorchDispatchMode):
    """Every operation of PyTorch passes through here and, as on a GPU, tensors of different devices
    cannot meet in one, none can be copied between devices while a graph is captured, and a copy to
    the host must be waited for."""
    host_waits = 0  # how often the host has waited: for numbers, or to hand some over

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        options = options or {}
        name = operation.overloadpacket.__name__
        if name == "to":  # becomes a copy, if it must be one
            with self:
                return operation.decompose(*arguments, **options)
        tensors = tensors_in(arguments, *options.values())
        # a number may meet tensors of any device, and one without numbers is on none
        devices = {tensor.device for tensor in tensors
                   if tensor.device.type == "cuda" or tensor.dim() and tensor.device == CPU}
        copies = name in ("copy_", "_to_copy")
        target = options.get("device")
        if target is None:
            target = tensors[0].device if copies else next(iter(devices), CPU)
        if devices | {target} == {CPU}:
            return operation(*arguments, **options)
        crosses = copies and tensors[-1].device != target
        if not copies and devices - {target}:
            raise RuntimeError(f"{operation}: tensors on {devices}")
        blocks = crosses and not (options.get("non_blocking") or True in arguments[2:])
        if crosses and target == CPU and not blocks:
            raise RuntimeError("the host would read before the copy has ended")
        FakeCUDA.host_waits += blocks or name in READS
        if FakeGraph.capturing and (crosses or name in READS):
            raise RuntimeError("operation not permitted when stream is capturing")
        known = {id(on_host(tensor)): tensor for tensor in tensors}  # changed in place

        def at_target(computed):
            if isinstance(computed, (list, tuple)):
                return type(computed)(map(at_target, computed))
            if id(computed) in known or target == CPU or not isinstance(computed, Tensor):
                return known.get(id(computed), computed)
            return FakeCUDATensor(computed, target)

        return at_target(operation(*on_host(arguments), **on_host(options)))


def on_host(value):
    """All tensors as their numbers in host memory, and devices as the CPU."""
    if isinstance(value, FakeCUDATensor):
        return value.numbers
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    if type(value) is dict:
        return {key: on_host(part) for key, part in value.items()}
    return CPU if isinstance(value, torch.device) else value


def tensors_in(*values) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def fake_gpus() -> None:
    """From now on this process, for the rest of its life, has GPUs. gloo stands in for NCCL,
    `FakeGraph` for a CUDA graph."""
    if torch.cuda.CUDAGraph is FakeGraph:
        return
    new_gloo_group = dist.new_group
    dist.new_group = lambda ranks, timeout, backend: new_gloo_group(ranks)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes new ones
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a mode holds for one thread
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch._C._ensureCUDADeviceGuardSet()  # these three as PyTorch's own FakeTensorMode does
    torch._C._set_only_lift_cpu_tensors(True)
    torch.cuda._lazy_init = lambda: None
    FakeCUDA().__enter__()
    for name, value in FAKES.items():
        setattr(torch.cuda, name, value)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda _: (9, 0)
    torch.cuda.mem_get_info = lambda _: (2 ** 36, 2 ** 36)
    torch.cuda.synchronize = lambda *_: setattr(FakeCUDA, "host_waits", FakeCUDA.host_waits + 1)
    torch.cuda.get_device_name = lambda _: "stand-in"
    torch.cuda.set_device = lambda _: None


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
    found = Placement(Settings(mode=mode))
    dtype = Job.dtype.fget(SimpleNamespace(settings=Settings(), placement=found))
    assert [str(found.device), found.threads, dtype] == expected
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it plans anew for every length of text"
    assert str(Placement(Settings(mode=mode, device="cpu")).device) == "cpu"
    assert Placement(Settings(mode=mode, pace=(60, 8))).threads == 1


def join_with_gpus(num_gpus: int) -> tuple[list[str], list[str]]:
    """A rank's job: the devices of all ranks; and what joining does: the device made current (NCCL
    takes that one), or cores of its own, the groups, and the messages that connect them."""
    fake_gpus()
    new_group = dist.new_group
    done = []

    def record_group(ranks, timeout, backend):
        done.append(f"{backend} {len(ranks)}")
        return new_group(ranks, timeout, backend)

    torch.cuda.device_count = lambda: num_gpus
    torch.cuda.set_device = lambda device: done.append(str(device))
    os.sched_getaffinity = lambda _: set(range(8))
    os.sched_setaffinity = lambda _, cores: done.append(f"cores {cores}")
    dist.new_group = record_group
    dist.all_reduce = lambda tensor, group: done.append(f"from {tensor.device}")
    found = Placement(Settings())
    found.join()
    return found.devices, done


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


def texts_of_rounds(made: Decoder) -> list[list[list[int]]]:
    """Of all batches with all choices."""
    texts = []
    for choices in ROUNDS:
        settings = replace(made.settings, max_new_tokens=12, **choices)
        texts += map(Decoder(settings, made.models), BATCHES)
    return texts


def decode_on_gpus(draft_device: str) -> list:
    """A rank's job."""
    fake_gpus()
    cuda_graphs.WIDTHS = [16]
    target = copy.deepcopy(random_model()).to("cuda:0")
    draft = copy.deepcopy(imitation(random_model(), 0.15)).to(draft_device)
    made = decoder(target, draft)
    models = [model for model in made.models[:2] if model.device != CPU]
    for model in models:
        model.forward_fn = cuda_graphs.GraphRunner(model)
    texts = texts_of_rounds(made)
    for model in models:
        assert model.kv.graphs and model.forward_fn != model.forward_eager
    return texts


@slow
@pytest.mark.parametrize("draft_device", ("cuda:0", "cpu"))
def test_rounds_on_gpus_write_the_same_texts(draft_device):
    """No tensor meets one of another device, and none is copied inside a capture."""
    expected = texts_of_rounds(decoder(random_model(), imitation(random_model(), 0.15)))
    assert in_ranks(1, decode_on_gpus, draft_device) == [expected]


def host_waits(temperature: float) -> dict[str, int]:
    """A rank's job: how often the host waits for the GPU in each step of a round that hits."""
    fake_gpus()
    model = copy.deepcopy(random_model()).to("cuda:0")
    made = decoder(model, model, temperature=temperature)
    record = run_rounds(made, RAGGED[:1], 2)
    draft = made.speculator.draft
    sequences = Sequences(RAGGED[:1], 20, 64, [], Stats(), lambda *_: None)
    waits = {}

    def count(step: str, function, *given):
        before = FakeCUDA.host_waits
        result = function(*given)
        waits[step] = FakeCUDA.host_waits - before
        return result

    speculation = made.speculator.speculate(*record[-1])
    verified = count("verify", made.target.verify, speculation)
    count("tell the outcome", sequences.extend, *verified)
    cache = count("pre-speculate", draft.pre_speculate, speculation)
    hit = Outcome(cache.guesses.num_accepted[:, 0], cache.guesses.bonus[:, 0])
    answer = count("answer", draft.speculate, speculation, hit, cache)
    assert answer.source == PRIMARY
    return waits


@pytest.mark.parametrize("temperature", (0, 1))
def test_how_often_the_host_waits_for_the_gpu(temperature):
    """For the outcome and the tokens verified; for guesses; for the tokens of the last answer."""
    waits = {"verify": 1, "tell the outcome": 0, "pre-speculate": 1, "answer": 1}
    assert in_ranks(1, host_waits, temperature) == [waits]


# ---- CUDA graphs ----

def test_a_short_text_after_a_long_one_captures_nothing(fake_graphs):
    draft = imitation(random_model(), 0.15)
    made = decoder(random_model(), draft, mode="sd", max_new_tokens=18)
    for model in made.models[:2]:
        model.forward_fn = cuda_graphs.GraphRunner(model)
    made([[7] * 30])
    before = FakeGraph.captures
    assert made([[1, 2]]) == greedy_reference(random_model(), [[1, 2]], 18)
    assert FakeGraph.captures == before > 0


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
    made = decoder(random_model(), mode="ar", max_new_tokens=20)
    model = made.target.model
    model.forward_fn = cuda_graphs.GraphRunner(model)
    assert made([[1, 2]]) == greedy_reference(random_model(), [[1, 2]], 20)
    assert model.forward_fn == model.forward_eager
    assert capsys.readouterr().err.count(f"run eagerly: {reason}") == 1


# ---- a target that several ranks share ----

SHARED = {"llama": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
          "qwen3": dict(head_dim=8), "qwen2": {}, "olmo2": {}, "gpt_neox": {}, "mistral": {},
          "gemma2": {}, "phi": {}}
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
    found = torch.tensor(logits).double()
    torch.testing.assert_close(found, whole.expand_as(found), rtol=1e-5, atol=1e-5)


def logits_of_shares(folders: list[Path]) -> list[list]:
    """A rank's job: for every checkpoint the logits of this rank."""
    dist.init_process_group("gloo")
    found = []
    for folder in folders:
        share = load_share(folder)
        whole = AutoModelForCausalLM.from_config(share.model.config)
        assert share.model.num_parameters() < 0.8 * whole.num_parameters()
        found.append(logits_of(share))
    return found


def test_two_shares_of_a_target_give_the_logits_of_the_whole(tmp_path):
    models = [uneven(random_model(family, **dict(num_key_value_heads=2) | changes))
              for family, changes in SHARED.items()]
    folders = [tmp_path / family for family in SHARED]
    for model, folder in zip(models, folders):
        model.save_pretrained(folder, max_shard_size="20KB")  # several files
    for found in in_ranks(2, logits_of_shares, folders):
        for model, logits in zip(models, found):
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
