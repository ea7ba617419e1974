"""Mistakes, one each, that the checks must find: broken cores, and mistakes of the shell.

The names are those of the rules' model where it has them; the letters are its counterexamples. Each
has a seed whose history shows it, and the property that breaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kept.replication.events import ManifestLost, ManifestOffered
from kept.replication.manifests import ManifestCore
from kept.replication.manifests_events import NoteManifest, StoreManifest
from kept.replication.partition_core import PartitionCore


class BrokenLeader(PartitionCore):
    """Its invariants are not asked: a property must show what is wrong."""

    def check_invariants(self) -> None:
        pass

    def counted(self, replica: int) -> bool:
        return replica in self.followers

    def _publish(self) -> Any:
        if self.offered is None:
            return ()
        for replica, follower in self.followers.items():
            if follower.held != self.offered and self.counted(replica):
                return ()
        return self._publish_held(self.offered)


class ConfirmedOnly(BrokenLeader):
    def counted(self, replica: int) -> bool:
        return replica in self.isr


class ShrinkCounted(BrokenLeader):
    def counted(self, replica: int) -> bool:
        return replica in (self.isr if self.pending_isr is None else self.pending_isr)


class ActsFirst(BrokenLeader):
    def counted(self, replica: int) -> bool:
        return False


class WaitsForAll(BrokenLeader):
    def counted(self, replica: int) -> bool:
        return True


class Unchecked(BrokenLeader):
    _publish = PartitionCore._publish


class AdmitsEarly(Unchecked):
    @property
    def all_published(self) -> bool:
        return True


class NoGate(AdmitsEarly):
    def _may_join(self, replica: int) -> bool:
        return replica in self.eligible


class HeldOnly(AdmitsEarly):
    def _may_join(self, replica: int) -> bool:
        held = self.followers[replica].held
        return replica in self.eligible and self.published == self.offered == held


class DoesNotSettle(AdmitsEarly):
    @property
    def all_published(self) -> bool:
        return self.published == self.offered


class AdmitsWhileLost(Unchecked):
    """Goes on admitting while the base that replaces what was offered is being made."""

    def step(self, event: Any, now_ms: int) -> Any:
        return () if isinstance(event, ManifestLost) else super().step(event, now_ms)


class ForgetsLives(AdmitsEarly):
    all_published = PartitionCore.all_published

    def fetched(self, replica_id, log_end_offset, now_ms, broker_epoch=-1):
        follower = self.followers[replica_id]
        held, applied = follower.held, follower.applied
        effects = super().fetched(replica_id, log_end_offset, now_ms, broker_epoch)
        follower.held, follower.applied = held, applied
        return effects


class MembersCut(AdmitsEarly):
    """Lets a replica cut its log that is proposed, or a member."""

    all_published = PartitionCore.all_published

    def pull_response(self, request: Any) -> Any:
        return self.manifests.pull_response(request, outside_isr=True)


class LackingEnters(AdmitsEarly):
    """Goes on counting what a replica said before it lacked a record."""

    all_published = PartitionCore.all_published

    def _manifest_acknowledged(self, event: Any) -> Any:
        lacks = event.generation is None and self.published is not None
        return () if lacks else super()._manifest_acknowledged(event)


class AnyLife(AdmitsEarly):
    """Counts what a replica says before it has fetched in this epoch: guards C11, C13 too."""

    all_published = PartitionCore.all_published

    def _manifest_acknowledged(self, event: Any) -> Any:
        if event.replica_id in self.followers:
            known = self.followers[event.replica_id].broker_epoch
            event = replace(event, broker_epoch=known)
        return super()._manifest_acknowledged(event)


class KnowsNoCommit(AnyLife):
    """The high watermark is not raised to the end of what is applied."""

    def commit_known(self, offset: int) -> Any:
        return ()


class Broken(ManifestCore):
    def check_invariants(self) -> None:
        pass


class CompleteOncePublished(Broken):
    def _is_complete(self, request: Any) -> bool:
        published, self.published = self.published, None
        try:
            return super()._is_complete(request)
        finally:
            self.published = published


class CompleteOfEarlierEpoch(Broken):
    def _is_complete(self, request: Any) -> bool:
        epoch = self.leader_epoch
        if self.held is not None:
            self.leader_epoch = self.held.leader_epoch
        try:
            return super()._is_complete(request)
        finally:
            self.leader_epoch = epoch


class CompleteBelowEnd(Broken):
    def _is_complete(self, request: Any) -> bool:
        return super()._is_complete(replace(request, log_end_offset=1 << 60))


class CompleteWithoutApplied(Broken):
    def _is_complete(self, request: Any) -> bool:
        return super()._is_complete(replace(request, applied=self.applied))


class Trusts(Broken):
    def _offer_if_known(self) -> Any:
        before = self.has_offered
        effects = super()._offer_if_known()
        if (
            self.has_offered
            and not before
            and self.held is not None
            and self.published != self.held
        ):
            self.published = self.held
            told = NoteManifest(ManifestOffered(self.held.generation, applied=True))
            return (told, *self._apply_next())
        return effects


class CleansFirst(Broken):
    @property
    def may_compute(self) -> bool:
        return self.has_offered and self.storing is None and self.applying is None


class TakesNewerOnly(Broken):
    def _accepts_held(self, offered: Any) -> bool:
        if offered is None:
            return False
        return self.held is None or offered.generation > self.held.generation


class KeepsLatePass(Broken):
    def _pass_done(self, event: Any) -> Any:
        if not self.has_offered or self.storing is not None or self.applying is not None:
            return ()
        self.storing = StoreManifest(event.manifest, None)
        return (self.storing,)


class BelowLogEnd(Broken):
    def start_pull(self, log_end_offset: int, broker_epoch: int = -1) -> Any:
        return super().start_pull(1 << 60, broker_epoch)


class BeforeTruncating(Broken):
    def start_pull(self, log_end_offset: int, broker_epoch: int = -1) -> Any:
        request = super().start_pull(log_end_offset, broker_epoch)
        if request is not None:
            self.in_flight = request = replace(request, synced=True)
        return request


class TellsWhatItApplied(Broken):
    def pull_response(self, request: Any, **given: Any) -> Any:
        published, self.published = self.published, self.applied
        try:
            return super().pull_response(request, **given)
        finally:
            self.published = published


class NoFence(Broken):
    def receive_pull(self, request: Any) -> Any:
        return super().receive_pull(replace(request, leader_epoch=self.leader_epoch))


class StoresLate(Broken):
    def _offer_if_known(self) -> Any:
        storing, self.storing = self.storing, None
        effects = super()._offer_if_known()
        self.storing = storing if self.storing is None else self.storing
        return effects

    def _stored(self, held: Any) -> Any:
        if self.has_offered and held is not None and held.leader_epoch != self.leader_epoch:
            self.storing, self.held = None, held
            return ()
        return super()._stored(held)


class ActsOnPersist(Broken):
    def _accepts_published(self, asked: Any, answer: Any) -> bool:
        return answer.held is not None and asked.synced

    def _receive_pull_response(self, event: Any) -> Any:
        answer = replace(event.response, published=event.response.held)
        return super()._receive_pull_response(replace(event, response=answer))


class GoesDown(Broken):
    def _pass_done(self, event: Any) -> Any:
        applied = self.applied
        if applied is not None and self.may_compute and event.based_on == applied:
            self.storing = StoreManifest(event.manifest, None)
            return (self.storing,)
        return super()._pass_done(event)


class KeepsHeld(Broken):
    def _offer_if_known(self) -> Any:
        self.unclean = False
        return super()._offer_if_known()


class TakesDamageForNothing(Broken):
    def _offer_if_known(self) -> Any:
        self.lost = False
        return super()._offer_if_known()


class SameName(Broken):
    """The base that replaces a lost manifest gets the name of any base."""

    def _offer_if_known(self) -> Any:
        self.replaces = None
        return super()._offer_if_known()


class BeginsAnewBesideOthers(Broken):
    def _damaged(self, event: Any) -> Any:
        return super()._damaged(replace(event, alone=True))


class NoBase(Broken):
    def _offer_if_known(self) -> Any:
        if self.unclean and not self.has_offered and self.storing is None and self.applying is None:
            self.held = self.applied = None
            self.unclean = False
        return super()._offer_if_known()


@dataclass(frozen=True)
class Planted:
    """``seed`` None: only a scenario shows it. ``breaks``: what a violation begins with."""

    breaks: str = ""
    seed: int | None = None
    replicas: int = 3
    unclean: bool = False
    tearing: bool = False
    decaying: bool = False
    policies: bool = False
    bugs: tuple[str, ...] = ()
    cores: dict[str, type] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """For :func:`tests.replication.manifests.history.play`."""
        return {
            "replicas": self.replicas,
            "unclean": self.unclean,
            "tearing": self.tearing,
            "decaying": self.decaying,
            "policies": self.policies,
            "bugs": frozenset(self.bugs),
            **self.cores,
        }


def leader(core: type, *bugs: str, **more: Any) -> Planted:
    return Planted(cores={"leader_core": core}, bugs=bugs, **more)


def manifests(core: type, *bugs: str, **more: Any) -> Planted:
    return Planted(cores={"manifest_core": core}, bugs=bugs, **more)


def shell(*bugs: str, **more: Any) -> Planted:
    return Planted(bugs=bugs, **more)


PLANTED: dict[str, Planted] = {
    "confirmed ISR only (C1)": leader(ConfirmedOnly, seed=214, breaks="L2"),
    "uncommitted shrink counted (C1)": leader(ShrinkCounted, seed=10, breaks="S5"),
    "act before publication (C2)": leader(ActsFirst, seed=24, breaks="S5"),
    "wait for every replica": leader(WaitsForAll, seed=1, breaks="L2"),
    "discard (C3)": shell("discard", seed=38, breaks="L2"),
    "admit early (C4)": leader(AdmitsEarly, seed=143, breaks="S1"),
    "trust (C5)": manifests(Trusts, seed=24, breaks="S5"),
    "clean first (C5)": manifests(CleansFirst, seed=7, breaks="BODY"),
    "checkpoint of held (C5)": manifests(CleansFirst, "checkpoint-of-held", seed=1, breaks="S1"),
    "no entry gate": leader(NoGate, seed=297, breaks="L2"),
    "held only (C16)": leader(HeldOnly, seed=602, breaks="S1"),
    "complete once published (C16)": manifests(CompleteOncePublished),
    "complete of an earlier epoch (C16)": manifests(CompleteOfEarlierEpoch),
    "complete below the end (C16)": manifests(CompleteBelowEnd),
    "complete without what was applied (C16)": manifests(CompleteWithoutApplied),
    "below LEO (C6)": manifests(BelowLogEnd, "below-leo", seed=957, breaks="S3"),
    "generation with batches (C7)": shell("generation-with-batches"),
    "dirty range (C8)": shell("dirty", seed=0, breaks="S3"),
    "difference (C8)": shell("difference", seed=0, breaks="L1"),
    "number only (C9)": shell("number-only", seed=6, breaks="S3"),
    "ordered (C9)": manifests(TakesNewerOnly, seed=26, breaks="L2"),
    "log end at the answer (C10)": manifests(BelowLogEnd, "late-end"),
    "b beyond HW": shell("beyond-hw", seed=3295, breaks="S2"),
    "late result of an old pass": manifests(KeepsLatePass),
    "last batch not kept": shell("last", seed=0, breaks="S2"),
    "apply before truncating (C11)": Planted(
        cores={"leader_core": AnyLife, "manifest_core": BeforeTruncating}
    ),
    "out of order": manifests(TellsWhatItApplied, seed=142, breaks="S5"),
    "own clock": shell("own-clock", seed=3, breaks="S3"),
    "mark before swap": shell("mark-first", seed=0, breaks="S3"),
    "descending swap (C12)": shell("descending", seed=5, breaks="S1"),
    "HW below b (C13)": leader(KnowsNoCommit),
    "apply on persist (C14)": manifests(ActsOnPersist, seed=5, breaks="S5"),
    "no epoch fence": manifests(NoFence),
    "acknowledge before durable": shell("volatile", seed=39, breaks="L2"),
    "elected while it stores": manifests(StoresLate, seed=45, breaks="L2"),
    "joins before it is said what is held": leader(DoesNotSettle, seed=2192, breaks="S5"),
    "another life's acknowledgement": leader(ForgetsLives),
    "held kept (C15a)": Planted(
        cores={"leader_core": Unchecked, "manifest_core": KeepsHeld},
        unclean=True,
        seed=75,
        breaks="L2",
    ),
    "no base generation (C15b)": manifests(NoBase, unclean=True, seed=4, breaks="L2"),
    "elected again, cleanly (C15c)": shell("forget-unclean", unclean=True, seed=20, breaks="L2"),
    "old checkpoint kept (C15d)": shell("base-clean", unclean=True, seed=5, breaks="S1"),
    "b going down (C15e)": manifests(GoesDown, "b-down", unclean=True, seed=5, breaks="L2"),
    "cut unasked (C17)": shell("cut-unasked", decaying=True, seed=1, breaks="S2"),
    "members cut (C17)": leader(MembersCut, decaying=True, seed=1, breaks="S5"),
    "lacking enters (C17)": leader(LackingEnters, decaying=True, seed=1775, breaks="S5"),
    "admits while it is lost": leader(AdmitsWhileLost, tearing=True),
    "a base of the same name": manifests(SameName, tearing=True, seed=121, breaks="BODY"),
    "begins anew beside others": manifests(
        BeginsAnewBesideOthers, tearing=True, seed=9, breaks="S2"
    ),
    "policy forgotten": shell("forget-policy", unclean=True, policies=True, seed=3, breaks="L2"),
    "damage taken for nothing held": manifests(
        TakesDamageForNothing, tearing=True, seed=24, breaks="L2"
    ),
    "missing survivors ignored": shell("ignore-missing", unclean=True, seed=35, breaks="S3"),
}
