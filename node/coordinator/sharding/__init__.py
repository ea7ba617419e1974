"""What coordinators share whose state is kept in an internal topic, one core per partition.

=======================  ==========================================================================
:mod:`.core`             the shape of a core
:mod:`.events`           events and effects that every such core has
=======================  ==========================================================================
"""
