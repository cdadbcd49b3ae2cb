"""Names become policies and drafters, wrong names a sentence; plug-ins come in by the same door."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood import registry
from draftwood.drafters.checkpoint import checkpoint_folder
from draftwood.embedded import EMBEDDED_DRAFTER
from draftwood.errors import BadInput


def test_names_are_listed() -> None:
    assert {"autoregressive", "dflash", "ddtree", "beam", "caddtree", "bastion"} <= set(registry.policy_names())
    assert {"none", "ngram", "dflash"} <= set(registry.drafter_names())


def test_every_listed_policy_can_be_made_without_a_parameter() -> None:
    for name in registry.policy_names():
        assert registry.policy(name).name.startswith(name)


def test_listing_and_making_policies_needs_no_torch() -> None:
    code = (
        "import sys; from draftwood import registry; registry.drafter_names();"
        "[registry.policy(n) for n in registry.policy_names()]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(registry.__file__).parents[1])


def test_an_unknown_policy_names_the_nearest_and_all() -> None:
    with pytest.raises(BadInput, match=r"Unknown policy 'ddtre:8'\. Did you mean 'ddtree'\? Valid: .*bastion"):
        registry.policy("ddtre:8")
    with pytest.raises(BadInput, match="Valid: autoregressive"):
        registry.policy("")


def test_no_drafter_is_none() -> None:
    assert registry.drafter("none", SimpleNamespace()) is None


def test_an_unknown_drafter_names_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"Unknown drafter 'ngarm'\. Did you mean 'ngram'\?.*owner/name"):
        registry.drafter("ngarm", SimpleNamespace())


@pytest.mark.parametrize("spec", ["ngram+ngram", "none+ngram", []])
def test_drafters_that_cannot_be_together(spec: Any) -> None:
    with pytest.raises(BadInput, match="name each once, or 'none' by itself"):
        registry.drafter(spec, SimpleNamespace())


def test_specs_are_split_at_plus_signs_but_folders_are_not(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    folder = str(tmp_path / "a+b")
    assert registry.drafter_specs(["x/y+ngram", folder]) == ["x/y", "ngram", folder]
    assert registry.drafter_specs("shipped+ngram+recycling") == ["shipped", "ngram", "recycling"]


def test_the_shipped_drafter_takes_no_parameter() -> None:
    with pytest.raises(BadInput, match="write shipped"):
        registry.drafter("shipped:8", SimpleNamespace())


class Loader:
    """Stands for a drafter class: remembers what it was asked to load."""

    @staticmethod
    def load(name: str, target: Any) -> tuple[str, Any]:
        return name, target


class Thirds:
    """Stands for a third party's policy class."""

    @staticmethod
    def parse(argument: str | None) -> str:
        return f"thirds of {int(argument or 0)}"


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages' entry points, one of them under a built-in name, one that cannot be imported."""
    monkeypatch.setitem(sys.modules, "plugin", SimpleNamespace(Loader=Loader, Thirds=Thirds))
    found = [
        EntryPoint("thirds", "plugin:Thirds", registry.POLICIES),
        EntryPoint("ddtree", "plugin:Thirds", registry.POLICIES),
        EntryPoint("broken", "plugin.that.is.not.there:Rule", registry.POLICIES),
        EntryPoint("mine", "plugin:Loader", registry.DRAFTERS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in found if e.group == group])


@pytest.mark.usefixtures("plugins")
def test_other_packages_add_policies_and_drafters() -> None:
    assert "thirds" in registry.policy_names() and "mine" in registry.drafter_names()
    assert registry.policy("thirds:7") == "thirds of 7"
    target = SimpleNamespace()
    assert registry.drafter("mine:a/b:c", target) == ("a/b:c", target)


@pytest.mark.usefixtures("plugins")
def test_what_another_packages_policy_cannot_read_is_one_sentence() -> None:
    with pytest.raises(BadInput, match=r"^The policy thirds cannot use 'abc': invalid literal"):
        registry.policy("thirds:abc")


@pytest.mark.parametrize("spec", ["beam:4", "ddtree:abc", "dflash:0", "bastion:x"])
def test_a_parameter_is_named_once(spec: str) -> None:
    with pytest.raises(BadInput, match=f"^{spec}: (?!.*{spec}[:; ])"):
        registry.policy(spec)


@pytest.mark.parametrize("given", ["ngram+ngram", ["ngram", "none"], []])
def test_drafters_are_named_once_each_before_anything_is_loaded(given: Any) -> None:
    with pytest.raises(BadInput, match="name each once, or 'none' by itself"):
        registry.check_drafters(given)


@pytest.mark.parametrize("given", [SimpleNamespace, 5, ["ngram", None]])
def test_a_drafter_is_used_by_its_name(given: Any) -> None:
    with pytest.raises(BadInput, match="entry point of the group"):
        registry.check_drafters(given)


@pytest.mark.usefixtures("plugins")
def test_a_built_in_name_stays_built_in() -> None:
    assert registry.policy("ddtree:3").n_max == 3


@pytest.mark.usefixtures("plugins")
def test_a_plugin_that_cannot_be_imported_is_one_sentence() -> None:
    with pytest.raises(BadInput, match=r"broken \(plugin.that.is.not.there:Rule\) cannot be imported"):
        registry.policy("broken")


def test_folders_and_hub_names_are_dflash_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plugin", SimpleNamespace(Loader=Loader))
    monkeypatch.setattr(registry, "BUILT_IN", (EntryPoint("dflash", "plugin:Loader", registry.DRAFTERS),))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for spec, name in [
        ("owner/model", "owner/model"),
        ("here", "here"),
        (str(tmp_path), str(tmp_path)),
        ("dflash:o/m", "o/m"),
    ]:
        assert registry.drafter(spec, None) == (name, None)


def test_shipped_is_a_name_wherever_a_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder("shipped") == EMBEDDED_DRAFTER
    (tmp_path / "shipped").mkdir()
    assert checkpoint_folder("shipped") == Path("shipped"), "a folder of the user's goes first"
