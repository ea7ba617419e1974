// Creates topics, produces with each codec, consumes in a group whose members come and go, commits and
// resumes. Prints one JSON line; exits 1 with the reason on the first difference.
const { Kafka, CompressionTypes, logLevel } = require('kafkajs')
const { codecs: CODECS } = require('./codecs.js')

const [bootstrap, prefix] = process.argv.slice(2)
const kafka = new Kafka({ clientId: 'compat', brokers: [bootstrap], logLevel: logLevel.ERROR })
const assert = (ok, what) => { if (!ok) throw new Error(what) }
const until = async (what, condition) => {
  const deadline = Date.now() + 40000
  while (!condition()) {
    assert(Date.now() < deadline, `timed out waiting for ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

async function codecs(admin) {
  const done = []
  for (const codec of CODECS) {
    for (const idempotent of [false, true]) {
      const topic = `${prefix}-${codec}-${idempotent}`
      await admin.createTopics({ topics: [{ topic, numPartitions: 1 }] })
      const producer = kafka.producer({ idempotent, maxInFlightRequests: idempotent ? 1 : 5 })
      await producer.connect()
      const messages = Array.from({ length: 500 }, (_, i) => ({ key: `k${i}`, value: `v${i}`, headers: { h: 'x' } }))
      await producer.send({ topic, messages, acks: -1, compression: CompressionTypes[codec] })
      await producer.disconnect()
      const consumer = kafka.consumer({ groupId: topic })
      await consumer.connect()
      await consumer.subscribe({ topic, fromBeginning: true })
      const got = []
      await consumer.run({ eachMessage: async ({ message }) => { got.push(message) } })
      await until(topic, () => got.length >= 500)
      await consumer.disconnect()
      assert(got.length === 500, `${topic}: ${got.length} records`)
      got.forEach((m, i) => assert(m.key.toString() === `k${i}` && m.value.toString() === `v${i}` && m.headers.h.toString() === 'x', `${topic}: record ${i}`))
      done.push(`${codec}${idempotent ? '+idempotent' : ''}`)
    }
  }
  return done
}

async function groups(admin) {
  const topic = `${prefix}-group`
  await admin.createTopics({ topics: [{ topic, numPartitions: 4 }] })
  const producer = kafka.producer()
  await producer.connect()
  const seen = new Map()
  let sent = 0
  const send = async (n) => {
    const messages = Array.from({ length: n }, () => ({ value: String(sent++) }))
    await producer.send({ topic, messages })
  }
  const member = async () => {
    const consumer = kafka.consumer({ groupId: topic, sessionTimeout: 6000, heartbeatInterval: 300, rebalanceTimeout: 6000 })
    await consumer.connect()
    await consumer.subscribe({ topic, fromBeginning: true })
    await consumer.run({ autoCommitThreshold: 1, eachMessage: async ({ message }) => {
      const v = message.value.toString()
      seen.set(v, (seen.get(v) || 0) + 1)
    } })
    return consumer
  }
  const one = await member()
  await send(100)
  await until('the first member', () => seen.size === sent)
  const two = await member()
  await send(100)
  await until('two members', () => seen.size === sent)
  await one.disconnect()
  await send(100)
  await until('the second member alone', () => seen.size === sent)
  await two.disconnect()
  const offsets = await admin.fetchOffsets({ groupId: topic, topics: [topic] })
  const committed = offsets[0].partitions.reduce((n, p) => n + Math.max(0, Number(p.offset)), 0)
  assert(committed === sent, `committed ${committed} of ${sent}`)
  const three = await member()
  await send(50)
  await until('resuming', () => seen.size === sent)
  await three.disconnect()
  await producer.disconnect()
  const repeated = [...seen.values()].filter((n) => n > 2).length
  assert(repeated === 0, `${repeated} records came more than twice`)
  return sent
}

async function main() {
  const admin = kafka.admin()
  await admin.connect()
  const done = await codecs(admin)
  const records = await groups(admin)
  await admin.deleteTopics({ topics: [`${prefix}-group`] })
  await admin.disconnect()
  console.log(JSON.stringify({ codecs: done, grouped: records }))
}

main().then(() => process.exit(0), (error) => { console.error(error); process.exit(1) })
