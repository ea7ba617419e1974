"""The proof that this node knew who leads: asked once for all who wait, answered by a majority."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kept.node.internode.controller_rpc import ConfirmReply, ConfirmRequest
from kept.node.metadata.leadership_barrier import LeadershipBarrier
from kept.node.metadata.node_identity import NodeIdentity
from kept.storage.errors import NetworkException, NotController, StaleBrokerEpoch
from tests.support.given import Given


class Controller:
    """Answers when it is told to; the node acts on index 9 when it is told to."""

    def __init__(self) -> None:
        self.asked: list[ConfirmRequest] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.acted = asyncio.Event()

    async def call(self, controller: int, method: str, request: ConfirmRequest, _: float) -> Any:
        assert (controller, method) == (2, "Confirm")
        self.asked.append(request)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def act(self, index: int) -> None:
        assert index == 9
        await self.acted.wait()


def play(scene, leader_id=2):
    async def whole() -> None:
        controller = Controller()
        heard: list[Any] = []
        leadership_barrier = LeadershipBarrier(
            runtime=Given(loop=asyncio.get_running_loop()),
            metadata=Given(leader_id=leader_id, acted=controller.act),
            identity=NodeIdentity(1, broker_epoch=7),
            peers=Given(call=controller.call),
            alone=False,
        )
        async with asyncio.timeout(60):
            await scene(leadership_barrier, controller, heard)
        await leadership_barrier.close()

    asyncio.run(whole())


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_who_asks_while_a_question_is_under_way_gets_the_next_one():
    async def scene(leadership_barrier, controller, heard):
        controller.acted.set()
        leadership_barrier.confirm(lambda found: heard.append(("first", found)))
        leadership_barrier.confirm(lambda found: heard.append(("with it", found)))
        await turns()
        leadership_barrier.confirm(lambda found: heard.append(("later", found)))
        controller.answers.put_nowait(ConfirmReply(9))
        await turns()
        assert heard == [("first", True), ("with it", True)]
        controller.answers.put_nowait(ConfirmReply(9))
        await turns()
        assert heard[2:] == [("later", True)]
        assert controller.asked == [ConfirmRequest(1, 7)] * 2
        leadership_barrier.confirm(lambda found: heard.append(("again", found)))
        controller.answers.put_nowait(ConfirmReply(9))
        await turns()
        assert heard[3:] == [("again", True)]

    play(scene)


def test_one_who_fails_keeps_the_answer_from_nobody(capsys):
    async def scene(leadership_barrier, controller, heard):
        def fail(_):
            raise KeyError("a bug of ours")

        controller.acted.set()
        leadership_barrier.confirm(fail)
        leadership_barrier.confirm(heard.append)
        controller.answers.put_nowait(ConfirmReply(9))
        await turns()
        assert heard == [True]
        assert "a bug of ours" in capsys.readouterr().err

    play(scene)


def test_an_answer_counts_when_it_was_acted_on():
    async def scene(leadership_barrier, controller, heard):
        leadership_barrier.confirm(heard.append)
        controller.answers.put_nowait(ConfirmReply(9))
        await turns()
        assert heard == []
        controller.acted.set()
        await turns()
        assert heard == [True]

    play(scene)


@pytest.mark.parametrize(
    "error", [NotController("no"), NetworkException("gone"), StaleBrokerEpoch("another")]
)
def test_nobody_who_can_say(error):
    async def scene(leadership_barrier, controller, heard):
        leadership_barrier.confirm(heard.append)
        controller.answers.put_nowait(error)
        await turns()
        assert heard == [False]

    play(scene)


def test_no_controller_is_known():
    async def scene(leadership_barrier, _controller, heard):
        leadership_barrier.confirm(heard.append)
        await turns()
        assert heard == [False]

    play(scene, leader_id=None)
