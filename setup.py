"""Makes the project's page on a package index from README.md; all else about the package is in pyproject.toml.

An index shows the page outside the repository, where a relative link leads nowhere. With `Repository` among the
project's URLs, links and pictures become absolute and point at the tag of the version. Without it there is nothing to
point at: pictures are left out, and only the text of a link remains. CONTRIBUTING.md describes a release.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_ABSOLUTE = re.compile(r"[a-z]+:|#")


def index_page(readme: str, version: str, repository: str | None) -> str:
    """README.md as a package index shows it; `repository` is a base URL laid out as GitHub's are."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link["picture"], link["text"], link["target"]
        if _ABSOLUTE.match(target):
            return link[0]
        if repository is None:
            return "" if picture else text
        view = "raw" if picture else "blob"
        return f"{picture}[{text}]({repository.rstrip('/')}/{view}/v{version}/{target})"

    parts = _FENCE.split(readme)
    prose = [_LINK.sub(absolute, part) if place % 2 == 0 else part for place, part in enumerate(parts)]
    return re.sub(r"\n{3,}", "\n\n", "".join(prose))


def repository_of(urls: dict[str, str]) -> str | None:
    """The base URL of the repository; an index compares labels without regard to case, and so does this."""
    return {label.lower(): url for label, url in urls.items()}.get("repository")


if __name__ == "__main__":
    here = Path(__file__).parent
    project = tomllib.loads((here / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=index_page(
            (here / "README.md").read_text(encoding="utf-8"),
            project["version"],
            repository_of(project.get("urls", {})),
        ),
        long_description_content_type="text/markdown",
    )
