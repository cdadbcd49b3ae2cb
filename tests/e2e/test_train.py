"""`draftwood train` as a process: killed, interrupted, out of disk, and as two processes, it is the same run."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftwood.loading import load_target
from draftwood.train.data import Identity, Manifest
from draftwood.train.shards import Text, write_shard
from draftwood.train.show import read_log
from draftwood.train.state import state_path
from tests.reference import byte_tokenizer, tiny_model

pytestmark = pytest.mark.slow
STEPS = 120
LIMIT = 40_000  # bytes of a file on the full disk, less than a state has


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and texts for it."""
    folder = tmp_path_factory.mktemp("train")
    tiny_model(dtype=torch.float32).save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    texts = [Text(np.array([(11 * i + 3 * j) % 90 for j in range(40)]), 6, 0.0, "made", i) for i in range(20)]
    (folder / "texts").mkdir()
    write_shard(folder / "texts", 0, texts)
    Manifest(Identity.of(load_target(str(folder / "target"), "float32", "cpu")), "default", {}).save(folder / "texts")
    return folder


def start(folder: Path, out: str, *, launcher: tuple[str, ...] = (), full: bool = False) -> subprocess.Popen[str]:
    flags = "--layers 1 --block-size 6 --taps 2 --anchors 6 --batch-size 4 --holdout 0.1 --eval-every 30 --lr 3e-3"
    flags += f" --dtype float32 --device cpu --no-autocast --save-minutes 0.01 --steps {STEPS}"
    paths = ["--target", folder / "target", "--data", folder / "texts", "--out", folder / out]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "draftwood", "train", *map(str, paths), *flags.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))) if full else None,
    )


def wait_for(run: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    while not ready():
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, torch.Tensor]:
    run = start(folder, "whole")
    assert "Trained" in run.communicate()[1] and run.returncode == 0
    return load_file(state_path(folder / "whole"))


def test_whatever_stops_it_the_same_command_ends_as_the_same_run(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    out = folder / "parts"
    run = start(folder, "parts")
    wait_for(run, lambda: len(read_log(out)) > STEPS // 4)
    run.kill()
    run.communicate()
    run = start(folder, "parts")
    wait_for(run, lambda: len(read_log(out)) > STEPS // 2)
    run.send_signal(signal.SIGINT)
    assert "the same command goes on" in run.communicate()[1] and run.returncode == 130
    saved = load_file(state_path(out))
    run = start(folder, "parts", full=True)
    error = run.communicate()[1].splitlines()[-1]
    assert run.returncode == 2 and "writing failed" in error and "goes on from there" in error
    assert all(torch.equal(tensor, saved[name]) for name, tensor in load_file(state_path(out)).items())
    run = start(folder, "parts")
    assert "Trained" in run.communicate()[1] and run.returncode == 0
    ended = load_file(state_path(out))
    assert ended.keys() == whole.keys() and all(torch.equal(ended[name], whole[name]) for name in whole)
    losses = [[line["loss"] for line in read_log(path) if "loss" in line] for path in (out, folder / "whole")]
    assert len(losses[0]) == STEPS and losses[0] == losses[1]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo on one machine")
def test_two_processes_train_what_one_trains(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = start(folder, "both", launcher=launcher)
    assert "Trained" in run.communicate()[1] and run.returncode == 0
    assert len([line for line in read_log(folder / "both") if "loss" in line]) == STEPS
    first, alone = (read_log(folder / out)[:5] for out in ("both", "whole"))
    for ours, theirs in zip(first, alone, strict=True):  # rounding adds up with the steps
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4) and ours["predicted"] == theirs["predicted"]
    both = load_file(state_path(folder / "both"))
    for name in both.keys() - {name for name in both if name.startswith("exp_avg")}:
        torch.testing.assert_close(both[name], whole[name], atol=0.02, rtol=0.02)
