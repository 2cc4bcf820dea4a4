"""The tokenizer's special tokens: sets those given by id, and compares them with the model's config.json."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llava_mcore.models.architectures.registry import architecture_of


def choose_tokens(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int | None], found: list[str]) -> None:
    """Set the tokenizer's special tokens that are given by id.

    ids: special token's name -> id, None keeps it.
    """
    for name, number in ids.items():
        if number is None:
            continue
        token = tokenizer.convert_ids_to_tokens(number) if number < len(tokenizer) else None
        if token is None:
            found.append(f"--{name.replace('_', '-')}-id {number}: the tokenizer has tokens 0 to {len(tokenizer) - 1}")
        else:
            tokenizer.add_special_tokens({name: token})


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig | None, found: list[str]) -> str:
    """Check the special tokens and that every id has a row in the embedding. Returns the picture's placeholder."""
    if config is None:
        image_token = tokenizer.special_tokens_map.get("image_token", "<image>")
    else:
        image_token = architecture_of(config).placeholder(tokenizer)
    vocab = tokenizer.get_vocab()
    image_id = vocab.get(image_token)
    if tokenizer.pad_token_id is None:
        found.append("the tokenizer has no pad token; build the folder with build_llava_jp.py or set pad_token")
    if tokenizer.eos_token_id is None:
        found.append("the tokenizer has no EOS token; set eos_token")
    if image_id is None:
        found.append(f"the tokenizer has no {image_token}; build the folder with build_llava_jp.py or add it")
    elif image_id == tokenizer.pad_token_id:
        found.append(f"the pad token and {image_token} are the same token ({image_id}); pads would count as pictures")
    elif tokenizer.backend_tokenizer.encode(image_token, add_special_tokens=False).ids != [image_id]:
        found.append(f"the tokenizer does not keep {image_token} as one token; add it as a special token")
    if config is None:
        return image_token
    if image_id is not None and image_id != config.image_token_id:
        found.append(f"image_token_id is {config.image_token_id} in config.json, but {image_token} is token {image_id}")
    rows = config.text_config.vocab_size
    beyond = sorted((i, token) for token, i in vocab.items() if i >= rows)
    if beyond:
        shown = ", ".join(f"{token} = {i}" for i, token in beyond[:5])
        found.append(f"{len(beyond)} tokens have ids beyond the model's vocab_size {rows}: {shown}")
    return image_token
