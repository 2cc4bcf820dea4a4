"""What all ranks do, or one of them for all: when it fails on any, every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from llava_mcore.errors import FileError, LlavaMcoreError, os_error_text, problems
from llava_mcore.parallel.groups import Groups, agree


def together[T](groups: Groups, action: Callable[[], T]) -> T:
    """Do the same on all ranks; a collective call.

    Raises:
        LlavaMcoreError: on all ranks, if any rank's action raised one, of its kind; FileError for an OSError.
    """
    result: list[T] = []
    problem, kind = None, LlavaMcoreError
    try:
        result.append(action())
    except LlavaMcoreError as error:
        problem, kind = str(error), type(error)
    except OSError as error:
        problem, kind = os_error_text(error), FileError
    found = agree(groups, problem)
    if not found:
        return result[0]
    texts = list(dict.fromkeys(text.partition(": ")[2] for text in found))
    raise kind(texts[0] if len(texts) == 1 else problems("the run cannot start", found), on_all_ranks=True)


def raise_on_all_ranks(groups: Groups, problem: str | None) -> None:
    """Raise FileError on all ranks if any has met a problem with its files; a collective call."""
    found = agree(groups, problem)
    if found:
        raise FileError(found[0] if len(found) == 1 else problems("files cannot be written", found), on_all_ranks=True)


def on_first_rank(groups: Groups, action: Callable[[], None]) -> None:
    """Do something on rank 0 only; a collective call, which raises on all ranks as `together` does."""
    together(groups, lambda: action() if groups.rank == 0 else None)


def decided_by_first_rank[T](groups: Groups, action: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result: storage may look different elsewhere for a while."""
    box = [together(groups, lambda: action() if groups.rank == 0 else None)]
    dist.broadcast_object_list(box, src=0, group=groups.control)
    assert box[0] is not None
    return box[0]
