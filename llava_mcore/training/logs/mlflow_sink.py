"""Metrics to MLflow: to the server in MLFLOW_TRACKING_URI, or to files in SAVE_DIR/NAME/mlruns.

Training only puts numbers into a queue. A thread sends them, so a slow or unreachable server delays no step.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_mcore.config.load import config_fields
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError
from llava_mcore.training.answers.result import Example
from llava_mcore.training.logs.outbox import Failed, Outbox, RefusedRecord
from llava_mcore.training.logs.run_record import read_ids, write_id

logger = logging.getLogger(__name__)

SERVICE = "mlflow"
_PARAMS_AT_ONCE = 100  # MLflow's limit for a batch
_METRICS_AT_ONCE = 1000  # and this
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",  # it would use the training process's random generator
    "MLFLOW_ALLOW_FILE_STORE": "true",  # needs no database; MLflow asks for this since 3.x
}
"""Timeouts, unless the user sets them: 20 seconds per call instead of MLflow's own 16 minutes."""
_NO_USE = range(400, 500)
_TRY_AGAIN = (408, 429)


class MLflow:
    """One run of MLflow, the same one after a resume."""

    def __init__(self, run: RunConfig, seconds: float) -> None:
        """Open the run.

        Args:
            seconds: how long to wait at the end for unsent metrics.

        Raises:
            ConfigError: MLflow refuses the run, or does not answer.
        """
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # the import takes seconds
        from mlflow.exceptions import MlflowException

        self._failure, self._seconds = MlflowException, seconds
        uri = os.environ.get("MLFLOW_TRACKING_URI", (run.run_dir / "mlruns").as_uri())
        try:
            self.client: Any = MlflowClient(tracking_uri=uri)
            self.run_id = self._resumed(read_ids(run.run_dir).get(SERVICE)) or self._created(run)
        except MlflowException as error:
            raise ConfigError(f"--mlflow: {uri}: {error}; set MLFLOW_TRACKING_URI, or leave it unset") from error
        self._outbox = Outbox(f"MLflow at {uri}", self._send)

    def _resumed(self, run_id: str | None) -> str | None:
        """Reopen the run with this id; None without an id, or if the server does not know it.

        A server that does not answer now may do so later, so this does not end a run that is restarted at night.
        """
        if run_id is None:
            return None
        try:
            self.client.update_run(run_id, status="RUNNING")
        except self._failure as error:
            if error.get_http_status_code() not in _NO_USE:
                logger.warning("MLflow does not answer; metrics are kept for a while and sent when it does: %s", error)
                return run_id
            logger.warning("MLflow no longer knows the run %s, starting a new one: %s", run_id, error)
            return None
        return run_id

    def _created(self, run: RunConfig) -> str:
        """Start a run with the configuration as its parameters."""
        from mlflow.entities import Param

        name = run.logging.mlflow_experiment
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_id: str = self.client.create_run(experiment_id, run_name=run.name).info.run_id
        params = [Param(key, str(value)) for key, value in _flat(run).items() if value is not None]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self.client.log_batch(run_id, params=params[first : first + _PARAMS_AT_ONCE])
        write_id(run.run_dir, SERVICE, run_id)
        return run_id

    def write(self, values: dict[str, float], iteration: int) -> None:
        """Queue numbers to be sent; returns at once."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._outbox.put([Metric(name, value, now, iteration) for name, value in values.items()])

    def show(self, examples: Sequence[Example], picture: Path, iteration: int) -> None:
        """Do nothing: this sink takes numbers only; the run's folder has the examples."""

    def image(self, name: str, path: Path, iteration: int) -> None:
        """Do nothing, as `show`."""

    def close(self) -> None:
        """Send what is left and mark the run as finished."""
        self._outbox.close(self._seconds, last=lambda: self._call(self.client.set_terminated, self.run_id))

    def _send(self, records: Sequence[list[Any]]) -> int:
        """Send the metrics of as many iterations as MLflow takes in one call, and return their number."""
        metrics: list[Any] = []
        count = 0
        for record in records:
            if count and len(metrics) + len(record) > _METRICS_AT_ONCE:
                break
            metrics += record
            count += 1
        self._call(self.client.log_batch, self.run_id, metrics=metrics)
        return count

    def _call(self, function: Any, *arguments: Any, **kwargs: Any) -> None:
        try:
            function(*arguments, **kwargs)
        except self._failure as error:
            code = error.get_http_status_code()
            kind = RefusedRecord if code in _NO_USE and code not in _TRY_AGAIN else Failed
            raise kind(str(error)) from error
        except OSError as error:  # its files
            raise Failed(str(error)) from error


def _flat(run: RunConfig) -> dict[str, object]:
    """Return every value of the configuration by its dotted key."""
    nested = run.model_dump(mode="json")
    flat = {}
    for key, _ in config_fields():
        value: Any = nested
        for part in key.split("."):
            value = value[part]
        flat[key] = value
    return flat
