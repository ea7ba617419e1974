package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Moves records of a topic into another in transactions of franz-go, each once. Arguments: bootstrap, input, output,
// group (and transactional id), how many records there are. Every third transaction is aborted at first. It prints
// "quarter" when so much was moved, makes a new session in the middle, and ends when everything was committed. It asks
// for what was committed as often as it takes: a coordinator that was killed refuses connections for a while.
func mover(ctx context.Context, args []string) error {
	bootstrap, source, target, name := strings.Split(args[0], ","), args[1], args[2], args[3]
	records, err := strconv.ParseInt(args[4], 10, 64)
	if err != nil {
		return err
	}
	session, err := newSession(bootstrap, source, name)
	if err != nil {
		return err
	}
	told, replaced := false, false
	for transactions := 0; ; {
		moved, err := committedBy(ctx, session.Client(), name)
		if err != nil {
			fmt.Fprintln(os.Stderr, "committed offsets:", err)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(100 * time.Millisecond):
				continue
			}
		}
		if moved >= records {
			session.Close()
			return nil
		}
		if moved >= records/4 && !told {
			told = true
			fmt.Println("quarter")
		}
		renew := moved >= records/2 && !replaced
		replaced = replaced || renew
		if !renew {
			some, stop := context.WithTimeout(ctx, 200*time.Millisecond)
			fetches := session.PollRecords(some, 10)
			stop()
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if fetches.NumRecords() == 0 {
				continue
			}
			transactions++
			if err := moveOnce(ctx, session, fetches, target, transactions%3 != 1); err != nil {
				fmt.Fprintln(os.Stderr, err)
				renew = true
			}
		}
		if renew {
			session.Close()
			if session, err = newSession(bootstrap, source, name); err != nil {
				return err
			}
		}
	}
}

func newSession(bootstrap []string, source, name string) (*kgo.GroupTransactSession, error) {
	return kgo.NewGroupTransactSession(kgo.SeedBrokers(bootstrap...), kgo.TransactionalID(name),
		kgo.TransactionTimeout(20*time.Second), kgo.ConsumerGroup(name), kgo.ConsumeTopics(source),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(300*time.Millisecond),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.RequireStableFetchOffsets())
}

func moveOnce(
	ctx context.Context, session *kgo.GroupTransactSession, fetches kgo.Fetches, target string, commit bool,
) error {
	if err := session.Begin(); err != nil {
		return err
	}
	var lock = make(chan error, fetches.NumRecords())
	fetches.EachRecord(func(record *kgo.Record) {
		moved := &kgo.Record{Topic: target, Partition: record.Partition, Value: record.Value}
		session.Produce(ctx, moved, func(_ *kgo.Record, err error) { lock <- err })
	})
	var failed error
	for range fetches.NumRecords() {
		failed = errors.Join(failed, <-lock)
	}
	_, err := session.End(ctx, kgo.TransactionEndTry(commit && failed == nil))
	return err
}

func committedBy(ctx context.Context, client *kgo.Client, group string) (int64, error) {
	fetched, err := kadm.NewClient(client).FetchOffsets(ctx, group)
	if err != nil {
		return 0, err
	}
	var sum int64
	fetched.Each(func(offset kadm.OffsetResponse) { sum += max(0, offset.At) })
	return sum, nil
}
