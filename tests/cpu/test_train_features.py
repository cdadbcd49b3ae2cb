"""The target's features: the same from target, disk and device memory, and kept where there is room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.errors import BadInput
from draftwood.target import Target
from draftwood.train import features, together
from draftwood.train.features import CachedReader, Reader
from draftwood.train.shards import Text
from draftwood.train.show import read_log
from draftwood.train.together import DeviceReader
from tests.reference import tiny_target
from tests.train_cases import RECIPE, TEXTS, make_course, run_to_the_end, some_text, taps_by_transformers


@pytest.mark.parametrize("soft", [False, True])
def test_features_are_the_same_from_target_and_disk(single: Target, tmp_path: Path, soft: bool) -> None:
    reader = Reader(single, [0, 1], soft)
    limit = float(sum(features.row_bytes(len(t.tokens), reader.width) for t in TEXTS[:4]) + 10)
    cached = CachedReader(reader, TEXTS, tmp_path, limit)
    fresh = [reader.unpack(reader.row(t.tokens)) for t in TEXTS]
    for again in (cached, cached, CachedReader(reader, TEXTS, tmp_path, limit)):
        for i, expected in enumerate(fresh):
            found = again([i])[0]
            assert torch.equal(found.taps, expected.taps)
            assert not soft or torch.equal(found.teacher.tokens, expected.teacher.tokens)
    torch.testing.assert_close(
        fresh[2].taps.float(), taps_by_transformers(single, TEXTS[2], (0, 1)), rtol=1e-2, atol=1e-2
    )
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4 and sum(file.stat().st_size for file in files) <= limit
    for file, damage in zip(files, (b"", b"\x00", b"\x01" * 700), strict=False):  # as a power cut may leave it
        file.write_bytes(damage + file.read_bytes()[len(damage) :] if damage else b"")
    again = CachedReader(reader, TEXTS, tmp_path, limit)
    assert all(torch.equal(again([i])[0].taps, fresh[i].taps) for i in range(4))


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("kept", "beside"), [(0, 0), (3, 0), (2, 3), (7, 0), (0, 7)])
def test_texts_read_together_are_each_text_alone(
    soft: bool, family: str, kept: int, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "TOKENS", 70)
    reader = Reader(tiny_target(family, "lean", dtype=torch.float32), [0, 1], soft)
    unpacked = reader.width + soft * features.TEACHER_NUMBERS
    here = [features.row_bytes(len(t.tokens), unpacked) for t in TEXTS]
    pinned = [1 << (features.row_bytes(len(t.tokens), reader.width) - 1).bit_length() for t in TEXTS]
    source = DeviceReader(reader, TEXTS, sum(here[:kept]), sum(pinned[kept : kept + beside]))
    asked = [6, 2, 0, 5, 2, 1, 4, 3]
    for _ in range(2):
        for i, found in zip(asked, source(asked), strict=True):
            expected = reader.unpack(reader.row(TEXTS[i].tokens))
            torch.testing.assert_close(found.taps, expected.taps, rtol=1e-2, atol=1e-2)
            assert not soft or torch.equal(found.teacher.tokens, expected.teacher.tokens)
    assert sorted(source._kept) == list(range(kept)) and sorted(source._beside) == list(range(kept, kept + beside))


def test_every_text_is_in_one_group_and_groups_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "TOKENS", 20)
    lengths = [3, 9, 30, 4, 10, 10, 1]
    made = together.groups(lengths)
    assert sorted(i for group in made for i in group) == list(range(7))
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 20 for group in made)
    assert len(made) < 7


class CountingReader(Reader):
    """Counts what goes through the target."""

    computed = 0

    def row(self, tokens: np.ndarray) -> Tensor:
        self.computed += 1
        return super().row(tokens)


def test_what_is_cached_is_used_again_by_other_runs(single: Target, tmp_path: Path) -> None:
    def computed(texts: list[Text], taps: tuple[int, ...] = (0, 1), limit: float = 1e9) -> int:
        reader = CountingReader(single, taps, False)
        cached = CachedReader(reader, texts, tmp_path, limit)
        for i, text in enumerate(texts):
            assert torch.equal(cached([i])[0].taps, reader.unpack(Reader.row(reader, text.tokens)).taps)
        return reader.computed

    assert computed(TEXTS[:3]) == 3
    assert computed([TEXTS[5], *TEXTS[:3]]) == 1  # a new one in front of them
    assert computed(TEXTS[1:4]) == 1
    assert computed([TEXTS[0], TEXTS[0]], taps=(1,)) == 1  # other layers of the same text
    assert computed([replace(TEXTS[0], tokens=TEXTS[0].tokens[:20])]) == 1
    assert computed([TEXTS[6]], limit=0) == 1 and computed([TEXTS[6]]) == 1
    files = features.cached_files(tmp_path)
    oldest, room = list(files)[-1], features.row_bytes(len(TEXTS[4].tokens), 64)
    assert computed([TEXTS[4]], limit=sum(files.values()) + room - 1) == 1  # one file too many
    left = features.cached_files(tmp_path)
    assert sum(left.values()) <= sum(files.values()) + room - 1
    assert files.keys() - left.keys() == {oldest} and len(left) == len(files)


def test_features_stay_where_they_are_if_data_are_added(tmp_path: Path) -> None:
    (tmp_path / "old" / "features").mkdir(parents=True)
    folders = [tmp_path / "new", tmp_path / "old"]
    assert features.feature_folder(folders) == tmp_path / "old" / "features"
    assert features.feature_folder(folders[:1]) == tmp_path / "new" / "features"


def test_the_target_stays_outside_of_autocast(single: Target, tmp_path: Path) -> None:
    """Nothing is cached here: evaluation and steps read features through the target itself."""
    texts = [some_text(i, 230) for i in range(2)]
    recipe = replace(RECIPE, autocast=True, steps=2, eval_every=1)
    course = make_course(single, tmp_path, recipe, texts, held_out=texts[:1], limit=0)
    fresh = course.features([0])[0].taps
    run_to_the_end(course)
    assert torch.equal(course.features([0])[0].taps, fresh)
    assert all("dflash" in line["tau"] for line in read_log(tmp_path) if "tau" in line)


def test_a_disk_that_fills_up_costs_time_only(single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    reader = Reader(single, [0], False)
    cached = CachedReader(reader, TEXTS, tmp_path, 1e9)
    assert torch.equal(cached([0])[0].taps, reader.unpack(reader.row(TEXTS[0].tokens)).taps)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_the_work(single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.train.files.free_bytes", lambda folder: 100)
    with pytest.raises(BadInput, match="free"):
        CachedReader(Reader(single, [0], False), TEXTS, tmp_path, 1e9)


def test_features_of_other_texts_make_room_before_the_disk_is_called_full(
    single: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, room = tmp_path / "other.features", 10**6
    other.write_bytes(bytes(room))
    monkeypatch.setattr("draftwood.train.files.free_bytes", lambda folder: 100)
    CachedReader(Reader(single, [0], False), TEXTS, tmp_path, room)
    assert not other.exists()


def test_a_folder_for_features_that_is_none_is_refused(single: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"--features .*file"):
        CachedReader(Reader(single, [0], False), TEXTS, tmp_path / "file", 1e9)
