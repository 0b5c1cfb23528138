"""A run directory is one run's: another run, another run's files, or another folder in its place are noticed."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.errors import ConfigError, SetupError
from penstock.run.aside import set_aside
from penstock.run.checkpoint_folders import draft_of
from penstock.run.directory import RunDirectory, check_run_dir
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines
from tests.run.whole_runs import QUICK, whole_run
from tests.support.folders import contents


def run_id(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["run_id"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A finished run of three steps with the checkpoints of steps 2 and 3; to be copied, not changed."""
    return whole_run(model_folder, tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run with the same settings, and other responses."""
    return whole_run(model_folder, tmp_path_factory.mktemp("other"), seed=3)


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


class TestANewRun:
    @pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "checkpoints", "run.json"])
    def test_is_refused_where_anything_of_a_run_is_left(self, run_dir: Path, name: str) -> None:
        """Whatever is moved away of the old run, the rest of it is not written over."""
        for path in run_dir.iterdir():
            if path.name not in (name, "config.yaml", "run.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        before = contents(run_dir)
        for use in (check_run_dir, RunDirectory):
            with pytest.raises(SetupError, match=rf"already holds a run \({name}.*penstock resume .*--from-scratch"):
                use(run_dir)
        assert {**contents(run_dir), ".lock": b""} == {**before, ".lock": b""}

    def test_is_refused_over_recorded_rollouts(self, tmp_path: Path) -> None:
        RunDirectory(tmp_path).close()
        (tmp_path / "rollouts").mkdir()
        with pytest.raises(SetupError, match=r"already holds a run \(rollouts\)"):
            RunDirectory(tmp_path)

    def test_a_disk_without_locks_is_not_taken_for_another_run(
        self, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refused)
        for use in (lambda: RunDirectory(tmp_path / "new"), lambda: RunDirectory(run_dir, reopen=True)):
            with pytest.raises(SetupError, match="cannot be locked: No locks available"):
                use()
        with pytest.raises(SetupError, match="cannot be moved aside: No locks available"):
            set_aside(run_dir)


class TestFromScratch:
    def test_train_moves_the_old_run_aside_as_a_whole(self, make_config: ConfigMaker, run_dir: Path) -> None:
        before, old = contents(run_dir), run_id(run_dir)
        result = penstock.train(make_config(**QUICK, **{"training.max_steps": 1}), from_scratch=True)
        aside = run_dir.with_name("run.1")
        assert contents(aside) == before
        assert (result.run_dir, result.summary["steps"]) == (run_dir, 1)
        assert run_id(run_dir) not in (old, "")
        moved = [line for line in lines(run_dir / "events.jsonl") if line["event"] == "old_run_moved"]
        assert [line["place"] for line in moved] == [str(aside)]

    def test_resume_begins_anew_with_the_runs_own_settings(self, run_dir: Path) -> None:
        shutil.rmtree(run_dir / "checkpoints")
        run_dir.with_name("run.1").mkdir()
        result = penstock.resume(run_dir, ["training.max_steps=1", "seed=9"], from_scratch=True)
        assert result.summary["steps"] == 1
        assert len(lines(run_dir / "metrics.jsonl")) == 1
        assert len(lines(run_dir.with_name("run.2") / "metrics.jsonl")) == 3

    @pytest.mark.long
    def test_the_run_that_was_moved_aside_can_go_on_there(self, make_config: ConfigMaker, run_dir: Path) -> None:
        penstock.train(make_config(**QUICK, **{"training.max_steps": 1}), from_scratch=True)
        assert penstock.resume(run_dir.with_name("run.1"), ["training.max_steps=4"]).summary["steps"] == 4

    def test_a_run_that_still_goes_on_is_not_moved(self, make_config: ConfigMaker, run_dir: Path) -> None:
        going = RunDirectory(run_dir, reopen=True)
        try:
            with pytest.raises(SetupError, match="is in use: the run is still going"):
                penstock.train(make_config(**QUICK), from_scratch=True)
        finally:
            going.close()
        assert not run_dir.with_name("run.1").exists()

    def test_a_model_of_the_old_run_is_not_moved_away_under_the_new_one(
        self, make_config: ConfigMaker, run_dir: Path
    ) -> None:
        config = make_config(**QUICK, **{"model.path": str(run_dir / "checkpoints/step_3")})
        with pytest.raises(ConfigError, match=r"model\.path: .* is inside the run that --from-scratch moves aside"):
            penstock.train(config, from_scratch=True)
        assert not run_dir.with_name("run.1").exists()

    def test_a_setting_that_leads_into_the_old_run_by_a_link_is_refused(
        self, make_config: ConfigMaker, run_dir: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(run_dir)
        config = make_config(**QUICK, **{"model.path": str(tmp_path / "link/checkpoints/step_3")})
        with pytest.raises(ConfigError, match=r"model\.path: .* is inside the run that --from-scratch moves aside"):
            penstock.train(config, from_scratch=True)
        assert not run_dir.with_name("run.1").exists()

    def test_a_project_with_a_config_of_its_own_is_no_run(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        project = tmp_path / "project"
        project.mkdir()
        for name in ("config.yaml", "events.jsonl", "code.py"):
            (project / name).write_text("mine")
        before = contents(project)
        with pytest.raises(SetupError, match=r"has config\.yaml, events\.jsonl, which a run would overwrite"):
            penstock.train(make_config(run_dir=str(project)), from_scratch=True)
        assert contents(project) == before
        assert [path.name for path in tmp_path.iterdir()] == ["project"]

    @pytest.mark.long
    def test_without_a_run_it_is_a_run_like_any_other(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "notes.txt").write_text("mine")
        penstock.train(make_config(**QUICK, **{"training.max_steps": 1}), from_scratch=True)
        assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
        assert not (tmp_path / "run.1").exists()

    @pytest.mark.long
    def test_on_the_command_line(self, run_dir: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "resume", str(run_dir), "--from-scratch", "observe.console=plain"],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert f"the old run was moved to {run_dir}.1" in done.stdout


class TestCheckpointsMovedAway:
    def test_a_resume_does_not_begin_anew(self, run_dir: Path) -> None:
        (run_dir / "checkpoints").rename(run_dir.with_name("kept"))
        before = contents(run_dir)
        with pytest.raises(SetupError, match=r"no complete checkpoint, but this run has saved some.*--from-scratch"):
            penstock.resume(run_dir)
        assert contents(run_dir) == before
        run_dir.with_name("kept").rename(run_dir / "checkpoints")
        assert penstock.resume(run_dir, ["training.max_steps=4"]).summary["steps"] == 4

    @pytest.mark.parametrize("name", ["events.jsonl", "run.json"])
    def test_either_record_of_them_suffices(self, run_dir: Path, name: str) -> None:
        shutil.rmtree(run_dir / "checkpoints")
        if name == "events.jsonl":
            (run_dir / name).unlink()
        else:
            (run_dir / name).write_text(json.dumps({"run_id": run_id(run_dir)}))
        with pytest.raises(SetupError, match="but this run has saved some"):
            penstock.resume(run_dir)

    @pytest.mark.long
    def test_a_kill_just_before_the_first_one_appears_leaves_a_run_that_begins_anew(
        self, make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is on disk when the process dies between the word of the checkpoint and its rename."""
        killed = tmp_path / "killed"
        rename = Path.rename

        def at_rename(path: Path, target: Path) -> Path:
            if path.name == ".writing_step_2" and not killed.exists():
                shutil.copytree(tmp_path / "run", killed)
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", at_rename)
        penstock.train(make_config(**QUICK, **{"checkpoint.every_steps": 2}))
        assert json.loads((killed / "run.json").read_text())["first_checkpoint"] == "step_2"
        draft = draft_of(killed / "checkpoints" / "step_2")
        assert draft.is_dir()
        assert penstock.resume(killed, ["checkpoint.at_end=false", "checkpoint.every_steps=null"]).summary["steps"] == 3
        assert not draft.exists()
        assert penstock.resume(killed).summary["steps"] == 3, "it still never had a checkpoint"

    @pytest.mark.long
    def test_a_first_one_that_the_disk_refuses_is_no_word_of_a_checkpoint(
        self, make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename = Path.rename

        def refused(path: Path, target: Path) -> Path:
            if path.name.startswith(".writing_step_"):
                raise OSError(28, "No space left on device")
            return rename(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", refused)
            with pytest.raises(penstock.errors.CheckpointError, match="No space left"):
                penstock.train(make_config(**QUICK))
        assert penstock.resume(tmp_path / "run").summary["steps"] == 3


class TestFilesOfAnotherRun:
    @pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
    def test_are_refused_by_name(self, run_dir: Path, other: Path, name: str) -> None:
        shutil.copy(other / name, run_dir / name)
        before = contents(run_dir)
        with pytest.raises(SetupError, match=rf"{name}' .*does not belong to checkpoint step_3"):
            penstock.resume(run_dir, ["training.max_steps=4"])
        assert contents(run_dir) == before

    @pytest.mark.parametrize(
        ("damage", "name"),
        [
            ("zeroed", "metrics.jsonl"),
            ("gone", "ledger.jsonl"),
            *(
                pytest.param(damage, name, marks=pytest.mark.long)
                for name, damages in {
                    "metrics.jsonl": ("emptied", "shortened", "gone"),
                    "ledger.jsonl": ("emptied", "shortened", "zeroed"),
                }.items()
                for damage in damages
            ),
        ],
    )
    def test_damage_is_refused_by_name(self, run_dir: Path, name: str, damage: str) -> None:
        path, content = run_dir / name, (run_dir / name).read_bytes()
        whole = content[: content.rindex(b"\n", 0, -1) + 1]
        path.write_bytes({"emptied": b"", "shortened": whole, "zeroed": b"\0" * len(content), "gone": b""}[damage])
        if damage == "gone":
            path.unlink()
        with pytest.raises(SetupError, match=rf"{name}' (is shorter|has different content|is gone).*--from-scratch"):
            penstock.resume(run_dir, ["training.max_steps=4"])
        path.write_bytes(content)
        check_goes_on(run_dir)

    def test_an_older_checkpoint_that_still_fits_is_named(self, run_dir: Path) -> None:
        """The last step's line is gone: step 3 cannot be used, and step 2 can."""
        path = run_dir / "metrics.jsonl"
        content = path.read_bytes()
        path.write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])
        way = rf"The newest good one is step_2: penstock resume {run_dir} --checkpoint step_2"
        with pytest.raises(SetupError, match=way):
            penstock.resume(run_dir, ["training.max_steps=4"])
        assert penstock.resume(run_dir, ["training.max_steps=4"], checkpoint="step_2").summary["steps"] == 4

    def test_one_whose_records_do_not_fit_is_not_recommended(self, run_dir: Path) -> None:
        (run_dir / "metrics.jsonl").write_bytes(b"")
        with pytest.raises(SetupError, match=r"is shorter.*No other checkpoint of the run can be used"):
            penstock.resume(run_dir)
        (run_dir / "checkpoints/step_3/model.safetensors").write_bytes(b"short")
        with pytest.raises(SetupError, match=r"(?s)model\.safetensors: .*No other checkpoint of the run can be used"):
            penstock.resume(run_dir)

    @pytest.mark.long
    def test_samples_may_have_been_deleted(self, run_dir: Path) -> None:
        (run_dir / "samples.jsonl").unlink()
        check_goes_on(run_dir)
        check_goes_on(run_dir, 5)

    def test_samples_that_were_deleted_and_begun_anew_are_never_a_reason_to_refuse(self, run_dir: Path) -> None:
        """As a resume leaves them that is killed before its next checkpoint."""
        (run_dir / "samples.jsonl").write_text('{"step": 4, "reward": 0.0}\n')
        check_goes_on(run_dir)

    def test_a_checkpoint_of_another_run_is_refused(self, run_dir: Path, other: Path) -> None:
        shutil.rmtree(run_dir / "checkpoints/step_3")
        shutil.copytree(other / "checkpoints/step_3", run_dir / "checkpoints/step_3")
        with pytest.raises(SetupError, match=rf"penstock\.json: belongs to another run \({run_id(other)}; "):
            penstock.resume(run_dir)

    def test_the_events_of_another_run_are_refused(self, run_dir: Path, other: Path) -> None:
        shutil.copy(other / "events.jsonl", run_dir / "events.jsonl")
        with pytest.raises(SetupError, match=r"events\.jsonl' is the history of another run"):
            penstock.resume(run_dir)

    def test_the_id_is_in_summary_and_events(self, run_dir: Path) -> None:
        check_goes_on(run_dir)
        assert json.loads((run_dir / "summary.json").read_text())["run_id"] == run_id(run_dir)
        started = [line for line in lines(run_dir / "events.jsonl") if line["event"] in ("run_started", "run_resumed")]
        assert [line["run_id"] for line in started] == [run_id(run_dir)] * 3


def check_goes_on(run_dir: Path, steps: int = 4) -> None:
    assert penstock.resume(run_dir, [f"training.max_steps={steps}"]).summary["steps"] == steps
