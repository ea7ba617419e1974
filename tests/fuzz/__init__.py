"""A node in this process, and damaged input for everything that reads what strangers send.

``make fuzz MINUTES=n`` (``python -m tests.fuzz``) attacks it by frames, handshakes of TLS and SASL,
SCRAM messages, access tokens, HTTP/1 and HTTP/2, and by what nodes say to each other, and feeds
damaged properties, rules, keys and certificates to what parses them. Meanwhile other connections
must be served, memory must stay where it was, and no exception may get out
(:mod:`tests.fuzz.oracle`).

What is sent follows from the seed, the target and the attempt's number, so that one line repeats
it: ``python -m tests.fuzz --seed 7 --target http --attempt 41``. What TLS and SCRAM make up by
themselves (keys, nonces) is another time by time; where they are damaged is not.
"""
