# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The built-in strategies in C, GIL released for a whole chunk, and records as objects for a user's
own. ``rule_map.py`` is the specification: the same classes in plain Python, under the same tests.
"""

from array import array

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from compaction.kernels._chunk cimport (
    HEADER, SPECIAL, Watched, Words, as_array, attach, frame, kept_prefetch, kept_scale,
    kept_siphash128, kept_table_free, kept_table_new, note, push,
)
from storage.records._wire cimport RecordSpan, be32, be64, read_record, read_varint32

from kept.storage.records import Record

KERNEL = "cython"

cdef enum:
    BLOCK = 128  # keys hashed, and their slots prefetched, before the first of them is looked at
    # kept.compaction.strategy.RuleKind
    LATEST = 0
    LATEST_N = 1
    TIMESTAMP = 2
    VERSION = 3
    # Words of a slot: two of the key's hash, `value` (0: free), what the kind needs.
    VALUE = 2
    EXTRA = 3
    MAX_WORDS = 6
    MAX_DIGITS = 40
    LIMB = 18  # decimal digits in a word of a version

cdef uint64_t CLASSES = <uint64_t>1 << 32
cdef uint64_t SIGN = <uint64_t>1 << 63
cdef uint64_t LIMB_VALUE = 1000000000000000000

cdef struct Rule:
    const uint8_t *prefix
    size_t prefix_length
    int kind
    uint64_t n
    const uint8_t *header
    int32_t header_length

cdef struct Item:
    uint64_t low
    uint64_t high
    int64_t offset
    uint64_t version[3]
    const Rule *rule
    bint tombstone


cdef class RuleMap:
    cdef uint64_t *table
    cdef size_t table_bytes
    cdef uint64_t k0, k1
    cdef readonly uint64_t slots, capacity, size, low, high
    cdef readonly bint full
    cdef readonly int words
    cdef Rule *rules
    cdef int rule_count
    cdef object kept_alive

    def __cinit__(self, uint64_t slots, double load_factor, bytes key not None, rules, int words):
        if len(key) != 16:
            raise ValueError("the hash key has 16 bytes")
        if not EXTRA <= words <= MAX_WORDS:
            raise ValueError("a slot has 3 to 6 words")
        memcpy(&self.k0, PyBytes_AsString(key), 8)
        memcpy(&self.k1, PyBytes_AsString(key) + 8, 8)
        self.slots = slots
        self.words = words
        self.capacity = min(<uint64_t>(slots * load_factor), slots - 1) if slots else 0
        self.high = CLASSES
        self.add_rules(list(rules))
        self.table_bytes = max(slots * words * 8, 64)
        self.table = <uint64_t *>kept_table_new(self.table_bytes)
        if self.table == NULL:
            raise MemoryError(f"map of {slots} slots")

    cdef add_rules(self, list rules):
        cdef int i = 0
        self.kept_alive = rules
        self.rules = <Rule *>calloc(len(rules), sizeof(Rule))
        if self.rules == NULL:
            raise MemoryError("rules")
        for prefix, kind, n, header in rules:
            self.rules[i].prefix = <const uint8_t *>PyBytes_AsString(prefix)
            self.rules[i].prefix_length = len(prefix)
            self.rules[i].kind = kind
            self.rules[i].n = n
            self.rules[i].header = <const uint8_t *>PyBytes_AsString(header)
            self.rules[i].header_length = len(header)
            i += 1
        self.rule_count = i

    def __dealloc__(self):
        kept_table_free(self.table, self.table_bytes)
        free(self.rules)

    @property
    def size_bytes(self):
        return self.slots * self.words * 8

    def begin(self, uint64_t low, uint64_t high):
        """Forget everything; count the keys whose class is in ``low..high``."""
        if self.size:
            memset(self.table, 0, self.table_bytes)
        self.size = 0
        self.low, self.high = low, high
        self.full = False

    cdef inline bint holds_class_of(self, uint64_t high) noexcept nogil:
        return self.low <= high >> 32 < self.high

    cdef inline uint64_t *slot(self, uint64_t low) noexcept nogil:
        return self.table + kept_scale(low, self.slots) * self.words

    cdef inline uint64_t *find(self, uint64_t low, uint64_t high) noexcept nogil:
        """The slot of a key, or the free one where it belongs."""
        cdef uint64_t *slot = self.slot(low)
        cdef uint64_t *end = self.table + self.slots * self.words
        while slot[VALUE]:
            if slot[0] == low and slot[1] == high:
                break
            slot += self.words
            if slot == end:
                slot = self.table
        return slot

    cdef inline const Rule *rule_of(self, const uint8_t *key, size_t length) noexcept nogil:
        """The first rule whose prefix the key has; the last one's is empty."""
        cdef const Rule *rule = self.rules
        while rule.prefix_length and (
                rule.prefix_length > length or memcmp(rule.prefix, key, rule.prefix_length)):
            rule += 1
        return rule

    cdef void narrow(self, uint64_t high) noexcept nogil:
        """Give up the upper half of the classes, until there is room or a key is among them."""
        while self.size >= self.capacity and self.holds_class_of(high):
            if self.high - self.low < 2:
                self.full = True
                return
            self.high = self.low + (self.high - self.low) // 2
            self.purge()

    cdef void purge(self) noexcept nogil:
        """Take out the keys of other classes. Whatever stays moves towards its own place, so it
        starts behind a free slot, of which there is always one."""
        cdef uint64_t item[MAX_WORDS]
        cdef size_t bytes_ = self.words * 8
        cdef uint64_t start = 0, i
        cdef uint64_t *slot
        while self.table[start * self.words + VALUE]:
            start += 1
        for i in range(1, self.slots):
            slot = self.table + (start + i) % self.slots * self.words
            if not slot[VALUE]:
                continue
            memcpy(item, slot, bytes_)
            slot[VALUE] = 0
            if self.holds_class_of(item[1]):
                memcpy(self.find(item[0], item[1]), item, bytes_)
            else:
                self.size -= 1

    cdef void add(self, const Item *item) noexcept nogil:
        cdef uint64_t *slot = self.find(item.low, item.high)
        cdef int kind = item.rule.kind
        cdef bint fresh = not slot[VALUE]
        if fresh:
            if self.size >= self.capacity:
                self.narrow(item.high)
                if self.full or not self.holds_class_of(item.high):
                    return
                slot = self.find(item.low, item.high)
            self.size += 1
            slot[0] = item.low
            slot[1] = item.high
        if kind == LATEST:
            slot[VALUE] = <uint64_t>item.offset + 1
        elif kind == LATEST_N:
            count(slot, item, fresh)
        elif fresh or not_less(item.version, slot + EXTRA, kind):
            slot[VALUE] = <uint64_t>item.offset + 1
            slot[EXTRA] = item.version[0]
            if kind == VERSION:
                slot[EXTRA + 1] = item.version[1]
                slot[EXTRA + 2] = item.version[2]

    cdef bint keeps(self, const Item *item) noexcept nogil:
        cdef uint64_t *slot = self.find(item.low, item.high)
        if not slot[VALUE]:
            return False
        if item.rule.kind != LATEST_N:
            return slot[VALUE] == <uint64_t>item.offset + 1
        if slot[VALUE] == 1:
            return True
        slot[VALUE] -= 1
        return False


cdef inline void count(uint64_t *slot, const Item *item, bint fresh) noexcept nogil:
    """``latest-n``: VALUE - 1 records go, EXTRA records after them stay."""
    if fresh:
        slot[VALUE] = slot[EXTRA] = 1
    elif item.tombstone:
        slot[VALUE] += slot[EXTRA]
        slot[EXTRA] = 1
    elif slot[EXTRA] < item.rule.n:
        slot[EXTRA] += 1
    else:
        slot[VALUE] += 1


cdef inline bint not_less(const uint64_t *left, const uint64_t *right, int kind) noexcept nogil:
    cdef int i
    for i in range(3 if kind == VERSION else 1):
        if left[i] != right[i]:
            return left[i] > right[i]
    return True


cdef void read_version(const uint8_t *p, int32_t length, uint64_t *out) noexcept nogil:
    """Three words that sort as versions do: 0 none, 1 a negative one, 2 and more the highest four
    of 40 decimal digits; 18 digits; 18 digits."""
    cdef int32_t i
    cdef int64_t number
    cdef bint digits = length > 0
    out[0] = out[1] = out[2] = 0
    for i in range(length):
        if p[i] < 48 or p[i] > 57:
            digits = False
            break
    if digits:
        if length > MAX_DIGITS:
            return
        for i in range(length):
            out[2 - (length - 1 - i) // LIMB] *= 10
            out[2 - (length - 1 - i) // LIMB] += p[i] - 48
        out[0] += 2
    elif length == 4 or length == 8:
        number = <int64_t>be64(p) if length == 8 else <int32_t>be32(p)
        if number < 0:
            out[0] = 1
            out[2] = <uint64_t>number
        else:
            out[0] = 2
            out[1] = <uint64_t>number // LIMB_VALUE
            out[2] = <uint64_t>number % LIMB_VALUE


cdef void find_version(const RecordSpan *span, const Rule *rule, uint64_t *out) noexcept nogil:
    """Of the last header with the rule's name. The headers were checked by read_record."""
    cdef const uint8_t *p = span.headers
    cdef const uint8_t *name
    cdef const uint8_t *value = NULL
    cdef int32_t left = 0, name_length = 0, length = 0, found = -1
    p = read_varint32(p, span.end, &left)
    while left > 0:
        left -= 1
        p = read_varint32(p, span.end, &name_length)
        name = p
        p = read_varint32(p + name_length, span.end, &length)
        if name_length == rule.header_length and not memcmp(name, rule.header, name_length):
            value, found = p, length
        if length > 0:
            p += length
    read_version(value, found, out)


cdef class RuleScan:
    cdef readonly int64_t base_offset
    cdef readonly bint special
    cdef readonly object fault
    cdef RuleMap map
    cdef bint keep
    cdef int64_t first
    cdef const char *why
    cdef Watched watched
    cdef object watch
    cdef Words kept_
    cdef Item items[BLOCK]
    cdef int block

    def __cinit__(self, int64_t base_offset, RuleMap map not None, *, int64_t first=0,
                  bint keep=False, watch=None):
        self.base_offset = base_offset
        self.map = map
        self.watch = watch
        if watch is not None:
            attach(&self.watched, watch, map.k0, map.k1)
        self.first = first
        self.keep = keep

    def __dealloc__(self):
        free(self.kept_.at)

    def feed(self, data):
        """Read whole batches from the start of ``data``; returns how many bytes."""
        cdef const uint8_t[::1] view = data
        cdef int64_t size = view.shape[0], used
        self.special = False
        if size < HEADER:
            return 0
        with nogil:
            used = self.walk(&view[0], size)
        if self.why != NULL:
            self.fault = self.why.decode()
        return used

    def feed_batch(self, header, area, bint aborted):
        """One batch that ``feed`` left to the caller: its header, its records inflated."""
        cdef const uint8_t[::1] head = header
        cdef const uint8_t[::1] body = area
        cdef const uint8_t *start = &body[0] if body.shape[0] else NULL
        cdef int64_t size = body.shape[0]
        if aborted:
            return
        with nogil:
            self.batch(&head[0], start, start + size)
        if self.why != NULL:
            self.fault = self.why.decode()

    def skip(self, offset, next_offset, size_bytes, present):
        """A control batch: no strategy sees it."""

    cdef int64_t walk(self, const uint8_t *data, int64_t size) noexcept nogil:
        cdef int64_t at = 0, length
        while True:
            length = frame(data + at, size - at, &self.why)
            if not length:
                return at
            if data[at + 22] & SPECIAL:
                self.special = True
                return at
            if self.batch(data + at, data + at + HEADER, data + at + length) < 0:
                return at
            at += length

    cdef int batch(self, const uint8_t *head, const uint8_t *p, const uint8_t *end) noexcept nogil:
        cdef int64_t base = <int64_t>be64(head), left = <int32_t>be32(head + 57)
        cdef uint64_t timestamp = be64(head + 35 if head[22] & 8 else head + 27)
        cdef RecordSpan span
        while left > 0:
            left -= 1
            if read_record(p, end, False, &span):
                self.why = b"a record is damaged"
                return -1
            p = span.end
            if span.key_length >= 0 and base + span.offset_delta >= self.first:
                if head[22] & 8:
                    span.timestamp_delta = 0
                self.record(base + span.offset_delta,
                            timestamp + <uint64_t>span.timestamp_delta, &span)
        if p != end:
            self.why = b"record count does not match"
            return -1
        if self.flush():
            self.why = b"out of memory"
            return -1
        return 0

    cdef inline void record(self, int64_t offset, uint64_t timestamp,
                            const RecordSpan *span) noexcept nogil:
        cdef Item *item = self.items + self.block
        kept_siphash128(self.map.k0, self.map.k1, span.key, <size_t>span.key_length,
                        &item.low, &item.high)
        note(&self.watched, item.low, item.high, offset)
        if not self.map.holds_class_of(item.high):
            return
        kept_prefetch(self.map.slot(item.low))
        item.offset = offset
        item.tombstone = span.value_length < 0
        item.rule = self.map.rule_of(span.key, <size_t>span.key_length)
        if not self.keep:
            if item.rule.kind == TIMESTAMP:
                item.version[0] = timestamp ^ SIGN
            elif item.rule.kind == VERSION:
                find_version(span, item.rule, item.version)
        self.block += 1
        if self.block == BLOCK and self.flush():
            self.why = b"out of memory"

    cdef int flush(self) noexcept nogil:
        """Put the hashed keys into the map, or ask it."""
        cdef int i, failed = 0
        for i in range(self.block):
            if self.keep:
                if self.map.keeps(self.items + i):
                    failed |= push(&self.kept_, <uint32_t>(self.items[i].offset - self.base_offset))
            elif self.map.holds_class_of(self.items[i].high):
                self.map.add(self.items + i)
        self.block = 0
        return failed

    def kept(self):
        """Records that stay, relative to the base, ascending."""
        return as_array(&self.kept_)


cdef object new_tuple = tuple.__new__


cdef class RecordScan:
    cdef readonly int64_t base_offset
    cdef readonly bint special
    cdef readonly object fault
    cdef object use
    cdef int64_t first
    cdef const uint32_t[::1] wanted
    cdef bint chosen
    cdef Py_ssize_t cursor, wanted_size

    def __cinit__(self, int64_t base_offset, use, *, int64_t first=0, wanted=None):
        self.base_offset = base_offset
        self.use = use
        self.first = first
        self.chosen = wanted is not None
        if self.chosen and len(wanted):
            self.wanted = wanted
            self.wanted_size = len(wanted)

    def feed(self, data):
        """Read whole batches from the start of ``data``; returns how many bytes."""
        cdef const uint8_t[::1] view = data
        cdef const char *why = NULL
        cdef int64_t size = view.shape[0], at = 0, length
        self.special = False
        while size - at >= HEADER and self.fault is None:
            with nogil:
                length = frame(&view[at], size - at, &why)
            if why != NULL:
                self.fault = why.decode()
            if not length:
                break
            if view[at + 22] & SPECIAL:
                self.special = True
                break
            self.batch(&view[at], &view[at] + HEADER, &view[at] + length)
            if self.fault is None:
                at += length
        return at

    def feed_batch(self, header, area, bint aborted):
        """One batch that ``feed`` left to the caller: its header, its records inflated."""
        cdef const uint8_t[::1] head = header
        cdef const uint8_t[::1] body = area
        cdef const uint8_t *start = &body[0] if body.shape[0] else NULL
        if not aborted:
            self.batch(&head[0], start, start + body.shape[0])

    def skip(self, offset, next_offset, size_bytes, present):
        """A control batch: no strategy sees it."""

    cdef batch(self, const uint8_t *head, const uint8_t *p, const uint8_t *end):
        cdef int64_t base = <int64_t>be64(head), left = <int32_t>be32(head + 57)
        cdef uint64_t timestamp = be64(head + 35 if head[22] & 8 else head + 27)
        cdef RecordSpan span
        cdef list found = []
        while left > 0:
            left -= 1
            if read_record(p, end, False, &span):
                self.fault = "a record is damaged"
                return
            p = span.end
            if span.key_length < 0 or not self.wants(base + span.offset_delta):
                continue
            if head[22] & 8:
                span.timestamp_delta = 0
            found.append(new_tuple(Record, (
                base + span.offset_delta,
                <int64_t>(timestamp + <uint64_t>span.timestamp_delta),
                PyBytes_FromStringAndSize(<const char *>span.key, span.key_length),
                None if span.value_length < 0
                else PyBytes_FromStringAndSize(<const char *>span.value, span.value_length),
                record_headers(&span),
            )))
        if p != end:
            self.fault = "record count does not match"
        elif found:
            self.use(found)

    cdef inline bint wants(self, int64_t offset):
        if offset < self.first:
            return False
        if not self.chosen:
            return True
        while self.cursor < self.wanted_size \
                and self.wanted[self.cursor] < offset - self.base_offset:
            self.cursor += 1
        return self.cursor < self.wanted_size \
            and self.wanted[self.cursor] == offset - self.base_offset


cdef object record_headers(const RecordSpan *span):
    cdef const uint8_t *p = span.headers
    cdef int32_t left = 0, length = 0
    cdef list found
    p = read_varint32(p, span.end, &left)
    if not left:
        return ()
    found = []
    while left > 0:
        left -= 1
        p = read_varint32(p, span.end, &length)
        name = (<const char *>p)[:length].decode("utf-8", "replace")
        p = read_varint32(p + length, span.end, &length)
        if length < 0:
            found.append((name, None))
        else:
            found.append((name, PyBytes_FromStringAndSize(<const char *>p, length)))
            p += length
    return tuple(found)


def class_of(bytes hash_key not None, bytes key not None, uint64_t classes):
    """Which of the disjoint classes a key is in."""
    cdef uint64_t k0, k1, low, high
    if PyBytes_Size(hash_key) != 16:
        raise ValueError("the hash key has 16 bytes")
    memcpy(&k0, PyBytes_AsString(hash_key), 8)
    memcpy(&k1, PyBytes_AsString(hash_key) + 8, 8)
    kept_siphash128(k0, k1, <const uint8_t *>PyBytes_AsString(key), PyBytes_Size(key),
                    &low, &high)
    return high % classes
