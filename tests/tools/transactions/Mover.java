// Moves records of a topic into another in transactions, each once. Arguments: bootstrap, input, output, group (and
// transactional id), how many records there are. Every third transaction is aborted at first. It prints "quarter" when
// so much was moved, makes a new producer and consumer in the middle and after an error that is fatal, and ends when
// the group has committed everything.
import java.time.Duration;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;

public class Mover implements AutoCloseable {
    static final int PARTITIONS = 4;
    static int transactions = 0;
    final String source;
    final String target;
    final KafkaProducer<byte[], byte[]> producer;
    final KafkaConsumer<byte[], byte[]> consumer;

    Mover(String bootstrap, String source, String target, String name) {
        this.source = source;
        this.target = target;
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        for (String kind : new String[] {"key", "value"}) {
            settings.put(kind + ".serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
            settings.put(kind + ".deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        }
        settings.put("transactional.id", name);
        settings.put("transaction.timeout.ms", "20000");
        settings.put("group.id", name);
        settings.put("isolation.level", "read_committed");
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("max.poll.records", "10");
        settings.put("session.timeout.ms", "6000");
        settings.put("heartbeat.interval.ms", "300");
        settings.put("reconnect.backoff.max.ms", "500");
        producer = new KafkaProducer<>(settings);
        producer.initTransactions();
        consumer = new KafkaConsumer<>(settings);
        consumer.subscribe(java.util.List.of(source));
    }

    void step() {
        ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
        if (records.isEmpty()) return;
        producer.beginTransaction();
        Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
        for (ConsumerRecord<byte[], byte[]> record : records) {
            producer.send(new ProducerRecord<>(target, record.partition(), null, record.value()));
            offsets.put(new TopicPartition(source, record.partition()), new OffsetAndMetadata(record.offset() + 1));
        }
        producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
        producer.flush();
        if (++transactions % 3 != 1) {
            producer.commitTransaction();
            return;
        }
        producer.abortTransaction();
        rewind();
    }

    void rewind() {
        Map<TopicPartition, OffsetAndMetadata> committed = consumer.committed(consumer.assignment());
        for (TopicPartition place : consumer.assignment()) {
            OffsetAndMetadata at = committed.get(place);
            consumer.seek(place, at == null ? 0 : at.offset());
        }
    }

    long moved() {
        Set<TopicPartition> all = new HashSet<>();
        for (int number = 0; number < PARTITIONS; number++) all.add(new TopicPartition(source, number));
        return consumer.committed(all).values().stream().mapToLong(at -> at == null ? 0 : at.offset()).sum();
    }

    @Override
    public void close() {
        consumer.close(Duration.ofSeconds(5));
        producer.close(Duration.ofSeconds(5));
    }

    public static void main(String[] args) {
        long records = Long.parseLong(args[4]);
        boolean told = false;
        boolean replaced = false;
        Mover mover = new Mover(args[0], args[1], args[2], args[3]);
        long moved = mover.moved();
        while (moved < records) {
            if (moved >= records / 4 && !told) {
                told = true;
                System.out.println("quarter");
            }
            boolean fatal = moved >= records / 2 && !replaced;
            replaced |= fatal;
            if (!fatal) {
                try {
                    mover.step();
                } catch (KafkaException error) {
                    System.err.println(error);
                    try {
                        mover.producer.abortTransaction();
                        mover.rewind();
                    } catch (KafkaException | IllegalStateException second) {
                        fatal = true;
                    }
                }
            }
            if (fatal) {
                mover.close();
                mover = new Mover(args[0], args[1], args[2], args[3]);
            }
            moved = mover.moved();
        }
        mover.close();
    }
}
