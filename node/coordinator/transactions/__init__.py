"""The transaction coordinator: transactional ids, kept in ``__transaction_state``.

=========================  ========================================================================
:mod:`.records`            Kafka's record formats: what the log keeps of a transactional id
:mod:`.transaction`        the transitions of one id, each a new frozen value
:mod:`.requests`           what a request does to one id, as a function of its state
:mod:`.events`             what happens to a core, what it wants done, what it answers
:mod:`.transactional_id`   what a core holds of one id, and of a pending append
:mod:`.connections`        which connection of a producer is its newest
:mod:`.id_pattern`         which ids a list is of, in a time that is bounded
:mod:`.core`               the state machine of one partition: ``step(event) -> effects``
:mod:`.markers`            which markers go to which node, and what their answers mean
:mod:`.coordinator`        the coordinator of a node: what its shards do besides
:mod:`.marker_channel`     the shell of markers: WriteTxnMarkers to leaders
:mod:`.verifier`           a leader asks whether a partition is in a transaction
=========================  ========================================================================

The behavior is that of Apache Kafka 4.3 (``TransactionCoordinator``, ``TransactionStateManager``,
``TransactionMarkerChannelManager``); each module says where we differ.
"""
