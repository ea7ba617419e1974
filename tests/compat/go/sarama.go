package main

import (
	"context"
	"errors"

	"github.com/IBM/sarama"
	"github.com/xdg-go/scram"
)

type saramaClient struct {
	place
	config    *sarama.Config
	producers map[string]sarama.SyncProducer
}

func newSarama(where place) (library, error) {
	config := sarama.NewConfig()
	config.Version = sarama.MaxVersion
	config.Producer.Return.Successes = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Idempotent = true
	config.Producer.Retry.Max = 100
	config.Producer.Partitioner = sarama.NewRoundRobinPartitioner
	config.Net.MaxOpenRequests = 1
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Interval = autoCommit
	if config.Net.TLS.Config = tlsConfig(); config.Net.TLS.Config != nil {
		config.Net.TLS.Enable = true
	}
	if mechanism != "" {
		config.Net.SASL.Enable = true
		config.Net.SASL.Mechanism = sarama.SASLMechanism(mechanism)
		config.Net.SASL.User, config.Net.SASL.Password = user, password
		config.Net.SASL.TokenProvider = tokens{}
		config.Net.SASL.SCRAMClientGeneratorFunc = func() sarama.SCRAMClient { return &scramClient{} }
	}
	return &saramaClient{where, config, map[string]sarama.SyncProducer{}}, nil
}

func (s *saramaClient) Create(context.Context) error {
	admin, err := sarama.NewClusterAdmin(s.bootstrap, s.config)
	if err != nil {
		return err
	}
	defer admin.Close()
	return admin.CreateTopic(s.topic, &sarama.TopicDetail{NumPartitions: partitions, ReplicationFactor: -1}, false)
}

func (s *saramaClient) Send(_ context.Context, codec string, values []string) error {
	if s.producers[codec] == nil {
		config := *s.config
		if err := config.Producer.Compression.UnmarshalText([]byte(codec)); err != nil {
			return err
		}
		producer, err := sarama.NewSyncProducer(s.bootstrap, &config)
		if err != nil {
			return err
		}
		s.producers[codec] = producer
	}
	messages := make([]*sarama.ProducerMessage, len(values))
	for i, value := range values {
		messages[i] = &sarama.ProducerMessage{Topic: s.topic, Value: sarama.StringEncoder(value)}
	}
	return s.producers[codec].SendMessages(messages)
}

func (s *saramaClient) Read(ctx context.Context, seen func(string)) error {
	group, err := sarama.NewConsumerGroup(s.bootstrap, s.topic, s.config)
	if err != nil {
		return err
	}
	defer group.Close()
	for ctx.Err() == nil {
		// A session ends with every rebalance, and when the coordinator dies.
		if err := group.Consume(ctx, []string{s.topic}, member(seen)); errors.Is(err, sarama.ErrClosedConsumerGroup) {
			return err
		}
	}
	return nil
}

// Access tokens of the file.
type tokens struct{}

func (tokens) Token() (*sarama.AccessToken, error) {
	token, err := accessToken()
	return &sarama.AccessToken{Token: token}, err
}

// sarama leaves SCRAM to the application.
type scramClient struct {
	*scram.ClientConversation
}

func (s *scramClient) Begin(user, password, authzid string) error {
	hash := scram.SHA256
	if mechanism == "SCRAM-SHA-512" {
		hash = scram.SHA512
	}
	client, err := hash.NewClient(user, password, authzid)
	if err == nil {
		s.ClientConversation = client.NewConversation()
	}
	return err
}

type member func(string)

func (member) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (member) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (seen member) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		seen(string(message.Value))
		session.MarkMessage(message, "")
	}
	return nil
}
