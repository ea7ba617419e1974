"""How slow work on manifests ends when it does not succeed."""

from __future__ import annotations

from kept.storage.errors import DETAILS_IN_LOG, KeptError


class Withdrawn(KeptError):
    """What was to be put into place is not wanted any more, and was taken back."""


class ManifestUnreadable(KeptError):
    """The file of a manifest that this replica has is damaged, or gone."""

    @property
    def client_message(self) -> str:
        """See :attr:`KeptError.client_message`."""
        return f"a manifest cannot be read{DETAILS_IN_LOG}"


class PassFailed(KeptError):
    """A worker said that its work failed. ``kind`` is the class of the error there; ``offset`` of
    the record, or ``missing`` the path of the file, that is not there, where that is the reason.
    ``client_message`` is what clients may know of it.
    """

    def __init__(
        self,
        message: str,
        kind: str,
        offset: int | None = None,
        *,
        client_message: str = "",
        missing: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.offset = offset
        self.missing = missing
        self._client_message = client_message or f"the pass failed ({kind}){DETAILS_IN_LOG}"

    @property
    def client_message(self) -> str:
        """See :attr:`KeptError.client_message`."""
        return self._client_message


def check_stopped(error: BaseException) -> bool:
    """The check of a pass found it wrong: nothing is tried again before somebody has looked.

    The error comes from a worker, or from a thread of this process.
    """
    kind = error.kind if isinstance(error, PassFailed) else type(error).__name__
    return kind == "CheckFailed"


def missing_offset(error: BaseException) -> int | None:
    """The record that is missing, where that is why a build failed (here, or in a worker)."""
    from kept.compaction.manifest.follow import LogsDiffer

    return error.offset if isinstance(error, PassFailed | LogsDiffer) else None
