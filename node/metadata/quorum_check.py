"""``controller.quorum.voters`` of a start compared with who votes, by the metadata log (rule 34).

After the first start the log's voters count, so a list may be old: voters come and go, and that is
told and no more. What is refused is a list that names a node of another cluster in place of a
voter: whoever wrote it believes that both are one, and each would take writes for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.node.runtime.logging import log
from kept.node.runtime.tasks import gather_or_cancel
from kept.storage.errors import ConfigurationError, NetworkException

if TYPE_CHECKING:
    from kept.node.config.listeners import ConfiguredVoter
    from kept.node.internode.peers import Peers


async def check_voters(
    peers: Peers, cluster_id: str, listed: tuple[ConfiguredVoter, ...], vote: set[int]
) -> None:
    """Say so where the list is not ``vote``, the ids of those who vote. Raises ConfigurationError
    with what would be right when one who is listed and does not vote belongs to another cluster.

    Only who answers is judged: the others are asked the same when they start.
    """
    strangers = [voter for voter in listed if voter.node_id not in vote]
    if not strangers and len(listed) == len(vote):
        return
    clusters = await gather_or_cancel(_cluster_of(peers, voter) for voter in strangers)
    for voter, other in zip(strangers, clusters, strict=True):
        if other not in ("", cluster_id):
            raise ConfigurationError(
                f"controller.quorum.voters names {voter}, which belongs to cluster {other}; this "
                f"node belongs to cluster {cluster_id}, whose voters are "
                f"{','.join(map(str, peers.voters))}: correct controller.quorum.voters, or start "
                "the one that is wrong with empty directories"
            )
    log.warning(
        "controller.quorum.voters differs from the voters of the cluster, which count: correct it",
        listed=",".join(str(voter.node_id) for voter in sorted(listed)),
        voters=",".join(map(str, sorted(vote))),
    )


async def _cluster_of(peers: Peers, voter: ConfiguredVoter) -> str:
    try:
        hello = await peers.identify(voter.host, voter.port)
    except NetworkException:
        return ""
    return hello.cluster_id
