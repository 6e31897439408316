#!/bin/sh
# Certificates for one Dask cluster: make-certificates.sh [FOLDER] [DAYS]
#
# Writes ca.pem, cert.pem and key.pem, for scheduler, workers and client alike. The authority's own key is thrown away, so
# that nobody can make more of them; for another cluster, or when they are out of date, run it again.
set -eu
folder=${1:-certificates} days=${2:-365}
umask 077
mkdir -p "$folder"
if [ -e "$folder/key.pem" ]; then
    echo "make-certificates: $folder has certificates already; remove them first" >&2
    exit 1
fi
private=$(mktemp -d)
trap 'rm -rf "$private"' EXIT
printf 'basicConstraints=CA:FALSE\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n' > "$private/extensions"
{
    openssl req -x509 -newkey rsa:3072 -nodes -days "$days" -subj "/CN=daskrr authority" \
        -addext keyUsage=critical,keyCertSign -keyout "$private/ca-key.pem" -out "$folder/ca.pem"
    openssl req -newkey rsa:3072 -nodes -subj "/CN=daskrr" -keyout "$folder/key.pem" -out "$private/request.pem"
    openssl x509 -req -in "$private/request.pem" -CA "$folder/ca.pem" -CAkey "$private/ca-key.pem" -CAcreateserial \
        -CAserial "$private/serial" -days "$days" -extfile "$private/extensions" -out "$folder/cert.pem"
} 2> "$private/log" || { cat "$private/log" >&2; exit 1; }
echo "$folder: ca.pem, cert.pem and key.pem, good for $days days"
