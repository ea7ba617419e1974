// A client generated from broker.proto: makes a topic, produces, consumes, follows; says what it saw
// as lines of JSON. Usage: client HOST:PORT TOPIC
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"kept.local/client/broker"
)

func say(kind string, fields map[string]any) {
	fields["kind"] = kind
	line, err := json.Marshal(fields)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(line))
}

// read says every record of a partition, until the stream ends or its context does.
func read(ctx context.Context, client broker.BrokerClient, request *broker.ConsumeRequest, kind string) error {
	stream, err := client.Consume(ctx, request)
	if err != nil {
		return err
	}
	for {
		record, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		say(kind, map[string]any{
			"partition": request.Partition, "offset": record.GetOffset(), "key": string(record.Key),
			"payload": string(record.Payload), "tombstone": record.Payload == nil,
			"headers": len(record.Headers), "timestamp": record.GetTimestamp(),
		})
	}
}

func main() {
	target, topic := os.Args[1], os.Args[2]
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := broker.NewBrokerClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()

	made, err := client.CreateTopic(ctx, &broker.CreateTopicRequest{Topic: topic, Partitions: 3})
	if err != nil {
		log.Fatal(err)
	}
	say("created", map[string]any{"topic": made.Topic, "partitions": made.Partitions})

	for n := range 20 {
		request := &broker.ProduceRequest{Topic: topic, Key: fmt.Appendf(nil, "key-%d", n)}
		if n%5 != 0 {
			request.Payload = fmt.Appendf(nil, "value-%d", n)
			request.Headers = []*broker.Header{{Key: "n", Value: []byte{byte(n)}}}
		}
		done, err := client.Produce(ctx, request)
		if err != nil {
			log.Fatal(err)
		}
		say("produced", map[string]any{
			"key": string(request.Key), "partition": done.GetPartition(), "offset": done.GetOffset(),
		})
	}
	for partition := range made.Partitions {
		request := &broker.ConsumeRequest{Topic: topic, Partition: partition}
		if err := read(ctx, client, request, "record"); err != nil {
			log.Fatal(err)
		}
	}

	_, err = client.Produce(ctx, &broker.ProduceRequest{Topic: "no-such-topic", Payload: []byte("v")})
	say("refused", map[string]any{"code": status.Code(err).String(), "message": err.Error()})

	brief, end := context.WithTimeout(ctx, 500*time.Millisecond)
	defer end()
	err = read(brief, client, &broker.ConsumeRequest{Topic: topic, Follow: true}, "followed")
	say("ended", map[string]any{"deadline": status.Code(err) == codes.DeadlineExceeded})
}
