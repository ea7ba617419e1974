/* Load for a Kafka broker that costs next to nothing itself.
 *
 *   load send  HOST PORT FRAME CONNECTIONS WINDOW REQUESTS          as fast as the window allows
 *   load pace  HOST PORT FRAME RATE REQUESTS                        one connection, RATE requests/s, latencies
 *   load fetch HOST PORT FRAME OFFSET_AT CONNECTIONS BYTES          reads until each connection has BYTES
 *
 * FRAME is a file with one whole request (length prefix included), sent again and again: a Produce without
 * sequence numbers, or a Fetch v4 of one partition whose fetch offset (int64) is at byte OFFSET_AT of the
 * file. Prints one JSON object. Exits 1 with a line on stderr when the broker closes a connection, or
 * answers an error.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONNECTIONS 64
#define RECEIVE_BYTES (24u << 20)
#define PREFIX_BYTES 128          /* of each produce answer, enough for the error code of its partition */

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, errno ? strerror(errno) : "protocol");
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static uint32_t be32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static uint64_t be64(const uint8_t *p) { return (uint64_t)be32(p) << 32 | be32(p + 4); }

static void put64(uint8_t *p, uint64_t v) {
    for (int i = 7; i >= 0; i--, v >>= 8) p[i] = v & 0xff;
}

static uint8_t *frame;
static size_t frame_bytes;

static void read_frame(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) die(path);
    fseek(f, 0, SEEK_END);
    frame_bytes = ftell(f);
    rewind(f);
    frame = malloc(frame_bytes);
    if (fread(frame, 1, frame_bytes, f) != frame_bytes) die(path);
    fclose(f);
}

static int dial(const char *host, int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (inet_pton(AF_INET, host, &a.sin_addr) != 1) die(host);
    if (connect(fd, (struct sockaddr *)&a, sizeof a)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

typedef struct {
    int fd;
    long sent, answered, wanted;
    size_t out_at;            /* bytes of the current frame already written */
    uint8_t head[4];          /* length prefix of the answer being read */
    size_t head_at, body_left;
    uint8_t prefix[PREFIX_BYTES]; /* the first bytes of its body */
    size_t prefix_at;
} conn;

/* A Produce answer before v9, of one topic and one partition: give up when it is an error. */
static void check_produced(const uint8_t *p, size_t n) {
    size_t at = 4 + 4;                          /* correlation id, topics */
    if (at + 2 <= n) at += 2 + (p[at] << 8 | p[at + 1]) + 4 + 4; /* name, partitions, index */
    if (at + 2 > n) { errno = 0; die("an answer that is not to a Produce of one partition"); }
    int code = (int16_t)(p[at] << 8 | p[at + 1]);
    if (code) { fprintf(stderr, "load: error code %d\n", code); exit(1); }
}

/* Count whole answers in what arrived, keeping no more of each than its error code needs. */
static void count_answers(conn *c, const uint8_t *p, size_t n) {
    while (n) {
        if (c->body_left) {
            size_t k = n < c->body_left ? n : c->body_left;
            size_t room = PREFIX_BYTES - c->prefix_at, kept = k < room ? k : room;
            memcpy(c->prefix + c->prefix_at, p, kept);
            c->prefix_at += kept;
            c->body_left -= k, p += k, n -= k;
            if (!c->body_left) check_produced(c->prefix, c->prefix_at), c->answered++;
        } else {
            c->head[c->head_at++] = *p++, n--;
            if (c->head_at == 4) c->head_at = c->prefix_at = 0, c->body_left = be32(c->head);
        }
    }
}

static void do_send(const char *host, int port, unsigned connections, int window, long requests) {
    static conn cs[MAX_CONNECTIONS];
    static uint8_t in[1 << 16];
    struct pollfd fds[MAX_CONNECTIONS];
    if (connections > MAX_CONNECTIONS) die("too many connections");
    for (unsigned i = 0; i < connections; i++) {
        cs[i] = (conn){.fd = dial(host, port), .wanted = requests / connections};
        fds[i].fd = cs[i].fd;
    }
    double start = now();
    for (unsigned open = connections; open;) {
        for (unsigned i = 0; i < connections; i++) {
            conn *c = &cs[i];
            fds[i].events = c->answered < c->wanted ? POLLIN : 0;
            if (c->out_at || (c->sent < c->wanted && c->sent - c->answered < window))
                fds[i].events |= POLLOUT;
        }
        if (poll(fds, connections, 10000) <= 0) die("no answer for 10 s");
        open = 0;
        for (unsigned i = 0; i < connections; i++) {
            conn *c = &cs[i];
            if (fds[i].revents & POLLOUT) {
                while (c->out_at || (c->sent < c->wanted && c->sent - c->answered < window)) {
                    ssize_t k = send(c->fd, frame + c->out_at, frame_bytes - c->out_at,
                                     MSG_DONTWAIT | MSG_NOSIGNAL);
                    if (k < 0 && errno == EAGAIN) break;
                    if (k < 0) die("send");
                    c->out_at += k;
                    if (c->out_at < frame_bytes) break;
                    c->out_at = 0, c->sent++;
                }
            }
            if (fds[i].revents & (POLLIN | POLLHUP)) {
                ssize_t k = recv(c->fd, in, sizeof in, MSG_DONTWAIT);
                if (k == 0) { errno = ECONNRESET; die("closed by the broker"); }
                if (k > 0) count_answers(c, in, k);
            }
            open += c->answered < c->wanted ? 1 : 0;
        }
    }
    double s = now() - start;
    long n = requests / connections * connections;
    printf("{\"requests\": %ld, \"bytes\": %.0f, \"seconds\": %.6f}\n", n, (double)n * frame_bytes, s);
}

static void read_whole(int fd, uint8_t *p, size_t n) {
    while (n) {
        ssize_t k = recv(fd, p, n, 0);
        if (k == 0) { errno = ECONNRESET; die("closed by the broker"); }
        if (k < 0) die("recv");
        p += k, n -= k;
    }
}

static void write_whole(int fd, const uint8_t *p, size_t n) {
    while (n) {
        ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
        if (k < 0) die("send");
        p += k, n -= k;
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void do_pace(const char *host, int port, double rate, long requests) {
    static uint8_t in[1 << 16];
    double *took = malloc(requests * sizeof *took), start = now() + 0.01;
    int fd = dial(host, port);
    for (long i = 0; i < requests; i++) {
        double due = start + i / rate, t;
        while ((t = now()) < due) {
            struct timespec nap = {0, (long)((due - t) * 1e9)};
            if (nap.tv_nsec > 60000) nap.tv_nsec -= 60000, nanosleep(&nap, NULL);
        }
        write_whole(fd, frame, frame_bytes);
        read_whole(fd, in, 4);
        if (be32(in) > sizeof in) die("answer too large");
        size_t n = be32(in);
        read_whole(fd, in, n);
        check_produced(in, n);
        took[i] = now() - due; /* from when it was due: a stall counts for all that it delayed */
    }
    qsort(took, requests, sizeof *took, by_size);
    printf("{\"requests\": %ld, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f, \"max_ms\": %.4f}\n",
           requests, took[requests / 2] * 1e3, took[requests * 99 / 100] * 1e3,
           took[requests * 999 / 1000] * 1e3, took[requests - 1] * 1e3);
}

/* Next offset after the whole batches of a Fetch v4 answer of one topic and partition. */
static uint64_t next_offset(const uint8_t *p, size_t n, uint64_t at, size_t *records) {
    const uint8_t *end = p + n;
    uint64_t high_watermark;
    p += 4 + 4 + 4;                             /* correlation id, throttle, topics */
    p += 2 + (p[0] << 8 | p[1]);                /* name */
    p += 4 + 4;                                 /* partitions, index */
    if (p[0] || p[1]) { errno = 0; fprintf(stderr, "load: error code %d\n", p[0] << 8 | p[1]); exit(1); }
    high_watermark = be64(p + 2);
    p += 2 + 8 + 8;                             /* error, high watermark, last stable offset */
    int32_t aborted = be32(p);
    p += 4 + (aborted > 0 ? aborted * 16 : 0);
    *records = be32(p);
    p += 4;
    while (end - p >= 61 && (size_t)(end - p) >= 12 + (size_t)be32(p + 8)) {
        at = be64(p) + be32(p + 23) + 1;
        p += 12 + be32(p + 8);
    }
    if (at >= high_watermark) at = 0; /* at the end: start again */
    return at;
}

static void do_fetch(const char *host, int port, size_t offset_at, int connections, double bytes) {
    uint8_t *in = malloc(RECEIVE_BYTES);
    int fds[MAX_CONNECTIONS];
    uint64_t at[MAX_CONNECTIONS] = {0};
    double got = 0, start;
    long requests = 0;
    for (int i = 0; i < connections; i++) fds[i] = dial(host, port);
    start = now();
    while (got < bytes) {
        for (int i = 0; i < connections; i++) {
            put64(frame + offset_at, at[i]);
            write_whole(fds[i], frame, frame_bytes);
        }
        for (int i = 0; i < connections; i++) {
            size_t records;
            read_whole(fds[i], in, 4);
            size_t n = be32(in);
            if (n > RECEIVE_BYTES) die("answer too large");
            read_whole(fds[i], in, n);
            uint64_t next = next_offset(in, n, at[i], &records);
            at[i] = next;
            got += records, requests++;
        }
    }
    printf("{\"requests\": %ld, \"bytes\": %.0f, \"seconds\": %.6f}\n", requests, got, now() - start);
}

int main(int argc, char **argv) {
    if (argc >= 6) {
        const char *host = argv[2];
        int port = atoi(argv[3]);
        read_frame(argv[4]);
        if (!strcmp(argv[1], "send") && argc == 8)
            return do_send(host, port, atoi(argv[5]), atoi(argv[6]), atol(argv[7])), 0;
        if (!strcmp(argv[1], "pace") && argc == 7)
            return do_pace(host, port, atof(argv[5]), atol(argv[6])), 0;
        if (!strcmp(argv[1], "fetch") && argc == 8)
            return do_fetch(host, port, atol(argv[5]), atoi(argv[6]), atof(argv[7])), 0;
    }
    fprintf(stderr, "usage: load send|pace|fetch HOST PORT FRAME ... (see the top of load.c)\n");
    return 2;
}
