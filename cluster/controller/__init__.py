"""The controller: pure functions that turn an image and a request into the records of one proposal
(``topics``, ``config_changes``, ``brokers``, ``partition_election``, ``unclean_recovery``,
``reassignment``), and the sessions of brokers (``broker_sessions``).
"""
