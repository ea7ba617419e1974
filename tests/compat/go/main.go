// Clients in Go: with one of them (franz, sarama, segmentio) this program creates a topic, sends to it with all
// codecs, and reads in a group. It prints "half" when the first half is read, and the test then kills a node and
// starts it again. It ends with one JSON line: how many records were sent, seen, and seen more than once.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	partitions = 3
	half       = 300
	batch      = 10
	deadline   = 90 * time.Second
	autoCommit = 100 * time.Millisecond
)

var codecs = []string{"none", "gzip", "snappy", "lz4", "zstd"}

// A library under test. Send returns when every value is acknowledged by all; Read hands values over until the
// context ends, and commits as it goes.
type library interface {
	Create(ctx context.Context) error
	Send(ctx context.Context, codec string, values []string) error
	Read(ctx context.Context, seen func(value string)) error
}

type place struct {
	bootstrap []string
	topic     string
}

var libraries = map[string]func(place) (library, error){
	"franz":     newFranz,
	"sarama":    newSarama,
	"segmentio": newSegmentio,
}

func story(ctx context.Context, client library) (map[string]int, error) {
	if err := client.Create(ctx); err != nil {
		return nil, fmt.Errorf("create: %w", err)
	}
	var lock sync.Mutex
	times := map[string]int{}
	reading, stop := context.WithCancel(ctx)
	read := make(chan error, 1)
	go func() {
		read <- client.Read(reading, func(value string) {
			lock.Lock()
			defer lock.Unlock()
			times[value]++
		})
	}()
	seen := func() int {
		lock.Lock()
		defer lock.Unlock()
		return len(times)
	}
	sent := 0
	send := func() error {
		for end := sent + half; sent < end; sent += batch {
			values := make([]string, batch)
			for i := range values {
				values[i] = strconv.Itoa(sent + i)
			}
			if err := client.Send(ctx, codecs[sent/batch%len(codecs)], values); err != nil {
				return fmt.Errorf("send: %w", err)
			}
		}
		for seen() < sent {
			select {
			case err := <-read:
				return fmt.Errorf("read: %w", err)
			case <-ctx.Done():
				return fmt.Errorf("%d of %d seen: %w", seen(), sent, ctx.Err())
			case <-time.After(20 * time.Millisecond):
			}
		}
		return nil
	}
	if err := send(); err != nil {
		stop()
		return nil, err
	}
	fmt.Println("half")
	err := send()
	stop()
	if ended := <-read; err == nil {
		err = ended
	}
	twice := 0
	for _, count := range times {
		if count > 1 {
			twice++
		}
	}
	return map[string]int{"sent": sent, "seen": len(times), "twice": twice}, err
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if os.Args[1] == "mover" {
		if err := mover(ctx, os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	name, bootstrap, topic := os.Args[1], os.Args[2], os.Args[3]
	client, err := libraries[name](place{strings.Split(bootstrap, ","), topic})
	var result map[string]int
	if err == nil {
		result, err = story(ctx, client)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		os.Exit(1)
	}
}
