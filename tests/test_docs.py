"""The documentation is true: its Python runs, its settings are valid, its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.config.reading.loading import parse_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.errors import ConfigError

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    info: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks, with the line of their first line of code."""
    found = []
    for match in _FENCE.finditer(text):
        indent = len(match["indent"])
        code = "".join(line[indent:] if line.strip() else line for line in match["body"].splitlines(keepends=True))
        found.append(Block(match["info"].strip(), code, text.count("\n", 0, match.start()) + 2))
    return found


def run_python(text: str, name: str) -> None:
    """Run the page's `python` blocks in one namespace; those tagged `no-run` are only compiled."""
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for block in blocks(text):
        if block.info not in ("python", "python no-run"):
            continue
        # As a reader runs it: without the future imports of this file.
        code = compile("\n" * (block.line - 1) + block.code, name, "exec", dont_inherit=True)
        if block.info == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)


def check_settings(text: str) -> None:
    """Validate the page's `yaml` blocks that are whole configurations."""
    for block in blocks(text):
        if block.info == "yaml":
            data = parse_yaml(block.code)
            if isinstance(data, dict) and {"model", "rollout"} <= set(data):
                parse_config(data, source=f"line {block.line}")


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links of a page in `folder` that lead nowhere."""
    prose = _FENCE.sub("", text)
    targets = [target.partition("#")[0] for target in _LINK.findall(prose) if not re.match(r"[a-z]+:", target)]
    return [target for target in targets if target and not (folder / target).exists()]


PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))] if path.exists()]
LINKED = [*PAGES, *(path for path in [ROOT / "CONTRIBUTING.md"] if path.exists())]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page.read_text(), _name(page))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_settings_of_the_page_are_valid(page: Path) -> None:
    check_settings(page.read_text())


@pytest.mark.parametrize("page", LINKED, ids=_name)
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(), page.parent) == []


PAGE = """\
See [a](docs/a.md#top), [web](https://example.org), ![picture](x.png "title") and [up](#here).

```python
x = 1
```

- a list

  ```python
  assert x == 1
  y = [
      2,
  ]
  ```

```python no-run
raise SystemExit
```

```yaml
model: {path: m}
rollout: {environment: {kind: "reasoning_gym:chain_sum"}}
```
"""


class TestTheChecks:
    def test_blocks_of_a_page_share_a_namespace(self) -> None:
        run_python(PAGE, "page")

    def test_failing_block_is_reported_with_its_line(self) -> None:
        with pytest.raises(AssertionError) as caught:
            run_python(PAGE.replace("x = 1\n", "x = 2\n"), "page")
        assert caught.traceback[-1].lineno == PAGE.splitlines().index("  assert x == 1")

    def test_block_that_is_not_run_must_compile(self) -> None:
        with pytest.raises(SyntaxError):
            run_python(PAGE.replace("raise SystemExit", "raise raise"), "page")

    def test_wrong_settings_are_caught(self) -> None:
        check_settings(PAGE)
        with pytest.raises(ConfigError, match=r"model\.pth: unknown setting"):
            check_settings(PAGE.replace("path: m", "pth: m"))

    def test_broken_links_are_found(self, tmp_path: Path) -> None:
        (tmp_path / "x.png").touch()
        assert broken_links(PAGE, tmp_path) == ["docs/a.md"]


def test_the_modules_that_the_architecture_names_are_there() -> None:
    named = set(re.findall(r"`(\w+/[\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    assert len(named) > 30
    assert {name for name in named if not (ROOT / "penstock" / name).exists() and not (ROOT / name).exists()} == set()
