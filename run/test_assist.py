"""Tests of the way in from Python: texts, and the draft's process, whatever ends it."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from cli.settings import ROOT, TINY, Settings
from engine.errors import UserError
from run import Decoder, Job, Saguaro
from run.assist import DraftProcess
from run.text import text_pieces

slow = pytest.mark.slow
TEXTS = ["def f(x):", "import os\n", "'🦉"]
CHOICES = dict(max_new_tokens=20, temperature=1.0, dtype="float64")
COUNTS = ("tokens", "rounds", "hit_rate", "acceptance_rate", "E_hit", "E_miss", "fan_out",
          "fan_out_after_backup")


def continue_texts(saguaro: Saguaro) -> list:
    """What follows the texts, its pieces together, the counts of this call (of which the one before
    has none), what follows the first text alone, and why that ended."""
    heard = [""] * len(TEXTS)

    def on_text(number: int, piece: str) -> None:
        heard[number] += piece

    saguaro("of another call")
    found = saguaro(TEXTS, on_text)
    stats = saguaro.stats
    summary = stats.summary()
    counts = [summary[name] for name in COUNTS]
    rows = sum(len(timed.rows) for timed in stats.log)
    assert torch.tensor(stats.guess_counts).sum() == rows - 2 * len(TEXTS)
    assert torch.tensor(stats.fan_outs).sum() == 12 * (rows - len(TEXTS))
    assert len(stats.seconds_of("verify")) == summary["rounds"]
    assert (summary["tokens_per_second"] is None) == stats.in_turns
    return [found, heard, counts, stats.guess_counts, saguaro(TEXTS[0]),
            saguaro.decoder.finish_reasons]


def test_a_text_gives_a_text_and_texts_a_list_the_same_from_two_processes_and_from_one(monkeypatch):
    choices = dict(max_new_tokens=20, batch_size=2, fan_out="confident", dtype="float64")
    here = continue_texts(Saguaro(in_turns=True, **choices))
    found, heard, _, _, alone, reasons = here
    job = Job(Settings(mode="ar", prompt=TEXTS, max_new_tokens=20, dtype="float64"))
    tokens = Decoder(job.settings, job.load())(job.prompts)
    assert found == ["".join(text_pieces(job.tokenizer, *row)) for row in zip(job.prompts, tokens)]
    assert (heard, alone, reasons) == (found, found[0], ["length"])
    with monkeypatch.context() as context, pytest.raises(RuntimeError):  # a group that has failed
        context.setenv("GLOO_SOCKET_IFNAME", "nowhere")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Saguaro(**choices) as saguaro:
        assert continue_texts(saguaro) == here


@slow
@pytest.mark.parametrize("choices", (
    dict(temperature=1.0, seed=3),
    dict(temperature=1.0, verification="race", fan_out="confident", backup="lookup", batch_size=2)))
def test_a_saguaro_writes_and_counts_what_the_command_does(choices, tmp_path):
    choices |= dict(max_new_tokens=20, dtype="float64", lookahead=5)
    prompts = tmp_path / "prompts"
    out = tmp_path / "out"
    rows = [json.dumps({"prompt": text}) for text in TEXTS]
    prompts.write_text("\n".join(rows), "utf-8")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in choices.items()]
    words += [f"--prompts={prompts}", f"--output={out}"]
    subprocess.run([sys.executable, "saguaro.py", *words], cwd=ROOT, check=True)
    lines = out.read_text("utf-8").splitlines()
    _, *texts, last = map(json.loads, lines)
    statistics = last["statistics"]
    with Saguaro(prompt=TEXTS, **choices) as saguaro:
        assert saguaro(TEXTS) == [text["text"] for text in texts]
        summary = saguaro.stats.summary()
        assert [summary[name] for name in COUNTS] == [statistics[name] for name in COUNTS]
        assert saguaro.stats.guess_counts[0] == statistics["guess_counts"]


def copy_of(name: str, tmp_path_factory, weights: bytes | None = None) -> Path:
    """A copy of an included model, perhaps with other bytes for weights."""
    folder = shutil.copytree(TINY / name, tmp_path_factory.mktemp(name), dirs_exist_ok=True)
    if weights:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


def drafts_processes(of: psutil.Process) -> list[psutil.Process]:
    """The drafts' processes that a process has started, and that have not ended."""
    alive = [child for child in of.children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "-Pc" in child.cmdline()]


def what_is_there() -> tuple[list, int, int, list]:
    """Drafts' processes of this one, its threads and open files, and what lies in the temporary
    folder."""
    this = psutil.Process()
    files = os.listdir(tempfile.gettempdir())
    return drafts_processes(this), this.num_threads(), this.num_fds(), files


@slow
def test_nothing_is_left_of_a_drafts_process_and_the_next_call_starts_it_anew(
        tmp_path, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = Saguaro(in_turns=True, **CHOICES)
    here("x")
    before = what_is_there()

    def around() -> tuple:
        return (dict(os.environ), os.sched_getaffinity(0), torch.get_num_threads(),
                sys.excepthook)

    around_before = around()

    def writes_the_text_of_this_number(saguaro: Saguaro) -> bool:
        here.decoder.num_batches = saguaro.decoder.num_batches
        return saguaro("y") == here("y")

    with Saguaro(**CHOICES) as saguaro:
        assert writes_the_text_of_this_number(saguaro)
        for wrong, sentence in ((5, "a list of texts"), ("x " * 600, "601 tokens"), ("", "has 0")):
            with pytest.raises(UserError, match=sentence):
                saguaro(wrong)
        with pytest.raises(UserError, match="holds tokens -1 to"):
            saguaro.decoder([[-1]])
        with pytest.raises(UserError, match="one at a time"):
            saguaro("x", lambda *_: Saguaro(**CHOICES))
        with pytest.raises(ZeroDivisionError):
            saguaro("x", lambda *_: 1 / 0)
        assert writes_the_text_of_this_number(saguaro)
        greedy = Decoder(replace(saguaro.job.settings, temperature=0), saguaro.decoder.models)
        alone = Decoder(greedy.settings, here.decoder.models)
        assert greedy([[1, 2, 3]]) == alone([[1, 2, 3]])
        with pytest.raises(UserError, match="without a draft"):
            Decoder(replace(greedy.settings, mode="sd"), greedy.models)
    assert what_is_there() == before
    assert around() == around_before
    assert not capsys.readouterr().err

    forward_fn = saguaro.decoder.target.model.forward_fn
    start = DraftProcess.start
    problems = []

    def interrupt(*given) -> None:
        signal.raise_signal(signal.SIGINT)

    def kill(*given) -> torch.Tensor:
        what_is_there()[0][0].kill()
        return forward_fn(*given)

    for pass_, error in ((interrupt, KeyboardInterrupt), (kill, RuntimeError)):
        assert writes_the_text_of_this_number(saguaro)
        saguaro.decoder.target.model.forward_fn = pass_
        with pytest.raises(error) as problem:
            saguaro("x")
        problems.append(problem)  # whose tracebacks hold the object
        saguaro.decoder.target.model.forward_fn = forward_fn
        assert what_is_there() == before
    assert str(problems[1].value) == "another rank is gone: its own report says why"
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(DraftProcess, "start", lambda *given: (start(*given), interrupt()))
        saguaro("x")
    assert what_is_there() == before
    assert capsys.readouterr().err == 3 * "starting the draft's process anew ...\n"

    assert writes_the_text_of_this_number(saguaro)
    first, = what_is_there()[0]
    second = Saguaro(**CHOICES)
    assert not first.is_running() and len(what_is_there()[0]) == 1
    assert writes_the_text_of_this_number(second) and writes_the_text_of_this_number(saguaro)
    del second
    what_is_there()[0][0].suspend()  # it would not hear that its standard input closes
    saguaro.close()
    assert what_is_there() == before
    with pytest.raises(UserError, match="it holds no weights"):
        Saguaro(draft=copy_of("draft", tmp_path_factory, weights=b"version https://git-lfs"))
    assert what_is_there() == before


HEAD = """import os, signal, sys, threading, time
from run import Saguaro
saguaro = Saguaro(max_new_tokens=20)
print("made", flush=True)
"""
LONG = 'saguaro(["def f(x):"] * 500)'
FORK = HEAD + "child = os.fork()\nif not child:\n    "
ENDS = {
    "the last line": (HEAD + 'saguaro("x")', None, 0),
    "an exception": (HEAD + "1 / 0", None, 1),
    "sys.exit": (HEAD + "sys.exit(3)", None, 3),
    "os._exit": (HEAD + 'saguaro("x"); os._exit(4)', None, 4),
    "SIGKILL in a text": (HEAD + LONG, signal.SIGKILL, -9),
    "SIGTERM in a text": (HEAD + LONG, signal.SIGTERM, -15),
    "SIGINT in a text": (HEAD + LONG, signal.SIGINT, -2),
    "SIGKILL while the draft starts": (
        "import run\nfrom run import assist\nstart_rank_1 = assist.start_rank_1\n"
        "def start(*given):\n    draft = start_rank_1(*given)\n    print('made', flush=True)\n"
        "    return draft\nassist.start_rank_1 = start\nrun.Saguaro()", signal.SIGKILL, -9),
    "a child by sys.exit": (FORK + "sys.exit()\nos.waitpid(child, 0); saguaro('x')", None, 0),
    "SIGKILL while a child lives": (FORK + "time.sleep(9)\n" + LONG, signal.SIGKILL, -9)}


@slow
@pytest.mark.parametrize("name", ENDS)
def test_the_drafts_process_ends_with_its_program(name, tmp_path):
    program, sign, status = ENDS[name]
    process = psutil.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert process.stdout.readline() == b"made\n"
    drafts, = drafts_processes(process)
    if sign:
        time.sleep(0.5)
        process.send_signal(sign)
    assert process.wait(60) == status
    drafts.wait(10)
    assert not os.listdir(tmp_path)


def test_a_program_of_several_ranks_or_with_a_group_of_its_own_is_told_what_to_do(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="has a process group.*destroy_.*in_turns=True"):
            Saguaro()
    finally:
        dist.destroy_process_group()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start this program by python, .*or decode by torchrun"):
        Saguaro(mode="ar")


def test_what_cannot_be_continued_gets_one_sentence():
    saguaro = Saguaro(mode="ar", max_new_tokens=4)
    for wrong, sentence in (
            ("", "prompt 1 of 1 has 0 tokens"), ([], "there is no prompt"),
            ([5], "the tokenizer cannot read the prompts"),
            ([("x", "y")], "they must be a text, or a list of texts"),  # tokenizers know pairs
            (numpy.array(["x", "y"]), "they must be a text, or a list of texts"),
            (None, "they must be a text, or a list of texts"),
            (["x", "x " * 600], "prompt 2 of 2 has 601 tokens; it must have at least 1, and")):
        with pytest.raises(UserError, match=sentence):
            saguaro(wrong)

    def ask_meanwhile(*_) -> None:
        with pytest.raises(UserError, match="one at a time"):
            saguaro("z")

    saguaro(["x", "y"], ask_meanwhile)
    assert saguaro.stats.summary()["tokens"] == 8, "those of both texts"
    with pytest.raises(UserError, match="options .* by name: .* argument 'temprature'"):
        Saguaro(temprature=1)


def test_a_target_may_have_a_context_that_is_shorter_than_the_prompt_of_nobody(tmp_path_factory):
    folder = copy_of("target", tmp_path_factory)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    saguaro = Saguaro(target=folder, mode="ar")
    assert saguaro("import os") and saguaro.decoder.finish_reasons == ["context"]


def test_each_text_is_a_user_turn_if_the_settings_say_so():
    saguaro = Saguaro(mode="ar", max_new_tokens=8)
    plain = saguaro("<user>Why?")
    saguaro.job.tokenizer.chat_template = "<user>{{ messages[0].content }}"
    saguaro.job.settings = replace(saguaro.job.settings, apply_chat_template=True)
    assert saguaro("Why?") == plain != saguaro("<user>Why?")


@slow
def test_in_a_notebook_a_stopped_cell_costs_a_batch_and_the_kernels_end_leaves_nothing():
    manager = pytest.importorskip("jupyter_client", reason="wants ipykernel").KernelManager()
    pytest.importorskip("ipykernel")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)

        def run_cell(code: str, seconds_until_stop: float | None = None) -> str:
            asked = client.execute(code)
            if seconds_until_stop:
                time.sleep(seconds_until_stop)
                manager.interrupt_kernel()
            said = ""
            while True:
                message = client.get_iopub_msg(timeout=100)
                content = message["content"]
                if message["parent_header"].get("msg_id") == asked:
                    said += content.get("text", "") + content.get("ename", "")
                    if content.get("execution_state") == "idle":
                        return said

        made = "from run import Saguaro; {} = Saguaro(max_new_tokens=20, temperature=1, {})"
        run_cell(made.format("here", "in_turns=True"))
        assert run_cell(made.format("saguaro", "")) == ""
        assert run_cell("print(saguaro('x') == here('x'))") == "True\n"
        assert "KeyboardInterrupt" in run_cell("saguaro(['x'] * 5000)", seconds_until_stop=1)
        same = "here.decoder.num_batches = saguaro.decoder.num_batches; " \
               "print(saguaro('x') == here('x'))"
        # where the stop met `on_text`, the batch has ended on both sides, and the process stays
        assert run_cell(same).removeprefix("starting the draft's process anew ...\n") == "True\n"
        kernel = psutil.Process(manager.provisioner.pid)
        drafts, = drafts_processes(kernel)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    drafts.wait(10)
