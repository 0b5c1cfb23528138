"""The project's page on a package index: no link of it leads nowhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = """\
# Name

![The flow](docs/images/flow.png)

See [the page](docs/a.md#top), [below](#below) and [elsewhere](https://example.org/x).

```
not [a link](docs/b.md)
```
"""


@pytest.fixture(scope="module")
def setup() -> Any:
    spec = importlib.util.spec_from_file_location("setup_of_penstock", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_with_a_repository_links_and_pictures_point_at_the_version(setup: Any) -> None:
    page = setup.index_page(README, "1.2.0", "https://example.org/team/penstock/")
    assert "![The flow](https://example.org/team/penstock/raw/v1.2.0/docs/images/flow.png)" in page
    assert "[the page](https://example.org/team/penstock/blob/v1.2.0/docs/a.md#top)" in page
    assert "[below](#below) and [elsewhere](https://example.org/x)" in page
    assert "not [a link](docs/b.md)" in page


def test_without_one_pictures_are_left_out_and_links_are_text(setup: Any) -> None:
    page = setup.index_page(README, "1.2.0", None)
    assert page == README.replace("![The flow](docs/images/flow.png)\n\n", "").replace(
        "[the page](docs/a.md#top)", "the page"
    )


@pytest.mark.parametrize("repository", ["https://example.org/team/penstock", None])
def test_no_link_of_the_readme_is_left_relative(setup: Any, repository: str | None) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\]\(docs/", readme), "there is nothing to make absolute"
    page = re.sub(r"^```.*?^```", "", setup.index_page(readme, "1.0", repository), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", page)
    assert [target for pair in targets for target in pair if target and not re.match(r"https?:|#", target)] == []


@pytest.mark.parametrize(
    ("urls", "repository"),
    [({"Repository": "https://a"}, "https://a"), ({"repository": "https://a"}, "https://a"), ({"Home": "x"}, None)],
)
def test_the_repository_is_found_by_its_label(setup: Any, urls: dict[str, str], repository: str | None) -> None:
    assert setup.repository_of(urls) == repository
