"""Files: what is read, what is refused, and the way back to YAML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.config.models import RunConfig
from penstock.config.reading.keys import KeySpec
from penstock.config.reading.loading import dump_config, json_schema, load_config, parse_config
from penstock.config.sections.base import Section
from penstock.errors import ConfigError
from tests.config.settings import SMALLEST_YAML, file_problems
from tests.config.settings import settings as smallest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_load_config_reads_file_and_overrides(path: Path) -> None:
    path.write_text(SMALLEST_YAML + "seed: 3\ntraining: {optimizer: {lr: 1e-5}}\n")
    config = load_config(str(path), ["seed=4", "training.max_steps=7"])
    assert (config.seed, config.training.max_steps, config.training.optimizer.lr) == (4, 7, 1e-5)


def test_package_offers_load_config(path: Path) -> None:
    import penstock

    path.write_text(SMALLEST_YAML)
    assert penstock.load_config(path) == RunConfig.model_validate(smallest())


def test_byte_order_mark_is_fine(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + SMALLEST_YAML.encode())
    assert load_config(path).model.path == "some/model"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "the file is empty; it needs at least model.path and rollout.environment.kind"),
        ("# only a comment\n", "the file is empty; it needs at least model.path and rollout.environment.kind"),
        ("- a\n", "expected sections such as 'model:' at the top of the file, got a list"),
        ("hello", "expected sections such as 'model:' at the top of the file, got 'hello'"),
        ("a: [1, 2\nb: 3", "line 2, column 2: not valid YAML: expected ',' or ']', but got ':'"),
        (
            "a:\n\t- b",
            "line 2, column 1: not valid YAML: found character '\\t' that cannot start any token; indent with spaces",
        ),
        (
            "a: 1\n---\nb: 2",
            "line 2, column 1: not valid YAML: expected a single document in the stream but found another document",
        ),
        (
            "seed: 1\nmodel: {}\nseed: 2",
            "line 3, column 1: duplicate key 'seed'; the first is in line 1",
        ),
        (
            "model: {path: a, path: b}",
            "line 1, column 18: duplicate key 'path'; the first is in line 1",
        ),
        (b"a: 1\nb: \xff\n", "is not UTF-8 text: byte 0xff in line 2; save it as UTF-8"),
        (b"a: \x00", "line 1: not valid YAML: unacceptable character #x0000: special characters are not allowed"),
        ("[" * 5000, "line 1, column 51: it is nested too deeply: more than 50 levels"),
    ],
)
def test_file_that_is_no_configuration(path: Path, content: str | bytes, problem: str) -> None:
    assert file_problems(path, content) == [problem]


def test_python_objects_in_yaml_are_refused(path: Path) -> None:
    (line,) = file_problems(path, "a: !!python/object/apply:os.getcwd []")
    assert line == (
        "line 1, column 4: the tag !!python/object/apply:os.getcwd is not allowed here; write the value without it"
    )


class TestMissingFile:
    def problem(self, path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert caught.value.source == str(path)
        (line,) = caught.value.problems
        return line

    def test_nearest_names_of_the_folder(self, path: Path) -> None:
        path.with_name("tiny.yaml").touch()
        assert self.problem(path.with_name("tinny.yml")) == f"no such file; did you mean {path.with_name('tiny.yaml')}?"

    def test_no_near_name_lists_yaml_files(self, path: Path) -> None:
        path.with_name("tiny.yaml").touch()
        assert self.problem(path.with_name("q")) == f"no such file; {path.parent} has tiny.yaml"

    def test_missing_folder(self, path: Path) -> None:
        missing = path.parent / "configs"
        assert self.problem(missing / "x.yaml") == f"no such file; the folder {missing} does not exist either"

    def test_folder_instead_of_file(self, path: Path) -> None:
        assert self.problem(path.parent) == "is a folder, not a file"
        (path.parent / "config.yaml").touch()
        assert self.problem(path.parent) == f"is a folder; did you mean {path.parent / 'config.yaml'}?"

    def test_file_as_folder(self, path: Path) -> None:
        path.touch()
        assert self.problem(path / "x.yaml").startswith(("no such file", "cannot be read: Not a directory"))

    def test_impossible_name(self) -> None:
        assert self.problem(Path("a\0b")).startswith("cannot be read: ")


class TestDump:
    def test_is_read_back_as_the_same_configuration(self, path: Path) -> None:
        odd = {"observe__console": "off", "run_dir": "1e-5", "model__path": "~"}
        config = parse_config(smallest(weight_sync__mode="drain", staleness={"policy": "in_order"}, **odd))
        path.write_text(dump_config(config))
        assert load_config(path) == config

    def test_means_the_same_to_other_readers_of_yaml(self) -> None:
        config = parse_config(smallest(observe__console="off", run_dir="1e-5", training__optimizer__lr=1e-5))
        data = yaml.safe_load(dump_config(config))
        assert (data["observe"]["console"], data["run_dir"], data["training"]["optimizer"]["lr"]) == (
            "off",
            "1e-5",
            1e-5,
        )

    def test_leaves_out_settings_without_effect(self) -> None:
        text = dump_config(parse_config(smallest(weight_sync__mode="drain")))
        assert "kv_cache" not in text
        assert "kv_cache: keep" in dump_config(parse_config(smallest(staleness={"policy": "windowed"})))

    def test_has_the_order_of_the_models(self) -> None:
        data = yaml.safe_load(dump_config(parse_config(smallest())))
        assert list(data) == list(RunConfig.model_fields)

    def test_says_so_when_a_value_has_no_yaml_form(self) -> None:
        config = parse_config(smallest(rollout__environment__args={"judge": object()}))
        with pytest.raises(ConfigError, match="cannot be written as YAML"):
            dump_config(config)

    @settings(max_examples=50, deadline=None)
    @given(
        text=st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), max_size=60).filter(
            str.strip
        )
    )
    def test_keeps_any_text(self, text: str) -> None:
        assume(text.strip())
        from penstock.config.reading.yaml_dialect import parse_yaml

        config = parse_config(smallest(run_dir=text))
        assert parse_yaml(dump_config(config))["run_dir"] == text


def test_every_setting_is_described() -> None:
    def undescribed(section: type[Section]) -> Iterator[str]:
        for name, field in section.model_fields.items():
            if not field.description:
                yield f"{section.__name__}.{name}"
            for child in KeySpec.of(field.annotation).sections:
                yield from undescribed(child)

    assert list(undescribed(RunConfig)) == []


def test_schema_allows_no_unknown_settings() -> None:
    schema = json_schema()
    assert all(section["additionalProperties"] is False for section in (schema, *schema["$defs"].values()))
