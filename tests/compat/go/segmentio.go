package main

import (
	"context"
	"time"

	"github.com/segmentio/kafka-go"
)

type segmentio struct {
	place
	writers map[string]*kafka.Writer
}

func newSegmentio(where place) (library, error) {
	made := &segmentio{where, map[string]*kafka.Writer{}}
	byName := map[string]kafka.Compression{
		"none": 0, "gzip": kafka.Gzip, "snappy": kafka.Snappy, "lz4": kafka.Lz4, "zstd": kafka.Zstd,
	}
	for name, codec := range byName {
		made.writers[name] = &kafka.Writer{
			Addr: kafka.TCP(where.bootstrap...), Topic: where.topic, Balancer: &kafka.RoundRobin{},
			RequiredAcks: kafka.RequireAll, Compression: codec, BatchTimeout: time.Millisecond, MaxAttempts: 100,
		}
	}
	return made, nil
}

func (s *segmentio) Create(ctx context.Context) error {
	client := &kafka.Client{Addr: kafka.TCP(s.bootstrap...)}
	topics := []kafka.TopicConfig{{Topic: s.topic, NumPartitions: partitions, ReplicationFactor: -1}}
	made, err := client.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: topics})
	if err != nil {
		return err
	}
	return made.Errors[s.topic]
}

func (s *segmentio) Send(ctx context.Context, codec string, values []string) error {
	messages := make([]kafka.Message, len(values))
	for i, value := range values {
		messages[i].Value = []byte(value)
	}
	return s.writers[codec].WriteMessages(ctx, messages...)
}

func (s *segmentio) Read(ctx context.Context, seen func(string)) error {
	reader := kafka.NewReader(kafka.ReaderConfig{
		Brokers: s.bootstrap, GroupID: s.topic, Topic: s.topic, StartOffset: kafka.FirstOffset,
		MaxWait: 100 * time.Millisecond, CommitInterval: autoCommit, MaxAttempts: 100,
	})
	defer reader.Close()
	for {
		message, err := reader.ReadMessage(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		seen(string(message.Value))
	}
}
