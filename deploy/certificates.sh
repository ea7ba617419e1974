#!/bin/sh
# Certificates of deploy/compose.secure.yaml: /tls/authority has the authority and its key, /tls/NAME what the
# node NAME gets, /tls/trust, where it is mounted, the authority's certificate for everybody. The authority is made once, a node's certificate each time; it is its own host name's, localhost's
# and EXTERNAL_HOST's. Needs OpenSSL 3.
set -eu
umask 077
: "${EXTERNAL_HOST:=localhost}"
owner=10001:10001
ca=/tls/authority/ca.pem key=/tls/authority/ca-key.pem
curve="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc"

if [ ! -s $ca ]; then
    openssl req -x509 $curve -sha256 -days 3650 -subj "/CN=kept-authority" \
        -addext keyUsage=critical,keyCertSign,cRLSign -keyout $key -out $ca.new
    mv $ca.new $ca
fi

if [ -d /tls/trust ]; then
    install -m 0444 $ca /tls/trust/ca.pem
fi

case $EXTERNAL_HOST in
    *:*) outside=IP:$EXTERNAL_HOST ;;
    *[!0-9.]*) outside=DNS:$EXTERNAL_HOST ;;
    *) outside=IP:$EXTERNAL_HOST ;;
esac

for node; do
    store=/tls/$node work=$(mktemp -d)
    cat >"$work/extensions" <<END
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth,clientAuth
subjectAltName=DNS:$node,DNS:localhost,IP:127.0.0.1,$outside
END
    openssl req -new $curve -sha256 -subj "/CN=kept-node" -keyout "$work/key" -out "$work/request"
    openssl x509 -req -in "$work/request" -CA $ca -CAkey $key -sha256 -days 365 -extfile "$work/extensions" -out "$work/certificate"
    # A run that was killed leaves files of the nodes' user, whom this one may not write for.
    rm -f "$store/node.pem.new" "$store/ca.pem.new"
    # Nodes read both while they run: each is whole from its first moment.
    cat "$work/key" "$work/certificate" >"$store/node.pem.new"
    cat $ca >"$store/ca.pem.new"
    chown $owner "$store/node.pem.new" "$store/ca.pem.new"
    mv "$store/ca.pem.new" "$store/ca.pem"
    mv "$store/node.pem.new" "$store/node.pem"
    rm -r "$work"
    echo "$node has a new certificate"
done
