"""Answer a question about an image with an exported adapter: transformers and PEFT alone, nothing of this project."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    """Print the answer."""
    args = parser().parse_args(argv)
    print(answer(args.hf_dir, args.adapter, args.image, args.question, args.max_new_tokens))


def parser() -> argparse.ArgumentParser:
    """Flags of answer.py."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    p.add_argument("--hf-dir", type=Path, required=True, help="folder of the model that the adapter belongs to")
    p.add_argument("--adapter", type=Path, required=True, help="folder that export-hf wrote")
    p.add_argument("--image", type=Path, required=True, help="image")
    p.add_argument("--question", required=True, help="question about it")
    p.add_argument("--max-new-tokens", type=int, default=128, help="of the answer (default 128)")
    return p


def answer(hf_dir: Path, adapter: Path, image: Path, question: str, max_new_tokens: int) -> str:
    """Return the model's answer with greedy decoding."""
    from peft import PeftModel
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(hf_dir, dtype="auto", device_map="auto")
    model = PeftModel.from_pretrained(model, adapter).eval()
    processor = AutoProcessor.from_pretrained(adapter)
    content = [{"type": "image", "image": Image.open(image)}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    generated = model.generate(**inputs.to(model.device, model.dtype), max_new_tokens=max_new_tokens, do_sample=False)
    new = generated[0, inputs["input_ids"].shape[1] :]
    return str(processor.decode(new, skip_special_tokens=True)).strip()


if __name__ == "__main__":
    main()
