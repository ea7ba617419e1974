"""A waiting fetch is woken once for all that one turn of the loop has written."""

from __future__ import annotations

from tests.support.request_values import fetch_values, one_batch, produce_values

PARTITIONS = 5


def test_what_one_request_wrote_comes_in_one_response(wire, kept_broker, connect):
    topic = kept_broker.create_topic(partitions=PARTITIONS)
    values = fetch_values(topic, 0, max_wait=200_000)
    one = values["topics"][0]["partitions"][0]
    values["topics"][0]["partitions"] = [{**one, "partition": i} for i in range(PARTITIONS)]
    sent = wire.send(1, 11, **values)
    other = connect(kept_broker.port())
    other.ask(3, 12, topics=[{"name": topic, "topic_id": None}])  # by now the fetch waits

    batch = one_batch(1, 100)
    request = produce_values(topic, batch)
    data = request["topic_data"][0]["partition_data"][0]
    request["topic_data"][0]["partition_data"] = [{**data, "index": i} for i in range(PARTITIONS)]
    answers = other.ask(0, 9, **request).responses[0].partition_responses
    assert [int(answer.error_code) for answer in answers] == [0] * PARTITIONS

    correlation_id, response = wire.response(1, 11)
    assert correlation_id == sent
    found = [len(bytes(p.records)) for p in response.responses[0].partitions]
    assert found == [len(batch)] * PARTITIONS
