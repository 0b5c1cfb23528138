"""TensorBoard, MLflow and Weights & Biases: what is written is read back with their own readers."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config.reading.loading import parse_config
from penstock.config.sections.observe import MlflowConfig, TensorboardConfig, WandbConfig
from penstock.errors import ConfigError, SetupError
from penstock.observe.loggers.base import Logger, Outcome, RunInfo, Setting
from penstock.observe.loggers.mlflow import MlflowLogger, metric_key
from penstock.observe.loggers.tensorboard import TensorboardLogger
from penstock.observe.loggers.wandb import WandbLogger
from tests.config.settings import settings
from tests.support.loggers import mlflow_run, tensorboard_events, wandb_records, wandb_values

LABELLED = "train/reward_mean/reasoning_gym:chain_sum"
SETTINGS: dict[str, Setting] = {"seed": 3, "deterministic": False, "training.optimizer.lr": 1e-6, "model.path": "a|b"}
SUMMARY = {"stopped_by": "max_steps", "steps": 2, "eval/reward_mean": 0.75, "eval/reward_mean_start": None}


def write(logger: Logger, folder: Path, outcome: Outcome = Outcome.FINISHED) -> str:
    """A little run: an evaluation before the first step, two steps, an evaluation after them."""
    place = logger.start(RunInfo("first", folder, SETTINGS))
    logger.log(0, {"eval/reward_mean": 0.25})
    logger.log(1, {"train/reward_mean": 0.5, LABELLED: 0.5, "train/loss": math.nan})
    logger.log(2, {"train/reward_mean": 0.625, LABELLED: 0.625, "train/loss": -1.5})
    logger.log(2, {"eval/reward_mean": 0.75})
    logger.summary(outcome, SUMMARY)
    logger.close()
    return place


def write_again(logger: Logger, folder: Path) -> str:
    """A run of three steps that goes back to step 1 once."""
    place = logger.start(RunInfo("first", folder, SETTINGS))
    for step, reward in ((1, 0.125), (2, 0.25), (3, 0.375), (2, 0.5), (3, 0.75)):
        logger.log(step, {"train/reward_mean": reward})
    logger.summary(Outcome.FINISHED, SUMMARY)
    logger.close()
    return place


class TestTensorboard:
    def hparams(self, events: Any, tag: str) -> Any:
        from tensorboard.plugins.hparams import plugin_data_pb2

        return plugin_data_pb2.HParamsPluginData.FromString(events.PluginTagToContent("hparams")[tag])

    def test_scalars_settings_and_summary_are_read_back(self, tmp_path: Path) -> None:
        place = write(TensorboardLogger(TensorboardConfig()), tmp_path)
        assert place == str(tmp_path / "tensorboard")
        events = tensorboard_events(place)
        scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        losses = scalars.pop("train/loss")
        assert math.isnan(losses[0][1])
        assert losses[1] == (2, -1.5)
        assert scalars == {
            "eval/reward_mean": [(0, 0.25), (2, 0.75)],
            "train/reward_mean": [(1, 0.5), (2, 0.625)],
            LABELLED: [(1, 0.5), (2, 0.625)],
        }
        texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in ("config", "summary")}
        assert "| model.path | a\\|b |" in texts["config"]
        assert "| status | finished |" in texts["summary"]
        assert "| eval/reward_mean | 0.75 |" in texts["summary"]

    def test_steps_that_come_again_replace_the_first_ones(self, tmp_path: Path) -> None:
        place = write_again(TensorboardLogger(TensorboardConfig()), tmp_path)
        found = [(event.step, event.value) for event in tensorboard_events(place).Scalars("train/reward_mean")]
        assert found == [(1, 0.125), (2, 0.5), (3, 0.75)]

    @pytest.mark.parametrize(
        ("outcome", "status"), [(Outcome.FINISHED, 1), (Outcome.FAILED, 2), (Outcome.INTERRUPTED, 2)]
    )
    def test_the_table_of_hyper_parameters_has_settings_and_status(
        self, tmp_path: Path, outcome: Outcome, status: int
    ) -> None:
        folder = tmp_path / "elsewhere"
        write(TensorboardLogger(TensorboardConfig(folder=str(folder))), tmp_path, outcome)
        events = tensorboard_events(folder)
        start = self.hparams(events, "_hparams_/session_start_info").session_start_info.hparams
        assert start["training.optimizer.lr"].number_value == 1e-6
        assert start["deterministic"].WhichOneof("kind") == "bool_value"
        assert start["model.path"].string_value == "a|b"
        assert self.hparams(events, "_hparams_/session_end_info").session_end_info.status == status

    def test_a_step_is_on_disk_before_the_next(self, tmp_path: Path) -> None:
        logger = TensorboardLogger(TensorboardConfig())
        place = logger.start(RunInfo("first", tmp_path))
        logger.log(1, {"train/loss": 2.0})
        assert [e.value for e in tensorboard_events(place).Scalars("train/loss")] == [2.0]
        logger.close()

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        logger = TensorboardLogger(TensorboardConfig(folder=str(tmp_path / "file")))
        with pytest.raises(SetupError, match=r"^observe\.tensorboard\.folder: .*file' cannot be written"):
            logger.start(RunInfo("first", tmp_path))


class TestMlflow:
    def test_metrics_parameters_and_summary_are_read_back(self, tmp_path: Path) -> None:
        place = write(MlflowLogger(MlflowConfig()), tmp_path)
        client, run = mlflow_run(tmp_path / "mlflow")
        assert run.info.run_id in place
        assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
        assert run.data.params == {key: str(value) for key, value in SETTINGS.items()}
        wanted = {"penstock.stopped_by": "max_steps", "penstock.steps": "2", "penstock.eval/reward_mean": "0.75"}
        assert {key: value for key, value in run.data.tags.items() if key.startswith("penstock.")} == wanted
        assert set(run.data.tags) - set(wanted) == {"mlflow.runName"}

        def history(key: str) -> list[tuple[int, float]]:
            return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]

        assert history("eval/reward_mean") == [(0, 0.25), (2, 0.75)]
        assert history("train/reward_mean") == [(1, 0.5), (2, 0.625)]
        assert history("train/reward_mean.reasoning_gym:chain_sum") == [(1, 0.5), (2, 0.625)]
        assert math.isnan(history("train/loss")[0][1])

    @pytest.mark.parametrize(("outcome", "status"), [(Outcome.FAILED, "FAILED"), (Outcome.INTERRUPTED, "KILLED")])
    def test_status_is_that_of_the_run(self, tmp_path: Path, outcome: Outcome, status: str) -> None:
        write(MlflowLogger(MlflowConfig(experiment="mine", name="second")), tmp_path, outcome)
        _, run = mlflow_run(tmp_path / "mlflow", "mine")
        assert (run.info.run_name, run.info.status) == ("second", status)

    def test_more_settings_and_metrics_than_a_request_carries(self, tmp_path: Path) -> None:
        logger = MlflowLogger(MlflowConfig())
        logger.start(RunInfo("first", tmp_path, {f"key_{n}": "x" * 9000 for n in range(201)}))
        logger.log(1, {f"train/metric_{n}": float(n) for n in range(1001)})
        logger.close()
        _, run = mlflow_run(tmp_path / "mlflow")
        assert (len(run.data.params), len(run.data.metrics)) == (201, 1001)

    def test_keys_are_what_every_store_takes(self) -> None:
        assert metric_key("train/reward_mean") == "train/reward_mean"
        assert metric_key("train/reward_mean/verifiers:team/gsm8k[0]") == "train/reward_mean.verifiers:team_gsm8k_0_"

    @pytest.mark.parametrize(
        ("uri", "reason"),
        [
            ("foo://bar", "cannot be used: "),
            ("sqlite:///runs.db", "cannot be used; a database needs the whole package: pip install mlflow"),
        ],
    )
    def test_an_address_of_an_unknown_kind_is_refused(self, tmp_path: Path, uri: str, reason: str) -> None:
        with pytest.raises(SetupError) as caught:
            MlflowLogger(MlflowConfig(tracking_uri=uri)).start(RunInfo("first", tmp_path))
        assert str(caught.value).startswith(f"observe.mlflow.tracking_uri: {uri!r} {reason}")

    @pytest.mark.parametrize(
        "uri",
        ["https://me:hunter2@mlflow.example.org", "https://hunter2@mlflow.example.org", "mysql://me:hunter2@db/mlflow"],
    )
    def test_a_secret_in_the_address_is_refused_and_not_repeated(self, uri: str) -> None:
        with pytest.raises(ConfigError, match=r"^observe\.mlflow\.tracking_uri: holds a password or token") as caught:
            parse_config(settings(observe__mlflow={"tracking_uri": uri}))
        assert "hunter2" not in str(caught.value)

    def test_the_user_of_a_database_is_no_secret(self) -> None:
        parse_config(settings(observe__mlflow={"tracking_uri": "postgresql://me@db.example.org/mlflow"}))

    def test_a_server_that_is_not_there_is_given_up_soon(self, tmp_path: Path) -> None:
        with socket.socket() as taken:  # bound and not listening: connections are refused
            taken.bind(("127.0.0.1", 0))
            uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
            started = time.monotonic()
            with pytest.raises(SetupError, match=r"^observe\.mlflow\.tracking_uri: 'http://127\.0\.0\.1:"):
                MlflowLogger(MlflowConfig(tracking_uri=uri)).start(RunInfo("first", tmp_path))
            assert time.monotonic() - started < 20


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


class TestWandb:
    def test_offline_run_is_read_back(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        excepthook = sys.excepthook
        place = write(WandbLogger(WandbConfig(project="mine")), tmp_path, Outcome.INTERRUPTED)
        import wandb

        assert wandb.run is None
        assert sys.excepthook is excepthook
        assert capfd.readouterr() == ("", "")
        assert Path(place).parent == tmp_path / "wandb"
        (path,) = Path(place).glob("run-*.wandb")
        records = wandb_records(path)
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.project, run.display_name) == ("mine", "first")
        config = wandb_values(run.config.update)
        assert {key: config[key] for key in SETTINGS} == SETTINGS
        history = {
            row["_step"]: row
            for record in records
            if record.WhichOneof("record_type") == "history"
            for row in [wandb_values(record.history.item)]
        }
        assert sorted(history) == [0, 1, 2]
        assert history[0]["eval/reward_mean"] == 0.25
        assert (history[2]["train/reward_mean"], history[2][LABELLED], history[2]["eval/reward_mean"]) == (
            0.625,
            0.625,
            0.75,
        )
        summary: dict[str, Any] = {}
        for record in records:
            summary |= wandb_values(record.summary.update)
        assert (summary["status"], summary["stopped_by"], summary["steps"]) == ("interrupted", "max_steps", 2)
        assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [255]
        assert not any(record.HasField("environment") or record.HasField("stats") for record in records)

    @pytest.mark.long
    def test_steps_that_come_again_are_in_another_run(self, tmp_path: Path) -> None:
        write_again(WandbLogger(WandbConfig()), tmp_path)
        found = []
        for path in sorted((tmp_path / "wandb").glob("*/run-*.wandb"), key=lambda path: path.stat().st_ctime_ns):
            rows = [wandb_values(record.history.item) for record in wandb_records(path) if record.HasField("history")]
            found.append([(row["_step"], row["train/reward_mean"]) for row in rows])
        assert sorted(found) == [[(1, 0.125), (2, 0.25), (3, 0.375)], [(2, 0.5), (3, 0.75)]]

    @pytest.mark.usefixtures("no_credentials")
    def test_online_without_an_api_key_is_refused_and_nobody_is_asked(self, tmp_path: Path) -> None:
        logger = WandbLogger(WandbConfig(mode="online"))
        with pytest.raises(SetupError, match=r"^observe\.wandb\.mode: online needs an API key, and there is none"):
            logger.start(RunInfo("first", tmp_path))

    @pytest.mark.usefixtures("no_credentials")
    def test_online_and_an_environment_that_says_offline_contradict(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        with pytest.raises(SetupError, match=r"^observe\.wandb\.mode: is online, but the environment has WANDB_MODE"):
            WandbLogger(WandbConfig(mode="online")).start(RunInfo("first", tmp_path))

    def test_online_with_a_server_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        server = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "x" * 40, "WANDB_HTTP_TIMEOUT": "1"}
        code = f"""
from pathlib import Path
from penstock.config.sections.observe import WandbConfig
from penstock.observe.loggers.base import RunInfo
from penstock.observe.loggers.wandb import WandbLogger
WandbLogger(WandbConfig(mode="online")).start(RunInfo("first", Path({str(tmp_path / "run")!r})))
"""
        environment = {**os.environ, **server, "HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
        assert "SetupError: observe.wandb.mode: Weights & Biases cannot be reached" in done.stderr
