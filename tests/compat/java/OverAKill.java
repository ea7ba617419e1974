// Produces with all codecs and consumes in a group; the test kills a node when this prints "half" and starts it again.
// Arguments: a file with the properties of a client, bootstrap, topic. Ends with one JSON line: how many records were
// sent, seen, and seen more than once.
import java.io.IOException;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.errors.RebalanceInProgressException;
import org.apache.kafka.common.errors.RetriableException;

public class OverAKill {
    static final int HALF = 300;
    static final int AT_ONCE = 10;
    static final int PARTITIONS = 3;
    static final long DEADLINE_S = 60;
    static final long PAUSE_MS = 100; // a second half takes some seconds: the node dies while it is sent
    static final String[] CODECS = {"none", "gzip", "snappy", "lz4", "zstd"};

    final String topic;
    final Properties common = new Properties();
    final List<KafkaProducer<String, String>> producers = new ArrayList<>();
    final Map<String, Integer> seen = new ConcurrentHashMap<>();
    volatile boolean done = false;
    volatile Throwable failed = null;
    int sent = 0;

    OverAKill(String properties, String bootstrap, String topic) throws IOException {
        this.topic = topic;
        try (Reader file = Files.newBufferedReader(Path.of(properties))) {
            common.load(file);
        }
        common.put("bootstrap.servers", bootstrap);
        common.put("reconnect.backoff.max.ms", "500");
        for (String codec : CODECS) {
            Properties settings = with("acks", "all", "enable.idempotence", "true", "compression.type", codec);
            for (String kind : new String[] {"key", "value"})
                settings.put(kind + ".serializer", "org.apache.kafka.common.serialization.StringSerializer");
            producers.add(new KafkaProducer<>(settings));
        }
    }

    Properties with(String... more) {
        Properties settings = new Properties();
        settings.putAll(common);
        for (int i = 0; i < more.length; i += 2) settings.put(more[i], more[i + 1]);
        return settings;
    }

    void create() throws Exception {
        try (Admin admin = Admin.create(with())) {
            NewTopic wanted = new NewTopic(topic, Optional.of(PARTITIONS), Optional.empty());
            admin.createTopics(List.of(wanted)).all().get(DEADLINE_S, TimeUnit.SECONDS);
        }
    }

    void read() {
        Properties settings = with("group.id", topic, "auto.offset.reset", "earliest", "enable.auto.commit", "false",
            "session.timeout.ms", "6000", "heartbeat.interval.ms", "300");
        for (String kind : new String[] {"key", "value"})
            settings.put(kind + ".deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings)) {
            consumer.subscribe(List.of(topic));
            while (!done) {
                ConsumerRecords<String, String> records = consumer.poll(Duration.ofMillis(50));
                for (ConsumerRecord<String, String> record : records) seen.merge(record.value(), 1, Integer::sum);
                if (records.isEmpty()) continue;
                try {
                    consumer.commitSync();
                } catch (CommitFailedException | RebalanceInProgressException | RetriableException error) {
                    // What comes next is committed with it.
                }
            }
        } catch (Throwable error) {
            failed = error;
        }
    }

    void send(int count, long pauseMs) throws Exception {
        for (int end = sent + count; sent < end; sent += AT_ONCE) {
            KafkaProducer<String, String> producer = producers.get(sent / AT_ONCE % CODECS.length);
            List<Future<?>> acknowledged = new ArrayList<>();
            for (int i = 0; i < AT_ONCE; i++)
                acknowledged.add(producer.send(
                    new ProducerRecord<>(topic, sent / AT_ONCE % PARTITIONS, null, String.valueOf(sent + i))));
            for (Future<?> one : acknowledged) one.get(DEADLINE_S, TimeUnit.SECONDS);
            Thread.sleep(pauseMs);
        }
    }

    void untilAllIsSeen() throws Exception {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(DEADLINE_S);
        while (seen.size() < sent) {
            if (failed != null) throw new Exception("reading failed", failed);
            if (System.nanoTime() > deadline) throw new Exception(seen.size() + " of " + sent + " are seen");
            Thread.sleep(20);
        }
    }

    public static void main(String[] args) throws Exception {
        OverAKill story = new OverAKill(args[0], args[1], args[2]);
        story.create();
        Thread reader = new Thread(story::read);
        reader.setDaemon(true);
        reader.start();
        story.send(HALF, 0);
        story.untilAllIsSeen();
        System.out.println("half");
        story.send(HALF, PAUSE_MS);
        story.untilAllIsSeen();
        story.done = true;
        reader.join();
        for (KafkaProducer<String, String> producer : story.producers) producer.close(Duration.ofSeconds(5));
        long twice = story.seen.values().stream().filter(times -> times > 1).count();
        System.out.printf("{\"sent\": %d, \"seen\": %d, \"twice\": %d}%n", story.sent, story.seen.size(), twice);
    }
}
