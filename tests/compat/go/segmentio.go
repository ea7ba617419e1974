package main

import (
	"context"
	"errors"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
)

type segmentio struct {
	place
	writers map[string]*kafka.Writer
}

func segmentioSASL() sasl.Mechanism {
	algorithms := map[string]scram.Algorithm{"SCRAM-SHA-256": scram.SHA256, "SCRAM-SHA-512": scram.SHA512}
	if algorithm, found := algorithms[mechanism]; found {
		made, err := scram.Mechanism(algorithm, user, password)
		if err != nil {
			panic(err)
		}
		return made
	}
	switch mechanism {
	case "PLAIN":
		return plain.Mechanism{Username: user, Password: password}
	case "OAUTHBEARER":
		return bearer{}
	}
	return nil
}

// kafka-go leaves OAUTHBEARER to the application.
type bearer struct{}

func (bearer) Name() string { return "OAUTHBEARER" }

func (b bearer) Start(context.Context) (sasl.StateMachine, []byte, error) {
	token, err := accessToken()
	return b, []byte("n,,\x01auth=Bearer " + token + "\x01\x01"), err
}

func (bearer) Next(_ context.Context, challenge []byte) (bool, []byte, error) {
	if len(challenge) > 0 {
		return false, nil, errors.New(string(challenge))
	}
	return true, nil, nil
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
			Transport: &kafka.Transport{TLS: tlsConfig(), SASL: segmentioSASL()},
		}
	}
	return made, nil
}

func (s *segmentio) Create(ctx context.Context) error {
	transport := &kafka.Transport{TLS: tlsConfig(), SASL: segmentioSASL()}
	client := &kafka.Client{Addr: kafka.TCP(s.bootstrap...), Transport: transport}
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
		Dialer: &kafka.Dialer{Timeout: 10 * time.Second, DualStack: true, TLS: tlsConfig(), SASLMechanism: segmentioSASL()},
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
