"""Configuration of loading and saving."""

from __future__ import annotations

from llava_mcore.config.sections.base import Iterations, Section, UserPath


class CheckpointConfig(Section):
    """Where the weights come from and where they go."""

    load: UserPath | None = None
    """Megatron checkpoint folder whose weights the run starts from."""
    hf_dir: UserPath | None = None
    """Hugging Face folder with the tokenizer, the image processor and, for a run from scratch, the model's config."""
    save_dir: UserPath | None = None
    """Folder in which the run creates its own folder SAVE_DIR/NAME."""
    save: bool = False
    """Save a checkpoint at the end of the run; a save interval does that too."""
    save_interval: Iterations | None = None
    """Iterations between two checkpoints, besides the one at the end; not given: only the one at the end, with save."""
    async_save: bool = False
    """Write checkpoints in the background; training waits only until the tensors have been copied to the host."""
    keep_last: Iterations | None = None
    """Number of checkpoints to keep; older ones are deleted. Not given: keep all."""
    keep_every: Iterations | None = None
    """Never delete checkpoints whose iteration is a multiple of this; with keep_last."""
    non_persistent_save_interval: Iterations | None = None
    """Iterations between two temporary checkpoints for resuming after a failure; each replaces the previous one. If a
    kept one is due as well, only that is written."""
    non_persistent_dir: UserPath | None = None
    """Folder for temporary checkpoints, such as a fast disk, that every node of the run sees; they are in DIR/NAME. Not
    given: SAVE_DIR/NAME/non_persistent."""
    non_persistent_local_dir: UserPath | None = None
    """Folder on each node's own disk for the tensors of temporary checkpoints: every rank writes and reads its own, in
    DIR/NAME. The other files stay on the shared disk. A run resumes from them with the same layout and nodes."""
    save_optim: bool = False
    """Also save the optimizer, the schedule, the random state and the position in the data: what a resume needs."""
    load_optim: bool = False
    """Resume what --save-optim saved: from SAVE_DIR/NAME if it has a checkpoint, else from the load folder."""
    skip_verification: bool = False
    """Load a checkpoint without comparing its files with their checksums."""
    init: bool = False
    """Start from random weights of the model that hf_dir describes instead of loading a checkpoint."""

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.save or self.save_interval is not None

    @property
    def unsaved(self) -> str | None:
        """Say that a run saves no checkpoint; None if it does."""
        if self.saves:
            return None
        return "no checkpoint is saved: --save saves at the end of a run, --save-interval N also every N iterations"
