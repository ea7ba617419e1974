package main

import (
	"context"
	"errors"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

type franz struct {
	place
	producers map[string]*kgo.Client
}

func franzSecurity() []kgo.Opt {
	options := []kgo.Opt{}
	if config := tlsConfig(); config != nil {
		options = append(options, kgo.DialTLSConfig(config))
	}
	auth := scram.Auth{User: user, Pass: password}
	switch mechanism {
	case "PLAIN":
		options = append(options, kgo.SASL(plain.Auth{User: user, Pass: password}.AsMechanism()))
	case "SCRAM-SHA-256":
		options = append(options, kgo.SASL(auth.AsSha256Mechanism()))
	case "SCRAM-SHA-512":
		options = append(options, kgo.SASL(auth.AsSha512Mechanism()))
	case "OAUTHBEARER":
		options = append(options, kgo.SASL(oauth.Oauth(func(context.Context) (oauth.Auth, error) {
			token, err := accessToken()
			return oauth.Auth{Token: token}, err
		})))
	}
	return options
}

func newFranz(where place) (library, error) {
	made := &franz{where, map[string]*kgo.Client{}}
	byName := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	for name, codec := range byName {
		client, err := kgo.NewClient(append(franzSecurity(), kgo.SeedBrokers(where.bootstrap...),
			kgo.DefaultProduceTopic(where.topic), kgo.ProducerBatchCompression(codec),
			kgo.RecordPartitioner(kgo.RoundRobinPartitioner()))...)
		if err != nil {
			return nil, err
		}
		made.producers[name] = client
	}
	return made, nil
}

func (f *franz) Create(ctx context.Context) error {
	made, err := kadm.NewClient(f.producers["none"]).CreateTopic(ctx, partitions, -1, nil, f.topic)
	return errors.Join(err, made.Err)
}

func (f *franz) Send(ctx context.Context, codec string, values []string) error {
	records := make([]*kgo.Record, len(values))
	for i, value := range values {
		records[i] = kgo.StringRecord(value)
	}
	return f.producers[codec].ProduceSync(ctx, records...).FirstErr()
}

func (f *franz) Read(ctx context.Context, seen func(string)) error {
	client, err := kgo.NewClient(append(franzSecurity(), kgo.SeedBrokers(f.bootstrap...),
		kgo.ConsumerGroup(f.topic), kgo.ConsumeTopics(f.topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.AutoCommitInterval(autoCommit))...)
	if err != nil {
		return err
	}
	defer client.Close()
	for ctx.Err() == nil {
		fetches := client.PollFetches(ctx)
		if ctx.Err() == nil && len(fetches.Errors()) > 0 {
			return fetches.Errors()[0].Err
		}
		fetches.EachRecord(func(record *kgo.Record) { seen(string(record.Value)) })
	}
	return nil
}
