package main

import (
	"crypto/tls"
	"crypto/x509"
	"os"
)

// How to connect: SECURITY_CA and SECURITY_CERTIFICATE are PEM files (the latter with its key), SECURITY_MECHANISM,
// SECURITY_USER and SECURITY_PASSWORD a login by SASL, or SECURITY_TOKEN_FILE one by an access token, which is read
// at each login; what is unset is not wanted.
var mechanism, user, password = os.Getenv("SECURITY_MECHANISM"), os.Getenv("SECURITY_USER"), os.Getenv("SECURITY_PASSWORD")
var tokenFile = os.Getenv("SECURITY_TOKEN_FILE")

// The access token of now.
func accessToken() (string, error) {
	token, err := os.ReadFile(tokenFile)
	return string(token), err
}

// The configuration of TLS, nil without it.
func tlsConfig() *tls.Config {
	path := os.Getenv("SECURITY_CA")
	if path == "" {
		return nil
	}
	pem, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	config.RootCAs.AppendCertsFromPEM(pem)
	if own := os.Getenv("SECURITY_CERTIFICATE"); own != "" {
		pair, err := tls.LoadX509KeyPair(own, own)
		if err != nil {
			panic(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config
}
