"""DescribeUserScramCredentials and AlterUserScramCredentials."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kept.client.protocol.messages import Values
from kept.client.security.scram import stored_keys
from kept.cluster.controller import scram_changes
from kept.cluster.controller.scram_changes import Deletion, Upsertion
from kept.cluster.metadata.image import Image
from kept.cluster.security.credentials import ScramCredential, ScramMechanism
from kept.node.runtime.error_codes import error_values
from kept.node.runtime.time_slices import Pace
from kept.storage.errors import KeptError, UnsupportedVersion

if TYPE_CHECKING:
    from kept.node.kafka.api import RequestContext
    from kept.node.kafka.metadata_changes import Decided, MetadataChanges
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.steps import Steps


@dataclass(frozen=True, slots=True)
class ScramCredentialsHandler:
    """Who has a password, and new ones."""

    metadata: MetadataLog
    metadata_changes: MetadataChanges

    def describe_user_scram_credentials(self, _ctx: RequestContext, request: Any) -> Steps[Values]:
        """DescribeUserScramCredentials v0: mechanisms and iterations; of everybody where nobody is
        named.
        """
        users = [user.name for user in request.users or ()]
        results = []
        described = yield from scram_changes.describe_credentials(self.metadata.image, users)
        for user, known in described.items():
            yield
            error = known if isinstance(known, KeptError) else None
            credentials = () if isinstance(known, KeptError) else known
            infos = [{"mechanism": number, "iterations": count} for number, count in credentials]
            results.append({"user": user, **_error(error), "credential_infos": infos})
        return {**_error(None), "results": results}

    async def alter_user_scram_credentials(self, _ctx: RequestContext, request: Any) -> Values:
        """AlterUserScramCredentials v0: each user is altered or refused by himself."""
        pace = Pace()
        changes: list[Deletion | Upsertion] = [
            Deletion(each.name, each.mechanism) for each in request.deletions
        ]
        for each in request.upsertions:
            changes.append(_upsertion(each))
            await pace.checkpoint()

        def decision(image: Image) -> Steps[Decided[dict[str, KeptError | None]]]:
            self.metadata_changes.check_security(image)
            altered = yield from scram_changes.alter_credentials(image, changes)
            records = scram_changes.with_decoys(image, altered.records, secrets.token_bytes)
            return dict(altered.errors), records

        try:
            errors = await self.metadata_changes.decide(decision)
        except UnsupportedVersion as error:
            errors = dict.fromkeys((change.user for change in changes), error)
        results = []
        for user, why in errors.items():
            results.append({"user": user, **error_values(why)})
            await pace.checkpoint()
        return {"results": results}


def _error(error: KeptError | None) -> Values:
    """Kafka's message where there is no error is empty, not null."""
    values = error_values(error)
    return values if error is not None else {**values, "error_message": ""}


def _upsertion(asked: Any) -> Upsertion:
    try:
        mechanism = ScramMechanism(asked.mechanism)
    except ValueError:
        return Upsertion(asked.name, asked.mechanism, None)
    if not asked.salted_password or mechanism is ScramMechanism.UNKNOWN:
        return Upsertion(asked.name, asked.mechanism, None)
    keys = stored_keys(mechanism.text, asked.salted_password)
    credential = ScramCredential(asked.salt, *keys, asked.iterations)
    return Upsertion(asked.name, asked.mechanism, credential)
