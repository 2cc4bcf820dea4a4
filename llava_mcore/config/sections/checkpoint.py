"""Configuration of what is loaded and saved."""

from __future__ import annotations

from llava_mcore.config.sections.base import Iterations, Section, UserPath


class CheckpointConfig(Section):
    """Where the weights come from and where they go."""

    load: UserPath | None = None
    """Megatron checkpoint folder whose weights the run starts from."""
    hf_dir: UserPath | None = None
    """Hugging Face folder with the tokenizer, the image processor and, for a run from scratch, the model's config."""
    save_dir: UserPath | None = None
    """Folder under which the run makes its own folder SAVE_DIR/NAME."""
    save: bool = False
    """Save a checkpoint at the end of the run; a save interval asks for that too."""
    save_interval: Iterations | None = None
    """Iterations between two checkpoints, beside the one at the end; not given: only that one, if asked for."""
    async_save: bool = False
    """Write checkpoints behind the training, which waits only until the tensors have been copied to the host."""
    keep_last: Iterations | None = None
    """Checkpoints of the run that are kept, older ones are deleted; not given: all."""
    keep_every: Iterations | None = None
    """Checkpoints whose iteration is a multiple of this are kept for ever; with keep_last."""
    non_persistent_save_interval: Iterations | None = None
    """Iterations between two checkpoints that only serve to go on after a failure, each replacing the one before. Where
    one that is kept is due as well, only that is written."""
    non_persistent_dir: UserPath | None = None
    """Folder for those, such as a fast disk or /dev/shm, that every node of the run sees; they lie in DIR/NAME. Not
    given: SAVE_DIR/NAME/non_persistent."""
    non_persistent_local_dir: UserPath | None = None
    """Folder on each node's own disk for their tensors: every rank writes and reads what it holds, in DIR/NAME. All
    else of them stays where every node sees it. A run goes on from them at the same layout, on the same nodes."""
    save_optim: bool = False
    """Also save the optimizer, the schedule, the random state and the place in the data, so that a run can resume."""
    load_optim: bool = False
    """Resume what --save-optim saved: from SAVE_DIR/NAME if it holds a checkpoint, else from the load folder."""
    skip_verification: bool = False
    """Load a checkpoint without comparing its files with the checksums that they were written with."""
    init: bool = False
    """Start from random weights of the model that hf_dir describes instead of loading a checkpoint."""

    @property
    def saves(self) -> bool:
        """Whether the run saves at all."""
        return self.save or self.save_interval is not None
