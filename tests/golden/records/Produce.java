import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Produce BOOTSTRAP: the records of capture.py, written by Apache Kafka's own producer. */
public class Produce {
    static ProducerRecord<byte[], byte[]> record(String topic, int i) {
        List<Header> headers = new ArrayList<>();
        if (i % 2 == 0) {
            headers.add(new RecordHeader("n", ("" + i).getBytes(StandardCharsets.UTF_8)));
            headers.add(new RecordHeader("null", null));
        }
        byte[] value = i % 10 == 9 ? null : ("value-" + i + "-").repeat(i % 5).getBytes(StandardCharsets.UTF_8);
        return new ProducerRecord<>(topic, 0, 1700000000000L + i, ("key-" + i % 7).getBytes(StandardCharsets.UTF_8), value, headers);
    }

    static KafkaProducer<byte[], byte[]> producer(String bootstrap, String codec, String transactionalId) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("compression.type", codec);
        settings.put("linger.ms", "500");
        if (transactionalId != null)
            settings.put("transactional.id", transactionalId);
        return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

    static void send(KafkaProducer<byte[], byte[]> producer, String topic, int from, int to) {
        for (int i = from; i < to; i++)
            producer.send(record(topic, i));
        producer.flush();
    }

    public static void main(String[] args) {
        for (String codec : new String[] {"none", "gzip", "snappy", "lz4", "zstd"})
            try (KafkaProducer<byte[], byte[]> producer = producer(args[0], codec, null)) {
                send(producer, "java-" + codec, 0, 60);
                send(producer, "java-" + codec, 60, 100);
                if (codec.equals("zstd"))
                    send(producer, "append-time", 0, 100);
            }
        try (KafkaProducer<byte[], byte[]> producer = producer(args[0], "gzip", "golden")) {
            producer.initTransactions();
            for (int from = 0; from < 100; from += 20) {
                producer.beginTransaction();
                send(producer, "transactional", from, from + 20);
                if (from == 40)
                    producer.abortTransaction();
                else
                    producer.commitTransaction();
            }
        }
        try (KafkaProducer<byte[], byte[]> producer = producer(args[0], "none", null)) {
            for (int from = 0; from < 100; from += 20)
                send(producer, "compacted", from, from + 20);
        }
    }
}
