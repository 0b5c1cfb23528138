"""Whether a tokenizer's chat template suits the settings, for the checks before a run and for building it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.sections.data import DataConfig

Template = str | Mapping[str, str] | None
"""A tokenizer's chat template, or several by name, as `transformers` has them."""
_USED = ("default", "tool_use")
"""Of several: the one used without tools, and the one used with them."""


def template_problems(template: Template, data: DataConfig, path: str) -> list[str]:
    """Why prompts cannot be rendered as `data` asks for, as `key: reason` lines; `path` is that of the model."""
    if not data.chat_template:
        return []
    named = {"default": template} if isinstance(template, str) else template or {}
    if not named.get("default"):
        return [f"data.chat_template: the tokenizer of {path!r} has no chat template; set it to false"]
    if not data.chat_template_kwargs:
        return []
    from jinja2 import TemplateSyntaxError

    try:
        read = set().union(*(_variables(named[name]) for name in _USED if name in named))
    except TemplateSyntaxError as error:
        return [f"data.chat_template: the chat template of {path!r} is not valid: line {error.lineno}: {error.message}"]
    return [
        f"data.chat_template_kwargs.{name}: the chat template of {path!r} does not read a variable of that name; "
        "remove it, or spell it as the template does"
        for name in data.chat_template_kwargs
        if name not in read
    ]


def _variables(template: str) -> set[str]:
    """The variables that a template is given from outside."""
    from jinja2 import Environment, meta, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """The block that `transformers` adds to the language, around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - as the base class declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.globals |= dict.fromkeys(("raise_exception", "strftime_now"))
    return meta.find_undeclared_variables(environment.parse(template))
