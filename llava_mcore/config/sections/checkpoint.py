"""Configuration of loading and saving."""

from __future__ import annotations

from typing import Annotated

from llava_mcore.config.sections.base import Flag, Iterations, Needs, Section, UserPath

_SAVING = Needs("checkpoint.save", "checkpoint.save_interval")
_TEMPORARY = Needs("checkpoint.non_persistent_save_interval")


class CheckpointConfig(Section):
    """Where the weights come from and where they go."""

    flag_group = "save and load"

    load: Annotated[UserPath | None, Flag("--megatron-load-dir")] = None
    """Megatron checkpoint folder whose weights the run starts from."""
    hf_dir: Annotated[UserPath | None, Flag("--tokenizer-load-dir")] = None
    """Hugging Face folder with the tokenizer, the image processor and, for a run from scratch, the model's config."""
    save_dir: Annotated[UserPath | None, Flag("--save-dir")] = None
    """Folder in which the run creates its own folder SAVE_DIR/NAME."""
    save: Annotated[bool, Flag("--save")] = False
    """Save a checkpoint at the end of the run; save_interval does that too."""
    save_interval: Annotated[Iterations | None, Flag("--save-interval")] = None
    """Iterations between checkpoints, besides the one at the end. Default: only the one at the end, with save."""
    # The end of a run waits for its last checkpoint, so --save alone gives it nothing to do.
    async_save: Annotated[
        bool, Flag("--async-save"), Needs("checkpoint.save_interval", "checkpoint.non_persistent_save_interval")
    ] = False
    """Write checkpoints in the background; training waits only until the tensors have been copied to the host."""
    keep_last: Annotated[Iterations | None, Flag("--keep-last"), _SAVING] = None
    """Number of checkpoints to keep; older ones are deleted. Default: keep all."""
    # Without keep_last, nothing is deleted.
    keep_every: Annotated[Iterations | None, Flag("--keep-every"), Needs("checkpoint.keep_last")] = None
    """With keep_last, never delete checkpoints whose iteration is a multiple of this."""
    non_persistent_save_interval: Annotated[Iterations | None, Flag("--non-persistent-save-interval")] = None
    """Iterations between temporary checkpoints for resuming after a failure; each replaces the previous one. If a
    persistent checkpoint is due as well, only that is written."""
    non_persistent_dir: Annotated[UserPath | None, Flag("--non-persistent-ckpt-dir"), _TEMPORARY] = None
    """Folder for temporary checkpoints, such as a fast disk, that every node of the run sees; they are in DIR/NAME. 
    Default: SAVE_DIR/NAME/non_persistent."""
    non_persistent_local_dir: Annotated[UserPath | None, Flag("--non-persistent-local-ckpt-dir"), _TEMPORARY] = None
    """Folder on each node's own disk for the tensors of temporary checkpoints: every rank writes and reads its own, in
    DIR/NAME. The other files stay on the shared disk. A run resumes from them with the same layout and nodes."""
    save_optim: Annotated[bool, Flag("--save-optim"), _SAVING] = False
    """Also save everything that a resume needs: optimizer, schedule, random state, and position in the data."""
    load_optim: Annotated[bool, Flag("--load-optim")] = False
    """Resume what --save-optim saved: from SAVE_DIR/NAME if it has a checkpoint, else from the load folder."""
    skip_verification: Annotated[bool, Flag("--no-verify-checkpoint")] = False
    """Load a checkpoint without comparing its files with their checksums."""
    init: Annotated[bool, Flag("--init")] = False
    """Start from random weights of the model in hf_dir instead of loading a checkpoint."""

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
