"""All that is marked in the package crosses unchanged, through our wire and through pickle."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.sections.base import Section
from penstock.controller.failures.classify import causes, classify, describe
from penstock.data_plane.meta import KVBatchMeta
from penstock.rollout.prompts import Prompt, PromptVisit
from penstock.runtime.wire.decoder import decode
from penstock.runtime.wire.encoder import encode
from tests.support.instances import (
    all_errors,
    all_settings,
    classes_that_cross,
    errors,
    instances,
    same,
    settings_instances,
)

EXAMPLES = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


def wired(value: Any) -> Any:
    encoded = encode(value)
    return decode(encoded.head, bytearray(b"".join(encoded.buffers)))


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_what_the_system_sends_is_marked() -> None:
    names = {kind.__name__ for kind in classes_that_cross()}
    assert names >= {
        *("Prompt", "PromptVisit", "KVBatchMeta", "PushedGroup", "Trajectory"),
        *("GenerationRequest", "GenerationResult", "SamplingParams", "EngineStats", "EngineHealth"),
        *("ChunkResult", "StepResult", "Prepared", "MemoryAddress", "FailureKind", "UserTrace"),
    }


@pytest.mark.parametrize("kind", classes_that_cross(), ids=lambda kind: kind.__name__)
def test_a_marked_class_crosses(kind: type) -> None:
    @EXAMPLES
    @given(instances(kind))
    def crosses(value: Any) -> None:
        assert same(wired(value), value)
        assert same(pickled(value), value)

    crosses()


@pytest.mark.parametrize("kind", all_settings(), ids=lambda kind: kind.__name__)
def test_settings_cross(kind: type[Section]) -> None:
    @EXAMPLES
    @given(settings_instances(kind))
    def crosses(value: Any) -> None:
        assert same(wired(value), value)
        assert same(pickled(value), value)

    crosses()


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_an_error_crosses(kind: type[Exception]) -> None:
    @EXAMPLES
    @given(errors(kind), st.sampled_from([ValueError("data"), TimeoutError("late"), OSError(28, "full", "/a/file")]))
    def crosses(error: Exception, cause: Exception) -> None:
        error.__cause__ = cause
        error.add_note("a note")
        for way in (wired, pickled):
            if way is pickled and not hasattr(kind, "failure_kind"):
                continue  # pickle does not ask us about errors that are not ours
            found = way(error)
            assert type(found) is type(error)
            assert (str(found), found.args) == (str(error), error.args)
            assert same(vars(found), vars(error))
            assert [type(link) for link in causes(found)] == [type(link) for link in causes(error)]
            assert describe(found) == describe(error)
            assert classify(found) is classify(error)

    crosses()


def test_prompts_and_metadata_with_read_only_mappings_can_be_pickled() -> None:
    prompt = Prompt("p", "text\ud800")
    assert prompt.repaired
    for way in (wired, pickled):
        found = way(PromptVisit(1, prompt, 2, 3))
        assert same(found, PromptVisit(1, prompt, 2, 3))
        assert found.prompt.repaired
        with pytest.raises(TypeError):
            found.prompt.facts["x"] = 1
        meta = KVBatchMeta("p", ("a", "b"), frozenset({"f"}), (1, 2)).stamp_tags(version=3)
        assert way(meta) == meta
