"""Shows a conversation as the model reads it, with trained parts marked and images abbreviated."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from rich.text import Text
from torch import Tensor

from llava_mcore.data.encode.assets import Assets
from llava_mcore.data.encode.marks import TYPES
from llava_mcore.data.samples import TokenConversation

TRAINED_STYLE = "bold green"
MEDIA_STYLE = "cyan"


def in_words(assets: Assets) -> Callable[[Tensor, Tensor], str]:
    """Return a function that shows a row of a batch: (input_ids [s], trained [s]) -> text, trained parts in « »."""

    def text(input_ids: Tensor, trained: Tensor) -> str:
        return _marked(input_ids.tolist(), trained.tolist(), assets, colored=False).plain

    return text


def conversation_text(tokens: TokenConversation, assets: Assets, *, colored: bool) -> Text:
    """Return the text of all tokens, trained ones colored, or between « and » where there are no colors."""
    return _marked(tokens.input_ids.tolist(), tokens.trained.tolist(), assets, colored=colored)


def _marked(ids: list[int], marks: list[bool], assets: Assets, *, colored: bool) -> Text:
    text = Text()
    names = {token_id: TYPES[mark] for mark, token_id in assets.chat.media_ids.items()}
    kinds = [(names.get(i), bool(t)) for i, t in zip(ids, marks, strict=True)]
    start = 0
    for (name, trained), run in groupby(kinds):
        end = start + len(list(run))
        if name is not None:
            text.append(f"<{name} \N{MULTIPLICATION SIGN}{end - start}>", MEDIA_STYLE)
        else:
            piece = _decode(ids, start, end, assets)
            piece_text = piece if colored or not trained else f"«{piece}»"
            text.append(piece_text, TRAINED_STYLE if trained else "")
        start = end
    return text


def _decode(ids: list[int], start: int, end: int, assets: Assets) -> str:
    """Decode tokens with those before them: decoded alone, some tokenizers drop the first one's leading space."""
    before = [i for i in ids[:start] if i not in assets.plan.placeholders]
    both = assets.tokenizer.decode(before + ids[start:end], clean_up_tokenization_spaces=False)
    alone = assets.tokenizer.decode(before, clean_up_tokenization_spaces=False)
    if both.startswith(alone):
        return both[len(alone) :]
    return str(assets.tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False))
