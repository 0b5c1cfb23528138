"""Where a run's groups come from: generated, generated and recorded, or replayed from a recording."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from penstock.config.models import RunConfig
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.rollout.recorded import FOLDER, Recording, RecordingFolder, RecordingInfo, read_info
from penstock.rollout.recording_writer import RecordingWriter
from penstock.rollout.replay import check_model, check_settings
from penstock.run.loss_columns import refuse_unknown_columns
from penstock.weights.facts import TokenFacts


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that decide what recorded rows mean: those of a replay must be those of the recording."""
    sampling = config.rollout.sampling
    return {
        "rollout.group_size": config.rollout.group_size,
        "rollout.sampling.temperature": sampling.temperature,
        "rollout.sampling.top_p": sampling.top_p,
        "rollout.sampling.top_k": sampling.top_k,
        "rollout.sampling.min_p": sampling.min_p,
        "rollout.sampling.max_new_tokens": sampling.max_new_tokens,
    }


def check_recording(config: RunConfig) -> RecordingInfo:
    """What the recording in `rollout.replay_from` says about itself; needs no model.

    Raises if there is none, or it was made with other settings.
    """
    assert config.rollout.replay_from is not None
    info = read_info(config.rollout.replay_from)
    check_settings(info, shared_settings(config), config.rollout.replay_from)
    refuse_unknown_columns(config.algorithm, info.columns, f"the recording in {config.rollout.replay_from!r}")
    return info


def open_recording(config: RunConfig, tokenizer: Any, facts: TokenFacts) -> Recording:
    """The recording that `rollout.replay_from` names, found fit for this model."""
    assert config.rollout.replay_from is not None
    check_recording(config)
    recording = Recording.read(config.rollout.replay_from)
    check_model(recording, tokenizer_digest(tokenizer), facts.vocabulary, config.rollout.group_size)
    return recording


def recording_writer(config: RunConfig, tokenizer: Any, columns: tuple[ExtraColumn, ...]) -> RecordingWriter | None:
    """What writes every group to the run directory, if `rollout.record` asks for it; `columns` are the environment's
    own."""
    if not config.rollout.record:
        return None
    info = RecordingInfo(settings=shared_settings(config), tokenizer=tokenizer_digest(tokenizer), columns=columns)
    return RecordingWriter(RecordingFolder(Path(config.run_dir) / FOLDER, info, opened=False))


def tokenizer_digest(tokenizer: Any) -> str:
    """Names a vocabulary: the same tokens under the same ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


def rollout_notes(config: RunConfig, recording: Recording | None) -> tuple[str, ...]:
    """What a person should know about where groups come from and go to."""
    if recording is not None:
        epochs = len({group.epoch for group in recording.groups})
        return (
            f"replaying {len(recording.groups)} recorded groups of {epochs} epoch{'s' * (epochs != 1)} from "
            f"{recording.run_dir}; there is no engine",
        )
    if config.rollout.record:
        trained = "no training; " if config.training.backend == "none" else ""
        return (f"{trained}rollouts are recorded in {Path(config.run_dir) / FOLDER}",)
    return ()
