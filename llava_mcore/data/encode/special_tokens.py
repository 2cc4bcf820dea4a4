"""The tokenizer's special tokens: sets those given by id, and compares them with the model's config.json."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llava_mcore.models.architectures.registry import architecture_of


def choose_tokens(tokenizer: PreTrainedTokenizerBase, ids: dict[str, int | None], errors: list[str]) -> None:
    """Set the tokenizer's special tokens that are given by id.

    ids: special token's name -> id, None keeps it.
    """
    for name, token_id in ids.items():
        if token_id is None:
            continue
        token = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
        if token is None:
            errors.append(
                f"--{name.replace('_', '-')}-id {token_id}: the tokenizer has tokens 0 to {len(tokenizer) - 1}"
            )
        else:
            tokenizer.add_special_tokens({name: token})


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig | None, errors: list[str]) -> str:
    """Check the special tokens and that every id has a row in the embedding. Returns the placeholder of a picture, or
    of a sound for a class without pictures."""
    key, token = _placeholder(tokenizer, config)
    vocab = tokenizer.get_vocab()
    token_id = vocab.get(token)
    if tokenizer.pad_token_id is None:
        errors.append("the tokenizer has no pad token; build the folder with build_llava_jp.py or set pad_token")
    if tokenizer.eos_token_id is None:
        errors.append("the tokenizer has no EOS token; set eos_token")
    if token_id is None:
        errors.append(f"the tokenizer has no {token}; build the folder with build_llava_jp.py or add it")
    elif token_id == tokenizer.pad_token_id:
        errors.append(f"the pad token and {token} are the same token ({token_id}); pads would count as media")
    elif tokenizer.backend_tokenizer.encode(token, add_special_tokens=False).ids != [token_id]:
        errors.append(f"the tokenizer does not keep {token} as one token; add it as a special token")
    if config is None:
        return token
    expected = config.audio_token_id if key == "audio_token_id" else config.image_token_id
    if token_id is not None and token_id != expected:
        errors.append(f"{key} is {expected} in config.json, but {token} is token {token_id}")
    rows = config.text_config.vocab_size
    beyond = sorted((i, token) for token, i in vocab.items() if i >= rows)
    if beyond:
        listed = ", ".join(f"{token} = {i}" for i, token in beyond[:5])
        errors.append(f"{len(beyond)} tokens have ids beyond the model's vocab_size {rows}: {listed}")
    return token


def _placeholder(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig | None) -> tuple[str, str]:
    """Return the key in config.json and the token."""
    if config is None:
        return "image_token_id", str(tokenizer.special_tokens_map.get("image_token", "<image>"))
    architecture = architecture_of(config)
    if architecture.takes_images:
        return "image_token_id", architecture.placeholder(tokenizer)
    return "audio_token_id", architecture.audio_placeholder(tokenizer)
