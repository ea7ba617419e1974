"""Mistakes, one each, that the checks must find: broken cores, and mistakes of the shell.

The names are those of the rules' model where it has them; the letters are its counterexamples. Each
has a seed whose history shows it, and the property that breaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kept.replication.events import ManifestOffered, ManifestPublished
from kept.replication.leader import LeaderCore
from kept.replication.manifests import ManifestCore, Role
from kept.replication.manifests_events import Store, Tell


class BrokenLeader(LeaderCore):
    """Its invariants are not asked: a property must show what is wrong."""

    def check_invariants(self) -> None:
        pass

    def counted(self, replica: int) -> bool:
        raise NotImplementedError

    def _publish(self) -> Any:
        if self.offered is None:
            return ()
        for replica, follower in self.followers.items():
            if follower.held != self.offered and self.counted(replica):
                return ()
        self.published = self.offered
        return (ManifestPublished(self.offered),)


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


class AdmitsEarly(BrokenLeader):
    _publish = LeaderCore._publish

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


class ForgetsLives(AdmitsEarly):
    all_published = LeaderCore.all_published

    def fetched(self, replica_id, log_end_offset, now_ms, broker_epoch=-1):
        follower = self.followers[replica_id]
        held, applied = follower.held, follower.applied
        effects = super().fetched(replica_id, log_end_offset, now_ms, broker_epoch)
        follower.held, follower.applied = held, applied
        return effects


class AnyLife(AdmitsEarly):
    """Counts what a replica says before it has fetched in this epoch: guards C11, C13 too."""

    all_published = LeaderCore.all_published

    def _manifest(self, event: Any) -> Any:
        if not isinstance(event, ManifestOffered) and event.replica_id in self.followers:
            known = self.followers[event.replica_id].broker_epoch
            event = replace(event, broker_epoch=known)
        return super()._manifest(event)


class Broken(ManifestCore):
    def check_invariants(self) -> None:
        pass


class Trusts(Broken):
    def _settle(self, now_ms: int) -> Any:
        before = self.settled
        effects = super()._settle(now_ms)
        if self.settled and not before and self.held is not None and self.published != self.held:
            self.published = self.held
            told = Tell(ManifestOffered(self.held.identity, now_ms, applied=True))
            return (told, *self._apply_next())
        return effects


class CleansFirst(Broken):
    @property
    def may_compute(self) -> bool:
        return self.settled and self.storing is None and self.applying is None


class TakesNewerOnly(Broken):
    def _takes(self, offered: Any) -> bool:
        if offered is None:
            return False
        return self.held is None or offered.identity > self.held.identity


class KeepsLatePass(Broken):
    def _pass_done(self, event: Any) -> Any:
        if not self.settled or self.storing is not None or self.applying is not None:
            return ()
        self.storing = Store(event.manifest, None)
        return (self.storing,)


class BelowLogEnd(Broken):
    def pull(self, log_end_offset: int, broker_epoch: int = -1) -> Any:
        return super().pull(1 << 60, broker_epoch)


class BeforeTruncating(Broken):
    def pull(self, log_end_offset: int, broker_epoch: int = -1) -> Any:
        request = super().pull(log_end_offset, broker_epoch)
        if request is not None:
            self.asked = request = replace(request, synced=True)
        return request


class TellsWhatItApplied(Broken):
    def answer(self, request: Any) -> Any:
        published, self.published = self.published, self.applied
        try:
            return super().answer(request)
        finally:
            self.published = published


class NoFence(Broken):
    def heard(self, request: Any) -> Any:
        return super().heard(replace(request, leader_epoch=self.leader_epoch))


class HearsLate(Broken):
    def _begin(self, role: Role, leader_epoch: int) -> Any:
        asked, missing = self.asked, self.missing
        effects = super()._begin(role, leader_epoch)
        if role is Role.FOLLOWER and missing is None:
            self.asked = asked
        return effects


class StoresLate(Broken):
    def _settle(self, now_ms: int) -> Any:
        storing, self.storing = self.storing, None
        effects = super()._settle(now_ms)
        self.storing = storing if self.storing is None else self.storing
        return effects

    def _stored(self, held: Any, now_ms: int) -> Any:
        if self.settled and held is not None and held.leader_epoch != self.leader_epoch:
            self.storing, self.held = None, held
            return ()
        return super()._stored(held, now_ms)


class ActsOnPersist(Broken):
    def _counts(self, asked: Any, answer: Any) -> bool:
        return answer.held is not None and asked.synced

    def _pulled(self, event: Any) -> Any:
        answer = replace(event.answer, published=event.answer.held)
        return super()._pulled(replace(event, answer=answer))


class GoesDown(Broken):
    def _pass_done(self, event: Any) -> Any:
        applied = self.applied
        if applied is not None and self.may_compute and event.based_on == applied:
            self.storing = Store(event.manifest, None)
            return (self.storing,)
        return super()._pass_done(event)


class KeepsHeld(Broken):
    def _settle(self, now_ms: int) -> Any:
        self.unclean = False
        return super()._settle(now_ms)


class NoBase(Broken):
    def _settle(self, now_ms: int) -> Any:
        if self.unclean and not self.settled and self.storing is None and self.applying is None:
            self.held = self.applied = None
            self.unclean = False
        return super()._settle(now_ms)


class MarksAfterCut(Broken):
    def _applied(self, manifest: Any, now_ms: int) -> Any:
        self.cut_to = 1 << 60
        return super()._applied(manifest, now_ms)


class KeepsMark(Broken):
    def _cut(self, log_end_offset: int) -> Any:
        applied = self.applied
        effects = super()._cut(log_end_offset)
        self.applied = applied
        return effects


@dataclass(frozen=True)
class Planted:
    """``seed`` None: only a scenario shows it. ``breaks``: what a violation begins with."""

    breaks: str = ""
    seed: int | None = None
    replicas: int = 3
    unclean: bool = False
    bugs: tuple[str, ...] = ()
    cores: dict[str, type] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """For :func:`tests.replication.manifests.history.play`."""
        return {
            "replicas": self.replicas, "unclean": self.unclean, "bugs": frozenset(self.bugs),
            **self.cores,
        }  # fmt: skip


def leader(core: type, *bugs: str, **more: Any) -> Planted:
    return Planted(cores={"leader_core": core}, bugs=bugs, **more)


def manifests(core: type, *bugs: str, **more: Any) -> Planted:
    return Planted(cores={"manifest_core": core}, bugs=bugs, **more)


def shell(*bugs: str, **more: Any) -> Planted:
    return Planted(bugs=bugs, **more)


PLANTED: dict[str, Planted] = {
    "confirmed ISR only (C1)": leader(ConfirmedOnly),
    "uncommitted shrink counted (C1)": leader(ShrinkCounted),
    "act before publication (C2)": leader(ActsFirst),
    "wait for every replica": leader(WaitsForAll),
    "discard (C3)": shell("discard"),
    "admit early (C4)": leader(AdmitsEarly),
    "trust (C5)": manifests(Trusts),
    "clean first (C5)": manifests(CleansFirst),
    "checkpoint of held (C5)": manifests(CleansFirst, "checkpoint-of-held"),
    "no entry gate": leader(NoGate),
    "held only": leader(HeldOnly),
    "below LEO (C6)": manifests(BelowLogEnd, "below-leo"),
    "adopt (C7)": shell("adopt"),
    "dirty range (C8)": shell("dirty"),
    "difference (C8)": shell("difference"),
    "number only (C9)": shell("number-only"),
    "ordered (C9)": manifests(TakesNewerOnly),
    "log end at the answer (C10)": manifests(BelowLogEnd, "late-end"),
    "b beyond HW": shell("beyond-hw"),
    "late result of an old pass": manifests(KeepsLatePass),
    "last batch not kept": shell("last"),
    "apply before truncating (C11)": Planted(
        cores={"leader_core": AnyLife, "manifest_core": BeforeTruncating}
    ),
    "out of order": manifests(TellsWhatItApplied),
    "own clock": shell("own-clock"),
    "mark before swap": shell("mark-first"),
    "descending swap (C12)": shell("descending"),
    "HW below b (C13)": leader(AnyLife, "hw"),
    "apply on persist (C14)": manifests(ActsOnPersist),
    "no epoch fence": manifests(NoFence, "no-fence"),
    "acknowledge before durable": shell("volatile"),
    "answers of another epoch": manifests(HearsLate),
    "elected while it stores": manifests(StoresLate),
    "joins before it is said what is held": leader(DoesNotSettle),
    "another life's acknowledgement": leader(ForgetsLives),
    "held kept (C15a)": manifests(KeepsHeld, unclean=True),
    "no base generation (C15b)": manifests(NoBase, unclean=True),
    "elected again, cleanly (C15c)": shell("forget-unclean", unclean=True),
    "old checkpoint kept (C15d)": shell("base-clean", unclean=True),
    "b going down (C15e)": manifests(GoesDown, "b-down", unclean=True),
    "missing survivors ignored": shell("ignore-missing", unclean=True),
    "mark after a cut": manifests(MarksAfterCut, unclean=True),
    "mark kept": manifests(KeepsMark, unclean=True),
}
