"""Tests of what pays on GPUs only, with small stand-ins for them."""
import copy
import gc
import os
import time
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoTokenizer

import saguaro
from cache import PRIMARY
from runtime import cuda_graphs, launch, placement, screen
from runtime.model import CausalLM, Stopwatch
from runtime.placement import Job, Placement
from runtime.settings import TINY, Settings, UserError
from runtime.tensor_parallel import load_sharded
from test_equivalence import RAGGED, decoder, imitation, in_ranks, random_model, settings

slow = pytest.mark.slow
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


# ---- who computes where ----

def test_attention_is_not_planned_anew_for_every_length():
    torch.backends.cuda.enable_cudnn_sdp(True)
    Placement(settings(), "ar")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# GPUs, (mode, ranks, ranks here, rank, local rank), threads of 8 cores
THREADS = {
    "one GPU, target": (1, ("ssd", 2, 2, 0, 0), 1),
    "one GPU, draft": (1, ("ssd", 2, 2, 1, 1), 7),
    "one GPU, draft beside a share": (1, ("ssd", 3, 3, 2, 2), 1),
    "one GPU, share beside the draft": (1, ("ssd", 3, 3, 1, 1), 6),
    "two machines, draft": (0, ("ssd", 2, 1, 1, 0), 8),
    "two machines, share far from the draft": (0, ("ssd", 4, 2, 1, 1), 4),
    "no GPU, draft": (0, ("ssd", 2, 2, 1, 1), 1),
    "no GPU, target": (0, ("ssd", 2, 2, 0, 0), 7)}


@pytest.mark.parametrize("place", THREADS)
def test_ranks_on_cpus_share_the_cores_of_their_machine(place, monkeypatch):
    num_gpus, (mode, world_size, local_world_size, rank, local_rank), threads = THREADS[place]
    for name, value in (("WORLD_SIZE", world_size), ("LOCAL_WORLD_SIZE", local_world_size),
                        ("RANK", rank), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    assert Placement(Settings(mode=mode), mode).threads == threads


def join_with_gpus(num_gpus: int) -> tuple[list[str], list[str]]:
    """A rank's job: the devices of all ranks, and the groups connected by joining."""
    zeros = torch.zeros
    new_group = dist.new_group
    connected = []
    names = {}

    def named_group(ranks, timeout, backend):
        group = new_group(ranks)
        names[group] = f"{backend} {ranks}"
        return group

    torch.zeros = lambda *shape, device, **options: zeros(*shape, **options)
    torch.cuda.device_count = lambda: num_gpus
    torch.cuda.set_device = lambda device: None
    dist.new_group = named_group
    dist.all_reduce = lambda tensor, group: connected.append(names[group])
    found = Placement(Settings(), "ssd")
    found.join()
    return found.devices, connected


def test_joining_connects_the_gpus_and_tells_the_devices():
    assert in_ranks(2, join_with_gpus, 1) == [(["cuda:0", "cpu"], [])] * 2
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    shares = (devices, ["nccl [0, 1, 2]", "nccl [0, 1]"])
    assert in_ranks(3, join_with_gpus, 3) == [shares, shares, (devices, ["nccl [0, 1, 2]"])]


@pytest.mark.parametrize("devices, shown", ((["cuda:0", "cpu"], True), (["cpu", "cpu"], False)))
def test_the_screen_says_which_device_each_rank_has(devices, shown, capsys):
    job = Job(Settings(), ["x"])
    job.placement.devices = devices
    job.settings.mode = "ar"
    screen.Display(job).summarise(screen.Stats().summary())
    assert ("cuda:0, cpu" in capsys.readouterr().out) == shown


@pytest.mark.parametrize("share, device", ((0.83, "cpu"), (0.87, "sequential")))
def test_a_target_that_fits_on_one_gpu_is_not_spread(share, device, monkeypatch):
    """`share` of the GPU's free memory is what its weights take."""
    job = Job(settings("ar"))
    job.placement.target_gpus = [0, 1]
    model = placement.load(job.settings.target, job.target_config, job.dtype, "cpu")
    free = int(model.get_memory_footprint() / share)
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free, 2 * free))
    monkeypatch.setattr(placement, "load", lambda *given: asked.append(given[3]) or model)
    job.load_target()
    assert [str(each) for each in asked] == [device]


# ---- what costs time once ----

def test_batches_of_a_job_share_buffers_and_graphs():
    model = CausalLM(random_model())
    model.longest = 30
    model.allocate(2, 14, 10)
    kv = model.kv
    model.allocate(2, 34, 30)
    assert model.kv is kv and kv.slots == 34


def test_a_warm_up_captures_and_changes_nothing():
    target = random_model()
    draft = imitation(target, 0.15)
    choices = dict(mode="sd", temperature=1, max_new_tokens=20)
    expected = decoder(target, draft, **choices)(RAGGED)
    made = decoder(target, draft, **choices)
    models = saguaro.Models(made.target.model, made.speculator.model, made.context, 40)
    verified = []
    causal = models.target.causal
    models.target.causal = lambda *given, **options: verified.append(1) or causal(*given, **options)
    saguaro.warm_up(SimpleNamespace(settings=made.settings, placement=None, prompts=RAGGED), models)
    assert len(verified) > cuda_graphs.CAPTURE_FROM + 1, "prefill, round 0, and so many rounds"
    assert made(RAGGED) == expected


class FakeEvent:
    """Stands in for a CUDA event."""

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1000 * (end.time - self.time)


def test_the_stopwatch_does_not_wait_for_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        with watch("step"):
            time.sleep(0.01)
    assert not waits
    seconds, count = watch.read()["step"]
    assert 0.02 <= seconds < 0.2 and count == 2 and watch.read() == {}
    watch.spans = []
    with watch("step"):
        pass
    assert len(watch.spans) == len(waits) == 1


def test_the_screen_decodes_only_what_is_new(monkeypatch):
    """And writes the same text, halves of characters included."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    tokens = tokenizer("def f(x):\n    return '🦉é' + x  # 🦉\n\n" * 20)["input_ids"]
    lengths = []

    def decode(part: list[int], **options) -> str:
        lengths.append(len(part))
        return tokenizer.decode(part, **options)

    job = Job(Settings(), ["x"])
    job.tokenizer = SimpleNamespace(decode=decode)
    display = screen.Display(job)
    written = []
    monkeypatch.setattr(display, "write", lambda text, style: written.append(text))
    position = 0
    for count in torch.randint(1, 6, (len(tokens),), generator=torch.manual_seed(0)).tolist():
        display.show(0, tokens[position:position + count], PRIMARY)
        position += count
    display.stream([], display.PLAIN, last=True)
    assert "".join(written) == tokenizer.decode(tokens) and "🦉é" in "".join(written)
    assert max(lengths) < 20 < len(tokens)


# ---- a target that several ranks share ----

class FakeGraph(TorchDispatchMode):
    """Stands in for a CUDA graph: repeats the operations of a pass on the tensors that they took
    and gave. All-reduces are captured only, and wait for no other rank."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def pool(self) -> None:
        return None

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        given = operation(*arguments, **options or {})
        self.operations.append((operation, arguments, options or {}, given))
        return given

    def replay(self) -> None:
        for operation, arguments, options, given in self.operations:
            again = operation(*arguments, **options)
            for old, new in zip(tree_leaves(given), tree_leaves(again)):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)  # else: a view, or in place


    @contextmanager
    def capture(self, *_, **__):
        all_reduce = dist.all_reduce
        dist.all_reduce = lambda tensor, group: self.operations.append(
            (all_reduce, (tensor,), {"group": group}, None))
        with self:
            yield
        dist.all_reduce = all_reduce


def refuse(*_, **__):
    raise RuntimeError("not permitted")


def captured_shares(folder: Path, trouble: str) -> tuple[list, int, bool]:
    """A rank's job: logits of five passes, how many of them were replayed, and whether the rank
    still captures. Rank 1 has the trouble."""
    dist.init_process_group("gloo")
    stream = SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.CUDAGraph = FakeGraph
    torch.cuda.Stream = torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda _: nullcontext()
    torch.cuda.graph = FakeGraph.capture
    replays = []
    replay = FakeGraph.replay
    FakeGraph.replay = lambda graph: replays.append(1) or replay(graph)
    if dist.get_rank() == 1 and trouble == "capture":
        torch.cuda.graph = refuse
    if dist.get_rank() == 1 and trouble == "replay":
        FakeGraph.replay = lambda graph: replay(graph) or graph.operations[-1][3].add_(1)
    config = AutoConfig.from_pretrained(folder)
    share = load_sharded(str(folder), config, torch.float64, "cpu", dist.group.WORLD)
    model = CausalLM(share)
    model.forward_fn = cuda_graphs.GraphRunner(model, dist.group.WORLD)
    model.allocate(2, 8, 8)
    start = torch.zeros(2, dtype=torch.long)
    logits = [model.causal(TOKENS, start).tolist() for _ in range(5)]
    return logits, len(replays), model.forward_fn != model.forward_eager


@slow
@pytest.mark.parametrize("trouble", ("", "capture", "replay"))
def test_shares_are_captured_on_all_ranks_or_on_none(trouble, tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        whole = model(TOKENS, use_cache=False).logits
    for logits, replays, captures in in_ranks(2, captured_shares, tmp_path, trouble):
        for each in logits:
            torch.testing.assert_close(torch.tensor(each).double(), whole, rtol=1e-5, atol=1e-5)
        assert captures == (not trouble)
        assert replays == 4 or trouble, "one on trial, and the third to fifth pass"


def test_graphs_end_before_the_communicators_that_they_use(monkeypatch):
    graph = nullcontext()
    graph.enter_result = [graph]  # as a model knows its runner, and a runner its model
    ended = weakref.ref(graph)
    destroyed = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(ended()))
    del graph
    gc.disable()
    try:
        launch.run(Settings(), lambda settings: None)
    finally:
        gc.enable()
    assert destroyed == [None]


FAMILIES = {"gpt_neox": {}, "mistral": {}, "llama": dict(tie_word_embeddings=True),
            "gemma2": {}, "olmo2": {}, "phi": {}, "qwen3": dict(head_dim=8)}


def logits_of_shares(folders: list[Path]) -> list[list]:
    """A rank's job: for every checkpoint the logits of TOKENS."""
    dist.init_process_group("gloo")
    results = []
    for folder in folders:
        config = AutoConfig.from_pretrained(folder)
        model = CausalLM(
            load_sharded(str(folder), config, torch.float64, "cpu", dist.group.WORLD))
        model.allocate(2, 8, 8)
        results.append(model.causal(TOKENS, torch.zeros(2, dtype=torch.long)).tolist())
    return results


def test_shares_are_read_whatever_transformers_calls_the_weights_in_the_file(tmp_path):
    models = {}
    for family, changes in FAMILIES.items():
        model = copy.deepcopy(random_model(family, **dict(num_key_value_heads=2) | changes))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:  # else biases are 0, and norms 1
                    weight += 0.3 * torch.randn_like(weight)
        model.save_pretrained(tmp_path / family, max_shard_size="20KB")
        models[family] = model
    found = in_ranks(2, logits_of_shares, [tmp_path / family for family in models])
    for model, *both in zip(models.values(), *found):
        with torch.inference_mode():
            whole = model(TOKENS, use_cache=False).logits
        for logits in both:
            torch.testing.assert_close(torch.tensor(logits).double(), whole, rtol=1e-5, atol=1e-5)


def test_weights_that_are_made_from_others_are_refused_before_any_is_read(tmp_path, monkeypatch):
    """As those of HRM: a file has q, k and v in one piece."""
    from transformers.core_model_loading import Chunk, WeightConverter
    from runtime import tensor_parallel

    random_model().save_pretrained(tmp_path)
    rule = WeightConverter("mlp.up_proj.weight", ["mlp.a.weight", "mlp.b.weight"], [Chunk(dim=0)])
    monkeypatch.setattr(tensor_parallel, "get_model_conversion_mapping", lambda model: [rule])
    monkeypatch.setattr(tensor_parallel, "read_share", None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="in shares: .*up_proj.weight is not a weight"):
            load_sharded(str(tmp_path), random_model().config, torch.float64, "cpu",
                         dist.group.WORLD)
    finally:
        dist.destroy_process_group()
