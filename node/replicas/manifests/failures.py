"""How slow work on manifests ends when it does not succeed."""

from __future__ import annotations

from kept.storage.errors import KeptError


class Withdrawn(KeptError):
    """What was to be put into place is not wanted any more, and was taken back."""


class ManifestUnreadable(KeptError):
    """The file of a manifest that this replica has is damaged, or gone."""


class PassFailed(KeptError):
    """A worker said that its work failed. ``kind`` is the class of the error there; ``offset`` of
    the record that is missing, where that is the reason.
    """

    def __init__(self, message: str, kind: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.offset = offset


def check_stopped(error: BaseException) -> bool:
    """The check of a pass found it wrong: nothing is tried again before somebody has looked.

    The error comes from a worker, or from a thread of this process.
    """
    kind = error.kind if isinstance(error, PassFailed) else type(error).__name__
    return kind == "CheckFailed"
