"""Values that no setting should have: names, texts and numbers of an odd kind, and pieces of YAML."""

from __future__ import annotations

from typing import Any

MISBEHAVING = "tests.support.misbehaving"
NAMES = [
    *(f"{MISBEHAVING}.{name}" for name in ("exits:x", "interrupts:x", "raises_strangely:x", "missing:x")),
    *(f"{MISBEHAVING}.names:{name}" for name in ("Environment", "ExitsWhenMade", "ExitsInPrompts", "SaysNothing")),
    *(f"{MISBEHAVING}.names:{name}" for name in ("NumbersForText", "ExitingSampler", "UnsureSampler", "nothing")),
    *("tests.support.rewards:length", ":", "a:", "..:b", "a.:b", "json:loads", "json:JSONDecoder", "a b:c", "\0:\0"),
    "builtins:max",
]
TEXTS = [
    *(
        "",
        " ",
        "abc",
        "\0",
        "a\0b",
        "\x1b[31m",
        "\ud800",
        "é" * 3,
        "\u202e",
        "日本",
        "🌊",
        "%s%n",
        "{expression}",
        "{}",
    ),
    *("x" * 300, "x/" * 3000, "a/" * 60 + "b" * 300, "x" * 100_000, "null", "1e5", "~", "~/x", ".", "..", "/", "//"),
    *("/dev/null", "/proc/self/mem", "/proc/self/fd/99", "nobody/nothing", "file:///x", "http://[", "s3://x", "C:\\x"),
    *("reasoning_gym:chain_sum", "reasoning_gym:", "reasoning_gym:nope", "math", "calculator", "custom", "function"),
    *(
        "windowed",
        "in_order",
        "custom",
        "all-linear",
        "\n",
        "a\nb",
        "a: b",
        "- a",
        "#",
        "'",
        '"',
        "!!int 3",
        "&a",
        "*a",
    ),
]
NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 3, 7, 64, 2**31, 2**63, 2**64, 10**30, -(10**30), 10**299, 0.5, -0.5, 1.0, 1.5, 3.0, 1e-320, 1e308),
    *(-1e308, float("inf"), float("-inf"), float("nan"), True, False),
]
SNIPPETS = [
    *(
        "!!int abc",
        "!!float abc",
        "!!bool maybe",
        "!!null x",
        "!!timestamp x",
        "!!binary '%'",
        "!!binary aGk=",
        "!!set {a}",
    ),
    *(
        "!!omap [a: 1]",
        "!!pairs [a: 1]",
        "!!python/object:os.system {}",
        "!!python/name:os.system ''",
        "!mine x",
        "! x",
    ),
    *("!!str [a]", "!!int [1]", "!!int {a: 1}", "!!map x", "!!seq x", "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000),
    *("1e999", "-1e999", "9" * 400 + ".5", "&a [*a]", "&a {x: *a}", "*nowhere", "[" * 400, "{a: " * 400, "- " * 400),
    *('"\\ud800"', '"\\ud800": 1', "? [a]\n: b", "{[a]: 1}", "{{a: 1}: 2}", "<<", "{<<: 3}", "{<<: [1]}", "{<<: *b}"),
    *(
        "2024-01-01",
        "1:30",
        "|\n",
        ">\n x",
        "'",
        '"',
        "@",
        "`",
        "%",
        "\t",
        "\x07",
        "\u2028",
        "\ufeff",
        "---",
        "...",
        "# x",
    ),
    "[&a [x, x, x, x, x, x, x, x, x], &b [*a, *a, *a, *a, *a, *a, *a], &c [*b, *b, *b, *b, *b, *b, *b],"
    " &d [*c, *c, *c, *c, *c, *c], [*d, *d, *d, *d, *d, *d]]",
    "{a: &a {x: 1}, b: &b {<<: [*a,*a,*a]}, c: &c {<<: [*b,*b,*b]}, d: {<<: [*c,*c,*c]}}",
]
