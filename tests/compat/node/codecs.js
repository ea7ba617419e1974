// kafkajs compresses gzip itself; other codecs are plugged in. @kafkajs/zstd and kafkajs-lz4 are native modules
// that do not build for current Node.js; lz4js links its blocks, which Kafka and kept refuse.
const { CompressionTypes, CompressionCodecs } = require('kafkajs')
const lz4 = require('lz4-napi')
const zstd = require('@bokuweb/zstd-wasm')

const ready = zstd.init() // once: a second one breaks what the first has allocated

CompressionCodecs[CompressionTypes.Snappy] = require('kafkajs-snappy')
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: async (encoder) => lz4.compressFrame(encoder.buffer),
  decompress: async (buffer) => lz4.decompressFrame(buffer),
})
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async (encoder) => { await ready; return Buffer.from(zstd.compress(encoder.buffer)) },
  decompress: async (buffer) => { await ready; return Buffer.from(zstd.decompress(buffer)) },
})

exports.codecs = ['None', 'GZIP', 'Snappy', 'LZ4', 'ZSTD']
