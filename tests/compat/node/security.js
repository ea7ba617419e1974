// How to connect: SECURITY_CA and SECURITY_CERTIFICATE are PEM files (the latter with its key), SECURITY_MECHANISM,
// SECURITY_USER and SECURITY_PASSWORD a login by SASL; what is unset is not wanted.
const { readFileSync } = require('fs')

const { SECURITY_CA: ca, SECURITY_CERTIFICATE: own, SECURITY_MECHANISM: mechanism } = process.env
const pem = own && readFileSync(own)

module.exports = {
  ...(ca && { ssl: { ca: [readFileSync(ca)], ...(own && { key: pem, cert: pem }) } }),
  ...(mechanism && { sasl: { mechanism: mechanism.toLowerCase(), username: process.env.SECURITY_USER, password: process.env.SECURITY_PASSWORD } }),
}
