"""From a run's configuration to trained checkpoints: what every rank does. The walk of `launch/__init__.py` continues.

6. `training/assembly.py: assembled` joins the world, chooses the checkpoint to start from, builds model and optimizer
   (`training/setup.py: build_trainer`), resumes (`training/saving/state.py: resume`), opens the data, and builds the
   loop of these parts.
7. `training/loop.py: TrainingLoop.run` repeats `TrainingLoop.iterate` until all iterations are done, or a rank is asked
   to stop.
8. `training/fetch.py: fetch_step` reads the global batch, adds up what is in it over all ranks, and hands it to all
   ranks of a model replica (`parallel/share.py: share_step`).
9. `training/step.py: train_step` calls megatron-core's schedule, which calls `forward_step` for each micro-batch, and
   the optimizer.
10. `models/multimodal.py: VisionLanguageModel.forward` computes features of the media, puts them at their placeholders,
    and calls the decoder, which is megatron-core's; `models/language/decoder.py: LanguageModel.loss_or_logits` takes
    its output.
11. `models/loss/linear_cross_entropy.py: linear_cross_entropy` is the output layer and the loss, chunk by chunk.
12. `training/iterations.py: Iterations.launched` reports the previous iteration (`training/logs/reporter.py: Reporter`)
    while the device computes this one. Validation (`training/validation.py: Validator`), answers
    (`training/answers/answerer.py: Answerer`) and saves (`training/saving/save.py: Saver`) follow where they are due.
"""

import llava_mcore.parallel  # noqa: F401  (prepares a machine without CUDA before megatron.core is imported)
