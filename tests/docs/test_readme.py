"""What README and CONTRIBUTING link to is there."""

from __future__ import annotations

import re

import pytest

from .blocks import ROOT


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [target for target in targets if not (ROOT / target).exists()] == []
    if page != "CHANGELOG.md":
        assert {"docs/adding-an-op.md", "docs/adding-a-backend.md", "docs/writing-a-plugin.md"} <= set(targets)
