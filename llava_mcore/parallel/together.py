"""Actions of all ranks, or of one rank for all: if any rank fails, every rank raises the same error."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch.distributed as dist

from llava_mcore.errors import CheckpointError, FileError, LlavaMcoreError, os_error_text, problems
from llava_mcore.parallel.agreement import agree, agree_in_time
from llava_mcore.parallel.groups import Groups

PATIENCE = datetime.timedelta(seconds=20)
"""How long a rank that has failed waits for the others before it ends alone, and the run with it."""


def raise_together[T](groups: Groups, action: Callable[[], T]) -> T:
    """Do the same on all ranks; a collective call.

    Collective calls of the action may leave ranks waiting for one that has failed before them: it tells its problem
    within a second, and raises it alone after `PATIENCE`.

    Raises:
        LlavaMcoreError: on all ranks, if any rank's action raised one, of its kind; FileError for an OSError.
    """
    result, problem, kind = _attempt(action)
    messages = agree_in_time(groups, problem, PATIENCE)
    if messages is None:
        raise kind(f"rank {groups.rank}: {problem}\nThe other ranks were still busy, or waiting for this one.")
    if not messages:
        return result[0]
    texts = list(dict.fromkeys(text.partition(": ")[2] for text in messages))
    raise kind(texts[0] if len(texts) == 1 else problems("the run cannot start", messages), on_all_ranks=True)


def raise_together_in_world[T](action: Callable[[], T]) -> T:
    """Like `raise_together`, for callers without groups: in torch.distributed's whole world, whatever it uses.

    Raises:
        CheckpointError: on all ranks, if any rank's action raised an error of ours or of the operating system. None may
            wait in a collective call that others do not reach.
    """
    result, problem, _ = _attempt(action)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    texts = dict.fromkeys(text for text in everyone if text is not None)
    if texts:
        raise CheckpointError("\n".join(texts), on_all_ranks=True)
    return result[0]


def _attempt[T](action: Callable[[], T]) -> tuple[list[T], str | None, type[LlavaMcoreError]]:
    """Return the result of an action, or an empty list with the text and kind of its error."""
    try:
        return [action()], None, LlavaMcoreError
    except LlavaMcoreError as error:
        return [], str(error), type(error)
    except OSError as error:
        return [], os_error_text(error), FileError


def raise_listed(groups: Groups, problem: str | None, kind: type[LlavaMcoreError], title: str) -> None:
    """Raise an error on all ranks that lists the problems of all of them, if any rank has one; a collective call.

    Unlike `raise_together` it waits for every rank: none may be waiting elsewhere for one that has failed.
    """
    messages = agree(groups, problem)
    if messages:
        raise kind(problems(title, messages), on_all_ranks=True)


def raise_on_all_ranks(groups: Groups, problem: str | None) -> None:
    """Raise FileError on all ranks if any has met a problem with its files; a collective call."""
    messages = agree(groups, problem)
    if messages:
        raise FileError(
            messages[0] if len(messages) == 1 else problems("files cannot be written", messages), on_all_ranks=True
        )


def on_first_rank(groups: Groups, action: Callable[[], None]) -> None:
    """Do something on rank 0 only; a collective call, which raises on all ranks as `raise_together` does."""
    raise_together(groups, lambda: action() if groups.rank == 0 else None)


def decided_by_first_rank[T](groups: Groups, action: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result: storage may look different elsewhere for a while."""
    box = [raise_together(groups, lambda: action() if groups.rank == 0 else None)]
    dist.broadcast_object_list(box, src=0, group=groups.control)
    assert box[0] is not None
    return box[0]
