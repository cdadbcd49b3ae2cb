"""Several processes that hold one target: the text of one process, decisions by one, no waiting for the dead."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from draftwood import wire
from draftwood.accept import Likelihood, Verdict
from draftwood.config import config
from draftwood.errors import BadModel
from draftwood.latency import Machine
from draftwood.memory import Need, part_of
from draftwood.parallel import ALONE, Group
from draftwood.sampling import Sampler, Sampling
from draftwood.sharded import refuse_indivisible
from draftwood.target import Target
from draftwood.tree import Tree
from tests.reference import byte_tokenizer, dflash_files, plain_logits, tiny_model
from tests.together import NEW, PROMPT, SAMPLINGS, chosen

ROOT = Path(__file__).parents[2]
SIZES = dict(vocab_size=98, head_dim=8)
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": dict(tie_word_embeddings=True)}
LIMIT = 900  # seconds: machines that run tests may be busy with others


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each family: a model, a drafter for it, and what plain decoding in one process writes."""
    folder = tmp_path_factory.mktemp("models")
    for family, options in FAMILIES.items():
        model = tiny_model(family, **SIZES, **options)
        model.save_pretrained(folder / family)
        target = Target(model, family)
        dflash_files(target, folder / family / "drafter")
        truth = {kind: PROMPT + plain(target, sampling) for kind, sampling in SAMPLINGS.items()}
        (folder / family / "truth.json").write_text(json.dumps(truth))
    return folder


def plain(target: Target, sampling: Sampling) -> list[int]:
    sampler = Sampler(sampling, PROMPT)
    for _ in range(NEW):
        sampler.commit([sampler.draw(plain_logits(target, sampler.tokens)[-1])])
    return sampler.tokens[len(PROMPT) :]


def environment(**more: object) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    given = {name: str(value) for name, value in more.items()}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **given}


def torchrun(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )


def by_hand(*args: object) -> list[int]:
    """Exit codes of two processes that no torchrun watches over: nobody ends one because the other died."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = dict(WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="by hand")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.together", *map(str, args)],
            cwd=ROOT,
            env=environment(RANK=rank, LOCAL_RANK=rank, **shared),
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        return [process.wait(LIMIT) for process in started if args[0] == "dies" or process is not started[0]]
    finally:
        for process in started:
            process.kill()


def test_two_processes_write_what_one_writes(models: Path) -> None:
    """For every policy, drafter and sampling, in float64; the other process decides nothing."""
    run = torchrun("-m", "tests.together", "equal", models)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads((models / "found.json").read_text())
    assert found.keys() == FAMILIES.keys()
    for family, kinds in found.items():
        truth = json.loads((models / family / "truth.json").read_text())
        for kind, texts in kinds.items():
            assert len(texts) == len(chosen(family))
            for name, tokens in texts.items():
                assert PROMPT + tokens == truth[kind], f"{family}, {kind}, {name}"


def test_a_mistake_of_one_is_told_to_all(models: Path) -> None:
    run = torchrun("-m", "tests.together", "errors", models)
    assert run.returncode == 0, run.stderr[-4000:]
    first, second = (json.loads((models / f"said-{rank}.json").read_text()) for rank in range(2))
    assert first == second and len(first) == 5
    assert first[0] == "the first one's mistake" and first[1] == "the last one's mistake"
    assert "under torchrun each process takes its own" in first[2]
    assert "cannot take the lean path: its weights are divided among 2 processes" in first[3]
    assert "holds no config.json" in first[4] or "absent" in first[4]


@pytest.mark.parametrize(("how", "codes"), [("dies", [2, -9]), ("hangs", [2])])
def test_no_process_waits_for_ever(models: Path, how: str, codes: list[int]) -> None:
    """For one that died, or for the first one while that hangs."""
    assert by_hand(how, models) == codes
    said = (models / f"lost-{how}").read_text()
    assert "has lost another one" in said and "Start all of them again." in said and "\n" not in said


def test_the_command_line(tmp_path: Path) -> None:
    """Only the first process talks, and it says what one process says."""
    model = tiny_model("llama", dtype=torch.float32, vocab_size=258, head_dim=8)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    args = ["generate", "one two one two", "--raw", "--target", str(tmp_path), "--dtype", "float32"]
    args += ["--drafter", "ngram", "--max-new-tokens", "20", "--policy", "ddtree:8"]
    command = [sys.executable, "-m", "draftwood", *args]
    alone = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    together = torchrun("-m", "draftwood", *args)
    assert together.returncode == 0, together.stderr[-4000:]
    assert together.stdout == alone.stdout
    refused = torchrun("-m", "draftwood", "chat")
    sentence = "draftwood: chat runs in one process, but torchrun started 2; generate and train can run together."
    assert refused.returncode != 0 and refused.stderr.count(sentence) == 1


@pytest.mark.parametrize(
    ("family", "heads", "processes", "why"),
    [
        ("llama", dict(num_key_value_heads=2), 4, "has 2 key and value heads, which 4 processes cannot share"),
        ("qwen3", dict(num_key_value_heads=3, num_attention_heads=9), 2, "has 9 attention heads, which 2 processes"),
        ("gpt2", {}, 2, "transformers has no plan for dividing a gpt2"),
    ],
)
def test_what_cannot_be_divided_is_refused(family: str, heads: dict[str, int], processes: int, why: str) -> None:
    with pytest.raises(BadModel, match=why):
        refuse_indivisible(tiny_model(family, **heads).config, "it", processes)


def test_what_can_be_divided_is_not_refused() -> None:
    refuse_indivisible(tiny_model("llama").config, "it", 2)
    refuse_indivisible(AutoConfig.for_model("llama", num_attention_heads=64, num_key_value_heads=8), "it", 8)


def test_alone_nothing_is_told() -> None:
    assert ALONE.leads and ALONE.place("cuda:3") == "cuda:3"
    assert ALONE.decide(lambda: 5) == ALONE.every(lambda: 5) == 5
    ALONE.close()
    with pytest.raises(RuntimeError, match="no connection"), ALONE.listening():
        raise RuntimeError("gloo: no connection")


@pytest.mark.parametrize(
    "value",
    [
        [None, True, 3, -0.0, 1e-320, float("inf"), "ä"],
        [torch.bfloat16, Machine("here", 1e13, 0.1, 1e-9)],
        [None, Verdict([1, 2], [5, 6], 7), Verdict([], [], 0, (Likelihood(-0.1, ((4, -0.1), (5, -2.5))),))],
    ],
)
def test_what_is_told_arrives_as_it_was(value: list[object]) -> None:
    assert repr(wire.read(wire.write(value))) == repr(value)


def test_a_tree_arrives_to_the_bit() -> None:
    ints = [np.array(row) for row in ([7, 8, 9], [-1, 0, 0], [0, 1, 1])]
    tree = Tree(*ints, mass=np.array([1, 0.1, 1e-40], np.float32), sources=np.array([0, 1, 0]))
    (told,) = wire.read(wire.write([tree]))
    for field in fields(Tree):
        sent, got = getattr(tree, field.name), getattr(told, field.name)
        assert sent.dtype == got.dtype and sent.tobytes() == got.tobytes()


def test_what_no_process_can_be_told_is_refused() -> None:
    with pytest.raises(TypeError, match="a range cannot be told"):
        wire.write([range(2)])
    told = wire.read(wire.write(BadModel("of mine")))
    assert isinstance(told, BadModel) and str(told) == "of mine"


def test_memory_of_a_part() -> None:
    model = tiny_model("llama")
    ends = 2 * model.config.vocab_size * model.config.hidden_size * 8
    need, gpu, cpu = Need(1000, 50, 100, 7), torch.device("cuda", 0), torch.device("cpu")
    assert part_of(need, model.config, torch.float64, gpu, Group(1, 2)) == Need(500 + ends, 50, 50, 7)
    assert part_of(need, model.config, torch.float64, cpu, Group(1, 2)) == Need(1000 + 2 * ends, 100, 100, 7)
    assert part_of(need, model.config, torch.float64, gpu, ALONE) == need


def test_what_torchrun_sets_counts_under_torchrun_alone() -> None:
    places = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
    assert config(places).processes == 1
    here = config({**places, "TORCHELASTIC_RUN_ID": "x"})
    assert (here.processes, here.rank, here.local_rank) == (4, 3, 1)
