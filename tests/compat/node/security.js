// How to connect: SECURITY_CA and SECURITY_CERTIFICATE are PEM files (the latter with its key), SECURITY_MECHANISM,
// SECURITY_USER and SECURITY_PASSWORD a login by SASL, or SECURITY_TOKEN_FILE one by an access token, which is read
// at each login; what is unset is not wanted.
const { readFileSync } = require('fs')

const { SECURITY_CA: ca, SECURITY_CERTIFICATE: own, SECURITY_MECHANISM: mechanism, SECURITY_TOKEN_FILE: tokenFile } = process.env
const pem = own && readFileSync(own)
const login = tokenFile
  ? { oauthBearerProvider: async () => ({ value: readFileSync(tokenFile, 'utf8') }) }
  : { username: process.env.SECURITY_USER, password: process.env.SECURITY_PASSWORD }

module.exports = {
  ...(ca && { ssl: { ca: [readFileSync(ca)], ...(own && { key: pem, cert: pem }) } }),
  ...(mechanism && { sasl: { mechanism: mechanism.toLowerCase(), ...login } }),
  ...(tokenFile && { reauthenticationThreshold: 2000 }), // 10 s unless given: for ever, with tokens that last less
}
