"""The codec of the hot path: Produce and Fetch, parsed in place and written by hand.

kio serves every other API; here a request costs a microsecond or two, and no object per record
exists. The tests hold each version against kio's own reader and writer.
"""
