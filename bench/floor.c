/* What the machine itself takes for the work of a broker: the floor under the figures.
 *
 *   floor write DIR BYTES COUNT     COUNT times write(2) of BYTES into new files of DIR
 *   floor sink  PORT DIR BYTES [PEM]  take one connection: receive frames of BYTES, write them into new files of DIR,
 *                                   answer each: a broker that looks at nothing. Prints "listening" first. With PEM, a
 *                                   file of key and certificate, over TLS (only where it is built with -DTLS).
 *
 * Prints one JSON object with the CPU seconds (user and system) of this process alone and the bytes that were
 * written. Files are of 1 GiB, as a log's segments are by default, and are left for the caller to remove.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#ifdef TLS
#include <openssl/ssl.h>
static SSL *tls;
#endif

#define FILE_BYTES (1l << 30)
#define LEAST_BUFFER_BYTES (256l << 10) /* as much as a busy connection of kept reads at once */
#define ANSWER_BYTES 52                 /* a Produce answer: topic of no name, partition 0, no error */

static void die(const char *what) {
    fprintf(stderr, "floor: %s: %s\n", what, errno ? strerror(errno) : "wrong");
    exit(1);
}

static const char *folder;
static int file = -1, files;
static long file_at, written;

static void append(const uint8_t *p, long n) {
    if (file < 0 || file_at + n > FILE_BYTES) {
        char path[4096];
        if (file >= 0) close(file);
        snprintf(path, sizeof path, "%s/floor-%d-%d", folder, (int)getpid(), files++);
        file = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
        if (file < 0) die(path);
        file_at = 0;
    }
    while (n) {
        ssize_t k = write(file, p, n);
        if (k <= 0) die("write");
        p += k, n -= k, file_at += k, written += k;
    }
}

#ifdef TLS
/* Of a socket that blocks; what is there is read in large pieces, and deciphered into the caller's memory. */
static void begin_tls(int fd, const char *pem) {
    SSL_CTX *context = SSL_CTX_new(TLS_server_method());
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, LEAST_BUFFER_BYTES);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_options(context, SSL_OP_IGNORE_UNEXPECTED_EOF); /* the load closes its socket */
    if (SSL_CTX_use_certificate_chain_file(context, pem) != 1 || SSL_CTX_use_PrivateKey_file(context, pem, SSL_FILETYPE_PEM) != 1)
        die(pem);
    tls = SSL_new(context);
    SSL_set_fd(tls, fd);
    if (SSL_accept(tls) != 1) die("TLS handshake");
}
#endif

static ssize_t receive(int fd, void *p, long n) {
#ifdef TLS
    if (tls) {
        int k = SSL_read(tls, p, n);
        return k > 0 ? k : SSL_get_error(tls, k) == SSL_ERROR_ZERO_RETURN ? 0 : -1;
    }
#endif
    return recv(fd, p, n, 0);
}

static void send_whole(int fd, const uint8_t *p, long n) {
    while (n) {
#ifdef TLS
        ssize_t k = tls ? SSL_write(tls, p, n) : send(fd, p, n, MSG_NOSIGNAL);
#else
        ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
#endif
        if (k <= 0) die("send");
        p += k, n -= k;
    }
}

/* The whole frames that one recv left in the buffer are written at once and answered at once. */
static void serve(int fd, long frame_bytes) {
    long room = frame_bytes > LEAST_BUFFER_BYTES ? frame_bytes : LEAST_BUFFER_BYTES, have = 0;
    long most = room / frame_bytes;
    uint8_t *in = malloc(room), *out = calloc(most, ANSWER_BYTES);
    for (long i = 0; i < most; i++) out[i * ANSWER_BYTES + 3] = ANSWER_BYTES - 4;
    for (;;) {
        /* Up to the end of a frame where frames are large, so that the next one needs no move. */
        long want = frame_bytes > LEAST_BUFFER_BYTES / 4 ? frame_bytes - have : room - have;
        ssize_t k = receive(fd, in + have, want);
        if (k < 0) die("recv");
        if (k == 0) return;
        have += k;
        long whole = have / frame_bytes;
        if (!whole) continue;
        append(in, whole * frame_bytes);
        send_whole(fd, out, whole * ANSWER_BYTES);
        have -= whole * frame_bytes;
        memmove(in, in + whole * frame_bytes, have);
    }
}

static void do_sink(int port, long frame_bytes, const char *pem) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 1)) die("listen");
    puts("listening");
    fflush(stdout);
    int fd = accept(listener, NULL, NULL);
    if (fd < 0) die("accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
#ifdef TLS
    if (pem) begin_tls(fd, pem);
#else
    if (pem) die("TLS: built without -DTLS");
#endif
    serve(fd, frame_bytes);
}

static double seconds(struct timeval t) { return t.tv_sec + t.tv_usec * 1e-6; }

static void report(struct rusage before) {
    struct rusage now;
    getrusage(RUSAGE_SELF, &now);
    printf("{\"bytes\": %ld, \"user\": %.6f, \"system\": %.6f}\n", written,
           seconds(now.ru_utime) - seconds(before.ru_utime), seconds(now.ru_stime) - seconds(before.ru_stime));
}

int main(int argc, char **argv) {
    struct rusage before;
    if (argc == 5 && !strcmp(argv[1], "write")) {
        long bytes = atol(argv[3]), count = atol(argv[4]);
        uint8_t *data = malloc(bytes);
        folder = argv[2];
        for (long i = 0; i < bytes; i++) data[i] = (uint8_t)(i * 31);
        getrusage(RUSAGE_SELF, &before);
        for (long i = 0; i < count; i++) append(data, bytes);
        return report(before), 0;
    }
    if ((argc == 5 || argc == 6) && !strcmp(argv[1], "sink")) {
        folder = argv[3];
        getrusage(RUSAGE_SELF, &before);
        do_sink(atoi(argv[2]), atol(argv[4]), argc == 6 ? argv[5] : NULL);
        return report(before), 0;
    }
    fprintf(stderr, "usage: floor write|sink ... (see the top of floor.c)\n");
    return 2;
}
