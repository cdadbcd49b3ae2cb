"""The embedded model for all end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def home(session_home: Path) -> Path:
    """The cache folder of the whole run: the model is converted once, and its operators are there."""
    return session_home
