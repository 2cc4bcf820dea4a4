"""Metrics to MLflow: a server that MLFLOW_TRACKING_URI names, or files in SAVE_DIR/NAME/mlruns."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from llava_mcore.config.load import config_fields
from llava_mcore.config.schema import RunConfig
from llava_mcore.errors import ConfigError
from llava_mcore.training.run_ids import read_ids, write_id

logger = logging.getLogger(__name__)

SERVICE = "mlflow"
_PARAMS_AT_ONCE = 100  # MLflow's limit for a batch


class MLflow:
    """One run of MLflow, the same one after a resume."""

    def __init__(self, run: RunConfig) -> None:
        """Open it. Raises ConfigError if MLflow refuses the run."""
        from mlflow import MlflowClient  # imports for seconds
        from mlflow.exceptions import MlflowException

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # needs no database; MLflow asks for this since 3.x
        self._failure = MlflowException
        uri = os.environ.get("MLFLOW_TRACKING_URI", (run.run_dir / "mlruns").as_uri())
        try:
            self.client: Any = MlflowClient(tracking_uri=uri)
            self.run_id = self._resumed(read_ids(run.run_dir).get(SERVICE)) or self._created(run)
        except MlflowException as error:
            raise ConfigError(f"--mlflow: {uri}: {error}; set MLFLOW_TRACKING_URI, or leave it unset") from error

    def _resumed(self, run_id: str | None) -> str | None:
        """Reopen the run of this id; None without one, or where the server does not know it."""
        if run_id is None:
            return None
        try:
            self.client.update_run(run_id, status="RUNNING")
        except self._failure as error:
            logger.warning("MLflow does not know the run %s any more, a new one begins: %s", run_id, error)
            return None
        return run_id

    def _created(self, run: RunConfig) -> str:
        """Begin a run, with the configuration as its parameters."""
        from mlflow.entities import Param

        name = run.logging.mlflow_experiment
        experiment = self.client.get_experiment_by_name(name)
        number = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_id: str = self.client.create_run(number, run_name=run.name).info.run_id
        params = [Param(key, str(value)) for key, value in _flat(run).items() if value is not None]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self.client.log_batch(run_id, params=params[first : first + _PARAMS_AT_ONCE])
        write_id(run.run_dir, SERVICE, run_id)
        return run_id

    def write(self, values: dict[str, float], iteration: int) -> None:
        """Send numbers; a server that does not answer costs them, not the run."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        try:
            self.client.log_batch(self.run_id, metrics=[Metric(k, v, now, iteration) for k, v in values.items()])
        except self._failure as error:
            logger.warning("MLflow did not take the metrics of iteration %d: %s", iteration, error)

    def close(self) -> None:
        """Mark the run as ended."""
        try:
            self.client.set_terminated(self.run_id)
        except self._failure as error:
            logger.warning("MLflow: %s", error)


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
