"""Brokers that went away a moment ago."""

from __future__ import annotations

from uuid import UUID

import pytest

from kept.cluster.metadata.image import BrokerImage, Image
from kept.node.metadata.failure_suspicions import LINGER_S, SUSPICION_S, FailureSuspicions


def image(epoch=7, *, fenced=False):
    return Image(brokers={1: BrokerImage(1, epoch, UUID(int=1), (), None, fenced)})


NOBODY = Image()


@pytest.fixture
def suspecting():
    made = FailureSuspicions()
    made.suspect(1, image(), 100.0)
    return made


def test_it_is_doubted_until_the_time_is_over(suspecting):
    assert suspecting.is_suspected(1, image(), 100.0 + SUSPICION_S - 0.01)
    assert not suspecting.is_suspected(1, image(), 100.0 + SUSPICION_S)
    assert not suspecting.is_suspected(1, image(), 100.0)


def test_a_new_process_is_not_doubted(suspecting):
    assert not suspecting.is_suspected(1, image(epoch=8), 100.1)


def test_one_that_answers_is_believed(suspecting):
    suspecting.clear(1)
    assert not suspecting.is_suspected(1, image(), 100.1)


def test_others_are_not_doubted(suspecting):
    assert not suspecting.is_suspected(2, image(), 100.1)
    assert not suspecting.is_suspected(1, NOBODY, 100.1)


@pytest.mark.parametrize("known", [image(fenced=True), NOBODY])
def test_of_whom_the_image_says_it_there_is_no_doubt(known):
    made = FailureSuspicions()
    made.suspect(1, known, 100.0)
    assert not made.is_suspected(1, image(), 100.0)


def test_one_that_was_fenced_lingers_for_a_while():
    made = FailureSuspicions()
    made.image_changed(image(), 100.0)
    assert not made.recently_fenced(1, 100.0)
    made.image_changed(image(fenced=True), 101.0)
    made.image_changed(image(fenced=True), 103.0)
    assert made.recently_fenced(1, 101.0 + LINGER_S - 0.01)
    assert not made.recently_fenced(1, 101.0 + LINGER_S)


def test_one_that_was_fenced_before_this_node_looked_does_not():
    made = FailureSuspicions()
    made.image_changed(image(fenced=True), 100.0)
    assert not made.recently_fenced(1, 100.0)


def test_one_that_came_back_and_went_again():
    made = FailureSuspicions()
    for at, fenced in ((100.0, False), (101.0, True), (102.0, False)):
        made.image_changed(image(fenced=fenced), at)
    assert not made.recently_fenced(1, 102.0)
    made.image_changed(image(fenced=True), 104.0)
    assert made.recently_fenced(1, 104.0 + LINGER_S - 0.01)
