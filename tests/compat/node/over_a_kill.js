// Produces with all codecs and consumes in a group; the test kills a node when this prints "half" and starts
// it again.
// Ends with one JSON line: how many records were sent, seen, and seen more than once.
const { Kafka, CompressionTypes, logLevel } = require('kafkajs')
const { codecs } = require('./codecs.js')
const security = require('./security.js')

const [bootstrap, topic] = process.argv.slice(2)
const HALF = 300
const retry = { initialRetryTime: 50, maxRetryTime: 500, retries: 60 }
const kafka = new Kafka({ clientId: 'survivor', brokers: bootstrap.split(','), retry, logLevel: logLevel.NOTHING, ...security })

async function until(what, condition) {
  const deadline = Date.now() + 60000
  while (!condition()) {
    if (Date.now() > deadline) throw new Error(`timed out waiting for ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

async function main() {
  const admin = kafka.admin()
  await admin.connect()
  await admin.createTopics({ topics: [{ topic, numPartitions: 3 }] })
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1, retry })
  await producer.connect()
  const seen = new Map()
  const consumer = kafka.consumer({ groupId: topic, sessionTimeout: 6000, heartbeatInterval: 300, retry })
  await consumer.connect()
  await consumer.subscribe({ topic, fromBeginning: true })
  await consumer.run({ autoCommitInterval: 100, eachMessage: async ({ message }) => {
    const value = message.value.toString()
    seen.set(value, (seen.get(value) || 0) + 1)
  } })
  let sent = 0
  const send = async (count) => {
    for (const end = sent + count; sent < end; sent += 10) {
      // kafkajs forgets part of a send to several partitions when one's new leader has answered for another
      // already (sendMessages.js): each send goes to one partition.
      const partition = (sent / 10) % 3
      const messages = Array.from({ length: 10 }, (_, i) => ({ partition, value: String(sent + i) }))
      const compression = CompressionTypes[codecs[(sent / 10) % codecs.length]]
      await producer.send({ topic, acks: -1, messages, compression })
    }
  }
  await send(HALF)
  await until('the first half', () => seen.size === sent)
  console.log('half')
  await send(HALF) // the node is killed and started again while this goes on
  await until('the second half', () => seen.size === sent)
  // Nothing is disconnected: kafkajs spins for ever when the nodes that a consumer fetches from change while it ends
  // (fetchManager.js starts fetchers anew then, and runner.js answers them at once), as the killed one comes back.
  const twice = [...seen.values()].filter((n) => n > 1).length
  console.log(JSON.stringify({ sent, seen: seen.size, twice }))
}

main().then(() => process.exit(0), (error) => { console.error(error); process.exit(1) })
