"""`draftwood batch --ray` on a real local cluster, an actor of which is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood.errors import BadModel
from draftwood.llm import load
from draftwood.many.folder import Folder
from draftwood.many.options import BatchOptions
from draftwood.many.run import run_batch
from tests.local_ray import processes, ray_cluster
from tests.serving import write_tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray")  # its own
LINES, TOKENS = 60, 60


@pytest.fixture(scope="module", autouse=True)
def cluster(isolated_home: None) -> Iterator[None]:
    with ray_cluster():
        yield


def test_every_line_has_one_result_though_an_actor_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, tiny = tmp_path / "prompts.jsonl", tmp_path / "out", write_tiny(tmp_path / "tiny")
    lines = [*(json.dumps({"prompt": f"prompt {i}"}) for i in range(LINES)), "{nope"]
    source.write_text("\n".join(lines))
    options = BatchOptions(
        source, out, str(tiny), ["ngram"], max_new_tokens=TOKENS, max_concurrency=2, dtype="float64", device="cpu",
        ray=True, replicas=2,
    )  # fmt: skip
    keep, killed = Folder.add, []

    def add(self: Folder, result: Any) -> None:
        keep(self, result)
        if not killed:
            killed.append(processes("MapWorker")[0])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Folder, "add", add)
    tally = run_batch(options)
    assert killed and (tally.answered, tally.failed) == (LINES, 1)
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert sorted(result["custom_id"] for result in found) == sorted(f"line-{i + 1}" for i in range(LINES + 1))
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in found if r["response"]}
    llm = load(str(tiny), "none", "autoregressive", dtype="float64", device="cpu")
    for i in range(0, LINES, 9):
        assert texts[f"line-{i + 1}"] == llm.generate(f"prompt {i}", max_new_tokens=TOKENS).text


def test_a_mistake_of_an_actor_is_one_sentence(tmp_path: Path) -> None:
    source, tiny = tmp_path / "prompts.jsonl", write_tiny(tmp_path / "tiny")
    source.write_text('{"prompt": "hi"}\n')
    options = BatchOptions(source, tmp_path / "out", str(tiny), ["./not-there"], device="cpu", ray=True)
    with pytest.raises(BadModel, match="not-there"):
        run_batch(options)
