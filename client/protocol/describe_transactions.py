"""The response to DescribeTransactions with its start as a number, in ms: kio reads and writes a
moment there, and refuses the -1 of an id that has no transaction.

kio wants annotations that are evaluated.
"""

from dataclasses import dataclass, field

from kio.schema.describe_transactions.v0 import response as kio_response
from kio.static.primitive import i64


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionState(kio_response.TransactionState):
    """A transactional id; its start is -1 where no transaction has begun."""

    transaction_start_time: i64 = field(  # type: ignore[assignment]
        metadata={"kafka_type": "int64"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeTransactionsResponse(kio_response.DescribeTransactionsResponse):
    """The response."""

    transaction_states: tuple[TransactionState, ...]
