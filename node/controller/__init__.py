"""The active controller: metadata decisions in order, broker sessions, changes of the quorum."""
