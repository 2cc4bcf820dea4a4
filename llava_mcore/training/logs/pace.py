"""How far a run is: iterations, epochs, and the time that is left."""

from __future__ import annotations

from llava_mcore.config.sections.training import TrainingConfig
from llava_mcore.training.saving.state import TrainingProgress


class Pace:
    """The progress of this process, for the console. Validations and saves are not part of the time."""

    def __init__(self, training: TrainingConfig, *, is_packed: bool) -> None:
        self.training, self.is_packed = training, is_packed
        self._first: float | None = None
        """Fraction of the run after this process's first iteration, which takes longer than others."""
        self._seconds = 0.0
        """Time since then."""

    def add(self, progress: TrainingProgress, seconds: float) -> None:
        """Add an iteration, in its order."""
        if self._first is None:
            self._first = self._done(progress)
        else:
            self._seconds += seconds

    def total(self, progress: TrainingProgress) -> str:
        """Return the number of iterations of the run, estimated for packs, and the epochs if it is a run by epochs."""
        training, done = self.training, self._done(progress)
        if training.samples_to_read is None or training.epoch_samples is None:
            return str(training.num_iterations)
        epochs = f"epoch {progress.num_read / training.epoch_samples:.2f}/{training.train_epochs:g}"
        if not self.is_packed:
            return f"{training.num_iterations} | {epochs}"
        return f"~{max(progress.iteration, round(progress.iteration / done)) if done else '?'} | {epochs}"

    def rest(self, progress: TrainingProgress) -> str:
        """Return the time that is left, at the mean speed of this process; nothing before its second iteration."""
        done = self._done(progress)
        if self._first is None or done <= self._first or done >= 1:
            return ""
        left = round(self._seconds * (1 - done) / (done - self._first))
        return f" | {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"

    def _done(self, progress: TrainingProgress) -> float:
        return self.training.fraction_done(progress.iteration, progress.num_read)
