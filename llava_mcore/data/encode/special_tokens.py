"""Special tokens: those of the tokenizer, compared with config.json, and those that were typed in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llava_mcore.data.encode.marks import TYPES, escape
from llava_mcore.errors import DataError
from llava_mcore.models.architectures.registry import architecture_of
from llava_mcore.models.language.families.registry import embedding_rows


def choose_tokens(tokenizer: PreTrainedTokenizerBase, ids: Mapping[str, int | None], errors: list[str]) -> None:
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
    """Check the special tokens and that every id has a row in the embedding. Returns the placeholder of an image, or
    of an audio clip for a class without images."""
    key, token = _placeholder(tokenizer, config)
    vocab = tokenizer.get_vocab()
    token_id = vocab.get(token)
    if tokenizer.pad_token_id is None:
        errors.append("the tokenizer has no pad token; set pad_token, or use a folder of `python -m llava_mcore build`")
    if tokenizer.eos_token_id is None:
        errors.append("the tokenizer has no EOS token; set eos_token")
    if token_id is None:
        errors.append(f"the tokenizer has no {token}; add it, or use a folder of `python -m llava_mcore build`")
    elif token_id == tokenizer.pad_token_id:
        errors.append(f"the pad token and {token} are the same token ({token_id}); pads would count as media")
    elif tokenizer.backend_tokenizer.encode(token, add_special_tokens=False).ids != [token_id]:
        errors.append(f"the tokenizer does not keep {token} as one token; add it as a special token")
    if config is None:
        return token
    expected = config.audio_token_id if key == "audio_token_id" else config.image_token_id
    if token_id is not None and token_id != expected:
        errors.append(f"{key} is {expected} in config.json, but {token} is token {token_id}")
    rows = embedding_rows(config)
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


TEMPLATE, TYPED = 0xF0000, 0x100000
"""First of the private characters for the template's own tokens, and for typed ones."""
PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


class TypedTokens:
    """Special tokens that were typed, such as `<|im_end|>` in an answer: they are text, unless configured as tokens.

    A tokenizer finds its special tokens anywhere in a text. To make the template's own tokens and typed ones text, they
    are renamed: typed ones pass through the template as private characters, and afterwards the template's own become
    private characters instead. These are the special tokens of a second tokenizer, which is otherwise the same. All
    names keep their length, so positions in the text do not change.
    """

    def __init__(self, tokenizer: Tokenizer, named: Iterable[str], *, marks: Collection[str]) -> None:
        """Set up the search for a tokenizer.

        Args:
            named: tokens that count as special even if the tokenizer does not say so, such as EOS and the placeholder.
            marks: marks of images and videos in the text of a turn, which do not count as typed.
        """
        self._tokenizer = tokenizer
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._tokens = sorted(token for token in special | set(named) if token in vocab)
        typed = [token for token in self._tokens if token not in marks]
        self._typed = _alternatives(typed)
        self._normalizer = _normalizer(tokenizer, typed)
        indices = {token: index for index, token in enumerate(self._tokens)}
        self._own_name = {token: chr(TEMPLATE + n) * len(token) for token, n in indices.items()}
        self._typed_name = {token: chr(TYPED + n) * len(token) for token, n in indices.items()}
        swapped = self._own_name | {name: token for token, name in self._typed_name.items()}
        self._swap = _replacer(swapped)
        self._hide = _replacer({token: self._typed_name[token] for token in typed})
        self._literal = {escape(mark): self._typed_name[mark] for mark in TYPES if mark in indices}
        self._hide_literal = _replacer(self._literal)
        self._renamed: Tokenizer | None = None

    def found_in(self, text: str) -> set[str]:
        """Return the special tokens in a text, before or after the tokenizer's normalization."""
        if self._typed is None:
            return set()
        tokens = set(self._typed.findall(text))
        if self._normalizer is not None:
            tokens |= set(self._typed.findall(self._normalizer(text)))
        return tokens

    def has_literal(self, text: str) -> bool:
        """Return whether a text contains an escaped mark that would be a token if it were not hidden."""
        return any(mark in text for mark in self._literal)

    def hide(self, text: str, *, typed: bool = True) -> str:
        """Return the text of a turn with other names for the tokens typed there, and for escaped marks.

        typed: whether special tokens are hidden too, and not escaped marks alone.

        Raises DataError if the text already contains such names.
        """
        if PRIVATE.search(text):
            raise DataError("the text contains both special tokens and private characters (U+F0000 and above)")
        text = self._hide_literal(text)
        return self._hide(text) if typed else text

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Tokenize a rendered conversation whose turns were hidden: what was typed there becomes plain text."""
        if self._renamed is None:
            self._renamed = self._make_renamed()
        return self._renamed.encode(self._swap(text), add_special_tokens=add_special_tokens)

    def _make_renamed(self) -> Tokenizer:
        """Return the tokenizer with private names for its special tokens.

        DataError if it differs in anything else.
        """
        about = json.loads(self._tokenizer.to_str())
        for token in about["added_tokens"]:
            token["content"] = self._own_name.get(token["content"], token["content"])
        _rename_model(about["model"], self._own_name)
        renamed = Tokenizer.from_str(json.dumps(about))
        for token, name in self._own_name.items():
            probes = (token, f"a{token}", f"{token}a {token}")
            expected = [self._tokenizer.encode(p, add_special_tokens=False).ids for p in probes]
            actual = [renamed.encode(p.replace(token, name), add_special_tokens=False).ids for p in probes]
            if actual != expected:
                raise DataError(f"{_ADVICE}: {token} became {actual}, not {expected}")
        return renamed


_ADVICE = (
    "special tokens in the text cannot be distinguished with this tokenizer; remove them from the text, or read them "
    "as tokens (data.special_tokens_in_text control, --special-tokens-in-text control)"
)


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of the texts that prefers longer ones."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _replacer(names: dict[str, str]) -> Callable[[str], str]:
    pattern = _alternatives(names)
    if pattern is None:
        return lambda text: text
    return lambda text: pattern.sub(lambda match: names[match[0]], text)


def _normalizer(tokenizer: Tokenizer, tokens: Iterable[str]) -> Callable[[str], str] | None:
    """Return the tokenizer's normalization before its search for special tokens; None if it searches first."""
    added: dict[str, AddedToken] = {t.content: t for t in tokenizer.get_added_tokens_decoder().values()}
    if tokenizer.normalizer is None or not any(added[token].normalized for token in tokens if token in added):
        return None
    return tokenizer.normalizer.normalize_str


def _rename_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Give tokens of a tokenizer's model other names, in place."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
    else:  # pieces with their scores
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [p for p in pairs if not {*p, "".join(p)} & names.keys()]
